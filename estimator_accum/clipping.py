"""How a window's sum becomes its mean, clipped: two passes over the gradients.

mean = factor * sum
clip(mean) = mean * min(1, clip_norm / norm(mean))
"""

import tensorflow as tf

from estimator_accum.gradients import Gradient, scaled


def half_squared_norms(
    gradients: list[Gradient], dtype: tf.DType, has_unique_rows: bool = False
) -> tf.Tensor:
    """Returns sum(g**2) / 2 of each gradient, in one pass.

    Args:
        gradients: Tensors or `IndexedSlices`.
        dtype: Of the result.
        has_unique_rows: Whether no `IndexedSlices` names a row twice.

    Returns:
        `dtype` [gradients].
    """
    halves = []
    for value in gradients:
        if isinstance(value, tf.IndexedSlices):
            value = value.values if has_unique_rows else _sum_duplicates(value)
        if value.dtype in (tf.float16, tf.bfloat16):
            value = tf.cast(value, dtype)  # squares leave float16's range
        halves.append(tf.cast(tf.nn.l2_loss(value), dtype))
    return tf.stack(halves)


def scale_and_clip(sums, factor, clip_norm, norm):
    """Returns (clip(factor * sums), norm of factor * sums), in one pass.

    Args:
        sums: Tensors or `IndexedSlices`.
        factor: Scalar of the dtype of `norm`; None is 1, exactly.
        clip_norm: Largest global norm; None does not clip.
        norm: Global norm of `sums`.
    """
    if factor is not None:
        norm = norm * factor
    scale = factor
    if clip_norm is not None:
        # As tf.clip_by_global_norm does, to the bit: 1 where the norm is within, NaN
        # where it is not finite.
        one = tf.constant(1.0, norm.dtype)
        clip = clip_norm * tf.minimum(one / norm, one / clip_norm)
        clip += norm - norm
        scale = clip if factor is None else clip * factor
    if scale is None:
        return sums, norm
    return [scaled(value, scale) for value in sums], norm


def _sum_duplicates(slices: tf.IndexedSlices) -> tf.Tensor:
    """A row that is looked up twice has one gradient: the sum of both slices."""
    unique, positions = tf.unique(slices.indices)
    return tf.math.unsorted_segment_sum(slices.values, positions, tf.size(unique))
