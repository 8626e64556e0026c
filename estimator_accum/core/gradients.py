"""Arithmetic of gradients, dense or sparse.

A sparse gradient has a value for each row that was looked up.
"""

import tensorflow as tf

Gradient = tf.Tensor | tf.IndexedSlices


def dtype_of_sum(dtype: tf.DType) -> tf.DType:
    """Returns the dtype that a sum of gradients needs: in bfloat16, 256 + 1 is 256."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def cast(gradient: Gradient, dtype: tf.DType) -> Gradient:
    """Returns the gradient in `dtype`."""
    return map_values(lambda values: tf.cast(values, dtype), gradient)


def scaled(gradient: Gradient, factor: tf.Tensor) -> Gradient:
    """Returns factor * gradient, in the gradient's dtype."""
    return map_values(lambda v: v * tf.cast(factor, v.dtype), gradient)


def values_of(gradient: Gradient) -> tf.Tensor:
    """Returns a dense gradient unchanged, and the values of a sparse one's rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def map_values(function, gradient: Gradient) -> Gradient:
    """Returns function(gradient), on the values of a sparse one."""
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
            value = (value if has_unique_rows else with_unique_rows(value)).values
        if value.dtype in (tf.float16, tf.bfloat16):
            value = tf.cast(value, dtype)  # squares may overflow float16
        halves.append(tf.cast(tf.nn.l2_loss(value), dtype))
    return tf.stack(halves)


def global_norm(
    halves: tf.Tensor, half_of_slices: tf.Tensor | None, are_slices: list[bool] = ()
) -> tf.Tensor:
    """Returns the norm of all gradients together, a scalar.

    Args:
        halves: Their `half_squared_norms`.
        half_of_slices: Sum of `half_squared_norms` of the slices from which sparse
            gradients were summed, to count in place of theirs; None counts theirs.
        are_slices: Whether each gradient is one of these.
    """
    half = tf.reduce_sum(halves)
    if half_of_slices is not None:
        others = [i for i, is_of_slices in enumerate(are_slices) if not is_of_slices]
        half = half_of_slices
        if others:
            half += tf.reduce_sum(tf.gather(halves, others))
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


def with_unique_rows(gradient: Gradient) -> Gradient:
    """Returns a gradient of one slice a row: the sum, if it is looked up twice."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)
