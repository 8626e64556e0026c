"""Checks of tensors that a caller gives to a train op."""

import numpy as np
import tensorflow as tf

from estimator_accum.graph.devices import of_strings

_FOR_EACH_EXAMPLE = (
    "; an optimizer that takes one for each example, for privacy say, trains by "
    "AccumulatingOptimizer(optimizer, K).minimize(losses)"
)


def check_graph() -> None:
    """Raises RuntimeError in eager execution and in functions traced for it."""
    with tf.init_scope():
        is_outside_eager = tf.executing_eagerly()
    if is_outside_eager:
        received = "eager execution" if tf.executing_eagerly() else "a tf.function"
        raise RuntimeError(
            f"An accumulating train op needs a graph. Received: {received}. Call it in a "
            "model_fn, or inside tf.Graph().as_default(); for Keras there is "
            "estimator_accum.keras.accumulate()."
        )


def check_loss(loss) -> tf.Tensor:
    """Returns the loss as a Tensor, or raises unless it is a floating-point scalar."""
    check_graph()
    loss = check_scalar("loss", loss, _FOR_EACH_EXAMPLE)
    if not loss.dtype.is_floating:
        raise TypeError(
            "`loss` must be a floating-point scalar. Received: dtype "
            f"{loss.dtype.name}. Cast the tensors that it is computed from."
        )
    return loss


def check_scalar(argument: str, value, more: str = "") -> tf.Tensor:
    """Returns `value` as a Tensor, or raises unless it is a scalar number."""
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{argument}` must be a scalar Tensor. Received: {value!r}. Pass one."
        ) from error
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        raise TypeError(
            f"`{argument}` must be a number. Received: {value!r}, of dtype "
            f"{tensor.dtype.name}. Pass a scalar Tensor of numbers."
        )
    if tensor.shape.rank != 0:
        raise ValueError(
            f"`{argument}` must be a scalar. Received: shape {tensor.shape} from "
            f"{tensor.name}. Reduce it, e.g. with tf.reduce_mean{more}."
        )
    return tensor


def check_count(argument: str, value, remedy: str, others: str = "") -> None:
    """Raises TypeError or ValueError unless an argument is an integer >= 1.

    Args:
        argument: Its name.
        value: Its value.
        remedy: Last sentence of the error.
        others: Other values that are allowed, such as " or None", for a wrong type.
    """
    rule = f"`{argument}` must be an integer >= 1"
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{rule}{others}. Received: {value!r}. {remedy}")
    if value < 1:
        raise ValueError(f"{rule}. Received: {value}. {remedy}")


def check_weight(weight) -> tf.Tensor:
    """Returns a micro-batch's weight as a Tensor that stops gradients.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is not a scalar, or a constant that is negative. Also if it is
            a constant 0 in a graph, where every micro-batch would have that weight.
        tf.errors.InvalidArgumentError: From the session, if it is negative.
    """
    weight = tf.stop_gradient(check_scalar("weight", weight))
    number = tf.get_static_value(weight)
    if number is None:
        is_allowed = weight >= tf.zeros([], weight.dtype)
        if weight.dtype.is_floating:
            # NaN is for `on_nonfinite`. TensorFlow's optimizer of graphs makes
            # `not (weight < 0)` to `weight >= 0`, which is False for it.
            is_allowed = tf.logical_or(is_allowed, tf.math.is_nan(weight))
        words = "`weight` must be >= 0, 0 for a micro-batch that does not count."
        with of_strings():
            refused = tf.raw_ops.Assert(
                condition=is_allowed, data=[f"{words} Received:", weight]
            )
        with tf.control_dependencies([refused]):
            return tf.identity(weight)
    if number > 0 or (number == 0 and tf.executing_eagerly()):
        return weight
    raise ValueError(
        "`weight` must be > 0; 0 is for a single micro-batch that is not to count. "
        f"Received: {number} for every micro-batch. Pass the number of its examples or "
        "tokens, or leave `weight` out."
    )
