"""Ways to accumulate in a graph, each `(loss, K) -> the op of one micro-step`.

All of them update by gradient descent, clipped to a global norm of 1: the cheapest
optimizer hides least of the cost of accumulation. The ways of other projects are
restated from their description.
"""

import tensorflow as tf

from estimator_accum import make_accumulating_train_op

_CLIP_NORM = 1.0


def gradient_descent() -> tf.compat.v1.train.Optimizer:
    """Returns the optimizer that all ways use."""
    return tf.compat.v1.train.GradientDescentOptimizer(1e-6)


def trained(loss: tf.Tensor) -> list[tuple]:
    """Returns (gradient, variable) of the variables that have a gradient."""
    variables = tf.compat.v1.trainable_variables()
    pairs = zip(tf.gradients(loss, variables), variables, strict=True)
    return [(g, v) for g, v in pairs if g is not None]


def forward_and_backward(loss: tf.Tensor, _) -> tf.Operation:
    """Computes the gradients and nothing else: adds up one element of each.

    TensorFlow drops gradients that are only control inputs; it cannot drop these.
    """
    values = [
        g.values if isinstance(g, tf.IndexedSlices) else g for g, _ in trained(loss)
    ]
    return tf.add_n([tf.reshape(value, [-1])[0] for value in values]).op


def no_accumulation(loss: tf.Tensor, _) -> tf.Operation:
    """Updates at every micro-step."""
    gradients, variables = zip(*trained(loss), strict=True)
    clipped, _ = tf.clip_by_global_norm(gradients, _CLIP_NORM)
    step = tf.compat.v1.train.get_or_create_global_step()
    return gradient_descent().apply_gradients(
        list(zip(clipped, variables, strict=True)), step
    )


def this_project(loss: tf.Tensor, steps: int) -> tf.Operation:
    """Calls `make_accumulating_train_op` as users do."""
    return make_accumulating_train_op(
        loss, gradient_descent(), steps, clip_norm=_CLIP_NORM
    )


def without_micro_step_checks(loss: tf.Tensor, steps: int) -> tf.Operation:
    """Like `this_project`, but looks for NaN and infinity at boundaries only.

    The ways of other projects do not look for them at all.
    """
    return make_accumulating_train_op(
        loss,
        gradient_descent(),
        steps,
        clip_norm=_CLIP_NORM,
        on_nonfinite="skip_window",
    )


def original_patch(loss: tf.Tensor, steps: int) -> tf.Operation:
    """The gradient accumulation article's `tf.cond`, with its window's phase corrected.

    Every micro-step adds a dense gradient of loss / K to each accumulator; at the
    boundary they are read, clipped, applied and then assigned zeros.

    Args:
        loss: Mean loss of a micro-batch.
        steps: K [micro-steps per update].
    """
    gradients, variables = zip(*trained(loss / steps), strict=True)
    accumulators = [_zeros(variable) for variable in variables]
    added = [
        accumulator.assign_add(tf.convert_to_tensor(gradient), read_value=False)
        for accumulator, gradient in zip(accumulators, gradients, strict=True)
    ]

    def update():
        with tf.control_dependencies(added):
            sums = [accumulator.read_value() for accumulator in accumulators]
        clipped, _ = tf.clip_by_global_norm(sums, _CLIP_NORM)
        applied = gradient_descent().apply_gradients(
            list(zip(clipped, variables, strict=True))
        )
        with tf.control_dependencies([applied]):
            cleared = [
                accumulator.assign(tf.zeros(accumulator.shape), read_value=False)
                for accumulator in accumulators
            ]
        return _after(cleared)

    step = tf.compat.v1.train.get_or_create_global_step()
    is_boundary = tf.equal((step.read_value() + 1) % steps, 0)
    done = tf.cond(is_boundary, update, lambda: _after(added))
    with tf.control_dependencies([done, *added]):
        return step.assign_add(1, read_value=False)


def _zeros(variable) -> tf.Variable:
    return tf.compat.v1.Variable(
        tf.zeros(variable.shape), trainable=False, use_resource=True
    )


def _after(operations: list) -> tf.Tensor:
    with tf.control_dependencies(operations):
        return tf.constant(True)


# Name in the table -> way.
GRAPH_WAYS = {
    "forward and backward": forward_and_backward,
    "no accumulation": no_accumulation,
    "this project": this_project,
    "this project, skip_window": without_micro_step_checks,
    "original patch": original_patch,
}
