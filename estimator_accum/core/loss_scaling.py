"""The number by which TensorFlow divides a loss under several replicas."""

import tensorflow as tf

from estimator_accum.core.gradients import Gradient, values_of
from estimator_accum.graph.internals import loss_division
from estimator_accum.graph.walks import ancestors


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
    if value != value.dtype.type(1.0 / replicas):
        return False
    # TensorFlow's own function, by its place: others may have its name.
    code = loss_division().__code__
    lines = {line for *_, line in code.co_lines()}
    return any(
        frame.filename == code.co_filename and frame.lineno in lines
        for frame in operation.traceback or ()  # a copied operation has none
    )
