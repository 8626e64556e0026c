"""The number by which TensorFlow divides a loss under several replicas."""

import tensorflow as tf

from estimator_accum.core.gradients import Gradient, values_of
from estimator_accum.graph.internals import loss_division
from estimator_accum.graph.walks import ancestors


def replica_divisor_of(gradients: list[Gradient]) -> int:
    """Returns the number by which `compute_gradients` divided the loss.

    In Estimator's model_fns TensorFlow divides by the number of replicas, so that sums
    over replicas are means, and the graph only records whether its last call did. These
    gradients may come from another call, or from `tf.gradients`, so the function looks
    for the factor 1 / replicas among their ancestors.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas == 1:
        return 1
    division = loss_division()
    if division is None:
        raise RuntimeError(
            "TensorFlow's division of a loss by the number of replicas must be known, or "
            f"gradients would be divided twice. Received: {replicas} replicas and "
            f"TensorFlow {tf.__version__}, whose tf.compat.v1.train.Optimizer has no "
            "`_scale_loss`. Install TensorFlow 2.21 or earlier, or use one replica."
        )
    needed = ancestors([values_of(gradient).op for gradient in gradients])
    code = division.__code__
    return replicas if any(_scales_a_loss(op, replicas, code) for op in needed) else 1


def divisor_of_next_loss() -> int:
    """Returns the number by which an optimizer of TensorFlow will divide a loss here."""
    division = loss_division()
    return 1 if division is None else round(1 / division(1.0))


def _scales_a_loss(operation: tf.Operation, replicas: int, code) -> bool:
    """Returns whether code, TensorFlow's division, made the constant 1 / replicas."""
    if operation.type != "Const":
        return False
    (constant,) = operation.outputs
    if constant.shape.rank != 0 or not constant.dtype.is_floating:
        return False
    value = tf.get_static_value(constant)
    if value != value.dtype.type(1.0 / replicas):
        return False
    # By its place: other functions may have its name.
    lines = {line for *_, line in code.co_lines()}
    return any(
        frame.filename == code.co_filename and frame.lineno in lines
        for frame in operation.traceback or ()  # a copied operation has none
    )
