"""Initial values or penalties of weights in TensorFlow 1's `tf.contrib.layers`."""

import math
import numbers

import tensorflow.compat.v1 as tf


def xavier_initializer(uniform: bool = True, seed: int | None = None, dtype=tf.float32):
    """Initializer of Glorot and Bengio (2010), uniform or truncated normal."""
    return variance_scaling_initializer(1.0, "FAN_AVG", uniform, seed, dtype)


def variance_scaling_initializer(
    factor: float = 2.0,
    mode: str = "FAN_IN",
    uniform: bool = False,
    seed: int | None = None,
    dtype=tf.float32,
):
    """Initializer with variance `factor / n`, or 1.3 times that before it is truncated.

    Args:
        factor: Number > 0.
        mode: "FAN_IN", "FAN_OUT" or "FAN_AVG", which `n` is.
        uniform: Uniform distribution, or a normal one that is truncated at two
            standard deviations.
        seed: Seed of the values.
        dtype: Type of the values, floating point.

    Raises:
        TypeError: If `mode` or `dtype` is another one.
    """
    modes = ("FAN_IN", "FAN_OUT", "FAN_AVG")
    if mode not in modes or not dtype.is_floating:
        raise TypeError(
            f"`mode` must be one of {', '.join(modes)}, and `dtype` of floating point. "
            f"Received: {mode} and {dtype}. Use FAN_AVG and tf.float32."
        )

    def initialize(shape, dtype=dtype, partition_info=None):
        del partition_info
        # A vector counts for as many inputs as outputs.
        sides = list(shape) if len(shape) > 1 else [*shape, *shape] or [1, 1]
        *window, fan_in, fan_out = sides
        fans = {"FAN_IN": fan_in, "FAN_OUT": fan_out, "FAN_AVG": (fan_in + fan_out) / 2}
        variance = factor / (fans[mode] * math.prod(window))
        if uniform:
            limit = math.sqrt(3 * variance)
            return tf.random_uniform(shape, -limit, limit, dtype, seed=seed)
        return tf.truncated_normal(
            shape, 0.0, math.sqrt(1.3 * variance), dtype, seed=seed
        )

    return initialize


def l1_regularizer(scale: float, scope=None):
    """Returns a function that returns `scale * sum(abs(weights))`."""
    return _penalty(
        scale, scope or "l1_regularizer", lambda w: tf.reduce_sum(tf.abs(w))
    )


def l2_regularizer(scale: float, scope=None):
    """Returns a function that returns `scale * sum(weights**2) / 2`."""
    return _penalty(scale, scope or "l2_regularizer", tf.nn.l2_loss)


def l1_l2_regularizer(scale_l1: float = 1.0, scale_l2: float = 1.0, scope=None):
    """Returns a function that returns the sum of both penalties."""
    scope = scope or "l1_l2_regularizer"
    if scale_l1 == 0 or scale_l2 == 0:
        return (l2_regularizer if scale_l1 == 0 else l1_regularizer)(
            scale_l1 + scale_l2, scope
        )
    return sum_regularizer([l1_regularizer(scale_l1), l2_regularizer(scale_l2)], scope)


def sum_regularizer(regularizer_list, scope=None):
    """Returns a function that returns the sum of several penalties.

    Args:
        regularizer_list: Functions from a variable to a scalar Tensor or None; or None.
        scope: Name scope.

    Returns:
        The function; None if there is no penalty.
    """
    regularizers = [one for one in regularizer_list if one is not None]
    if not regularizers:
        return None

    def total(weights):
        with tf.name_scope(scope, "sum_regularizer", [weights]) as name:
            penalties = [regularizer(weights) for regularizer in regularizers]
            penalties = [penalty for penalty in penalties if penalty is not None]
            return tf.add_n(penalties, name=name) if penalties else None

    return total


def apply_regularization(regularizer, weights_list=None):
    """Returns the sum of the weights' penalties, and collects it as a loss.

    Args:
        regularizer: Function from a variable to a scalar Tensor or None.
        weights_list: Variables; by default the collection WEIGHTS.

    Raises:
        ValueError: If there are no weights.
    """
    weights = weights_list or tf.get_collection(tf.GraphKeys.WEIGHTS)
    if not weights:
        raise ValueError(
            "`weights_list`, or the collection WEIGHTS, must have a variable. "
            "Received: none. Pass the variables."
        )
    with tf.name_scope("get_regularization_penalty") as name:
        penalties = [regularizer(variable) for variable in weights]
        penalties = [penalty for penalty in penalties if penalty is not None]
        penalty = tf.add_n(penalties or [tf.constant(0.0)], name=name)
        tf.add_to_collection(tf.GraphKeys.REGULARIZATION_LOSSES, penalty)
        return penalty


def _penalty(scale, scope: str, measure):
    """Returns the function that returns `scale * measure(weights)`."""
    is_number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if not is_number or isinstance(scale, numbers.Integral) or scale < 0:
        raise ValueError(
            f"`scale` must be a float >= 0. Received: {scale!r}. Use e.g. 1e-4."
        )

    def penalty(weights, name=None):
        del name  # TensorFlow 1's own ignore it
        with tf.name_scope(scope, values=[weights]) as name:
            scale_tensor = tf.convert_to_tensor(
                scale, weights.dtype.base_dtype, name="scale"
            )
            return tf.multiply(scale_tensor, measure(weights), name=name)

    return penalty if scale else lambda _: None
