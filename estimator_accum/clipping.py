"""How a window's sum becomes its mean, clipped: two passes over the gradients.

mean = factor * sum
clip(mean) = mean * min(1, clip_norm / norm(mean))
"""

import tensorflow as tf

from estimator_accum.accumulators import Gradient


def normalize_and_clip(sums, factor, clip_norm, *, dtype, has_unique_rows):
    """Returns (clip(factor * sums), norm of factor * sums), in one pass each.

    Args:
        sums: Tensors or `IndexedSlices`.
        factor: Scalar of `dtype`; None is 1, exactly.
        clip_norm: Largest global norm; None does not clip.
        dtype: Of the norm.
        has_unique_rows: Whether no `IndexedSlices` names a row twice.
    """
    norm = _global_norm(sums, dtype, has_unique_rows)
    if factor is not None:
        norm = norm * factor
    scale = factor
    if clip_norm is not None:
        # As tf.clip_by_global_norm does, to the bit: 1 where the norm is within, NaN
        # where it is not finite.
        clip = clip_norm * tf.minimum(1.0 / norm, tf.constant(1.0, dtype) / clip_norm)
        clip += norm - norm
        scale = clip if factor is None else clip * factor
    if scale is None:
        return sums, norm
    return [_scaled(value, scale) for value in sums], norm


def _global_norm(sums, dtype, has_unique_rows) -> tf.Tensor:
    halves = []
    for value in sums:
        if isinstance(value, tf.IndexedSlices):
            value = value.values if has_unique_rows else _sum_duplicates(value)
        if value.dtype in (tf.float16, tf.bfloat16):
            value = tf.cast(value, dtype)  # squares leave float16's range
        halves.append(tf.cast(tf.nn.l2_loss(value), dtype))
    return tf.sqrt(tf.reduce_sum(tf.stack(halves)) * tf.constant(2.0, dtype))


def _sum_duplicates(slices: tf.IndexedSlices) -> tf.Tensor:
    """A row that is looked up twice has one gradient: the sum of both slices."""
    unique, positions = tf.unique(slices.indices)
    return tf.math.unsorted_segment_sum(slices.values, positions, tf.size(unique))


def _scaled(value: Gradient, scale: tf.Tensor) -> Gradient:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(
            _scaled(value.values, scale), value.indices, value.dense_shape
        )
    return value * tf.cast(scale, value.dtype)
