"""Dense and sparse gradients: sums over replicas, norms, clipping."""

import tensorflow as tf

from estimator_accum._graph import ancestors

Gradient = tf.Tensor | tf.IndexedSlices


def sum_over_replicas(tensors: list[Gradient]) -> list[Gradient]:
    """Sums each tensor over all replicas; call it in replica context."""
    context = tf.distribute.get_replica_context()
    if not tensors or context.num_replicas_in_sync == 1:
        return tensors
    # all_reduce follows each tensor's gradient path back to variables, and does not
    # recognize other replicas' copies of them.
    tensors = [_map_values(tf.stop_gradient, tensor) for tensor in tensors]
    if are_cpus_of_one_process(context.strategy):
        return context.merge_call(_sum_on_one_device, args=(tensors,))
    dtypes = {tensor.dtype: None for tensor in tensors}  # a collective takes one
    for dtype in dtypes:
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        sums = context.all_reduce(
            tf.distribute.ReduceOp.SUM, [tensors[i] for i in places]
        )
        for i, value in zip(places, sums, strict=True):
            tensors[i] = value
    return tensors


def are_cpus_of_one_process(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether all replicas, at least two, train on CPUs of this process.

    TensorFlow's collectives, the default of a MirroredStrategy that was made eagerly,
    then wait forever in a Session with fewer CPU devices than replicas, and a Session
    has one CPU device by default.
    """
    devices = strategy.extended.worker_devices
    is_one_process = len(devices) == strategy.num_replicas_in_sync > 1
    return is_one_process and all("CPU" in device.upper() for device in devices)


def _sum_on_one_device(strategy, tensors: list[Gradient]) -> list[Gradient]:
    """Sums each tensor without a collective, in cross-replica context."""
    del strategy
    return tf.distribute.ReductionToOneDevice().batch_reduce(
        tf.distribute.ReduceOp.SUM, [(tensor, tensor) for tensor in tensors]
    )


def cast(gradient: Gradient, dtype: tf.DType) -> Gradient:
    """Returns the gradient in `dtype`."""
    return _map_values(lambda values: tf.cast(values, dtype), gradient)


def scaled(gradient: Gradient, factor: tf.Tensor) -> Gradient:
    """Returns factor * gradient, in the gradient's dtype."""
    return _map_values(lambda v: v * tf.cast(factor, v.dtype), gradient)


def values_of(gradient: Gradient) -> tf.Tensor:
    """Returns a dense gradient unchanged, and the values of a sparse one's rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _map_values(function, gradient: Gradient) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return function(gradient)


def half_squared_norms(
    gradients: list[Gradient], dtype: tf.DType, has_unique_rows: bool = False
) -> tf.Tensor:
    """Returns sum(g**2) / 2 of each gradient, in one pass.

    Args:
        gradients: Tensors or `IndexedSlices`.
        dtype: Dtype of the result.
        has_unique_rows: Whether no `IndexedSlices` names a row twice.

    Returns:
        `dtype` [gradients].
    """
    halves = []
    for value in gradients:
        if isinstance(value, tf.IndexedSlices):
            value = value.values if has_unique_rows else _sum_duplicates(value)
        if value.dtype in (tf.float16, tf.bfloat16):
            value = tf.cast(value, dtype)  # squares may overflow float16
        halves.append(tf.cast(tf.nn.l2_loss(value), dtype))
    return tf.stack(halves)


def global_norm(
    gradients: list[Gradient], halves: tf.Tensor, half_of_slices: tf.Tensor | None
) -> tf.Tensor:
    """Returns the norm of all gradients together, a scalar.

    Args:
        gradients: Tensors or `IndexedSlices`.
        halves: Their `half_squared_norms`.
        half_of_slices: Sum of `half_squared_norms` of the slices from which the sparse
            gradients were summed, to count in place of theirs; None counts theirs.
    """
    half = tf.reduce_sum(halves)
    if half_of_slices is not None:
        dense = [i for i, g in enumerate(gradients) if isinstance(g, tf.Tensor)]
        half = half_of_slices + tf.reduce_sum(tf.gather(halves, dense))
    return tf.sqrt(half * tf.constant(2.0, halves.dtype))


def scale_and_clip(sums, factor, clip_norm, norm):
    """Returns (clip(factor * sums), norm of factor * sums), in one pass.

    Args:
        sums: Tensors or `IndexedSlices`.
        factor: Scalar of the dtype of `norm`; None means exactly 1.
        clip_norm: Largest global norm; None does not clip.
        norm: Global norm of `sums`.
    """
    if factor is not None:
        norm = norm * factor
    scale = factor
    if clip_norm is not None:
        # Bit for bit as tf.clip_by_global_norm: 1 if the norm is within the limit, NaN
        # if it is not finite.
        one = tf.constant(1.0, norm.dtype)
        clip = clip_norm * tf.minimum(one / norm, one / clip_norm)
        clip += norm - norm
        scale = clip if factor is None else clip * factor
    if scale is None:
        return sums, norm
    return [scaled(value, scale) for value in sums], norm


def _sum_duplicates(slices: tf.IndexedSlices) -> tf.Tensor:
    """Returns one value per row: a row that is looked up twice has the sum of both."""
    unique, positions = tf.unique(slices.indices)
    return tf.math.unsorted_segment_sum(slices.values, positions, tf.size(unique))


def loss_divisor_of(gradients: list[Gradient]) -> int:
    """Returns the number by which `compute_gradients` divided the loss.

    In Estimator's model_fns TensorFlow divides by the number of replicas, so that sums
    over replicas are means, and the graph only records whether its last call did. These
    gradients may come from another call, or from `tf.gradients`, so the function looks
    for the factor 1 / replicas among their ancestors.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas == 1:
        return 1
    needed = ancestors([values_of(gradient).op for gradient in gradients])
    return replicas if any(_scales_a_loss(op, replicas) for op in needed) else 1


def _scales_a_loss(operation: tf.Operation, replicas: int) -> bool:
    if operation.type != "Const":
        return False
    (constant,) = operation.outputs
    if constant.shape.rank != 0 or not constant.dtype.is_floating:
        return False
    value = tf.get_static_value(constant)
    return value == value.dtype.type(1.0 / replicas) and any(
        frame.name == "_scale_loss"
        for frame in operation.traceback or ()  # a copied operation has none
    )
