"""What holds for a gradient whether it is dense or sparse."""

import tensorflow as tf

Gradient = tf.Tensor | tf.IndexedSlices


def sum_over_replicas(tensors: list[Gradient]) -> list[Gradient]:
    """Sums each tensor over all replicas; call in replica context."""
    context = tf.distribute.get_replica_context()
    if not tensors or context.num_replicas_in_sync == 1:
        return tensors
    # all_reduce looks for the variables that other replicas' tensors depend on, as far as
    # gradients would flow, and does not know those replicas' names of them.
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
    """Whether several replicas train on CPUs of this process, and no others do.

    TensorFlow's collectives, the default of a MirroredStrategy that was made eagerly,
    wait there for ever in a Session that has fewer CPUs than the strategy has replicas,
    and a Session has one unless it is told.
    """
    devices = strategy.extended.worker_devices
    is_one_process = len(devices) == strategy.num_replicas_in_sync > 1
    return is_one_process and all("CPU" in device.upper() for device in devices)


def _sum_on_one_device(strategy, tensors: list[Gradient]) -> list[Gradient]:
    """Cross-replica: sums each tensor without a collective."""
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
    """Returns a dense gradient itself, of a sparse one the rows that it names."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _map_values(function, gradient: Gradient) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return function(gradient)
