"""What the rule has to know of `tf.compat.v1.mixed_precision`'s loss scaling.

Inside the rule (`make_accumulating_train_op(loss, MixedPrecisionLossScaleOptimizer(...))`)
the scale stays the same throughout a window: it moves in `apply_gradients`, which sees
the window's mean, and skips the window if that is not finite.
"""

import tensorflow as tf


def is_loss_scaling(optimizer: tf.compat.v1.train.Optimizer) -> bool:
    """Whether `optimizer` scales the loss and unscales the gradients."""
    return isinstance(
        optimizer, tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer
    )


def is_dynamic(optimizer: tf.compat.v1.train.Optimizer) -> bool:
    """Whether `optimizer` expects gradients that are not finite, and handles them."""
    return is_loss_scaling(optimizer) and isinstance(
        optimizer._loss_scale, tf.compat.v1.mixed_precision.DynamicLossScale
    )


def innermost(
    optimizer: tf.compat.v1.train.Optimizer,
) -> tf.compat.v1.train.Optimizer:
    """Returns the optimizer that has the slots."""
    return innermost(optimizer._optimizer) if is_loss_scaling(optimizer) else optimizer
