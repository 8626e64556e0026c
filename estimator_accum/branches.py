"""Branches of a graph whose operations read much and return little."""

from collections.abc import Callable

import tensorflow as tf


def either(predicate: tf.Tensor, if_true: Callable, if_false: Callable) -> list:
    """`tf.cond` without captures.

    Every tensor that the branches of a `tf.cond` read is one of its inputs: a
    placeholder in each of two functions, and a Switch in the session, run at every step.
    Here, in a graph, a branch is what depends on the predicate by control dependencies,
    and is built where it stands.

    Args:
        predicate: Scalar bool.
        if_true: Returns a list of tensors. All that it makes must be made under the
            control dependencies in force.
        if_false: Likewise, of the same dtypes. Within functions and in eager execution
            what holds for `tf.cond` holds for both.

    Returns:
        The tensors of the branch that ran.
    """
    is_eager = tf.executing_eagerly()
    # A tf.function orders operations by itself, and what waits for a dead one is dead.
    if is_eager or tf.compat.v1.get_default_graph().building_function:
        return tf.cond(predicate, if_true, if_false)
    switch = tf.raw_ops.Switch(data=predicate, pred=predicate)
    with tf.control_dependencies([tf.identity(switch.output_true)]):
        true_values = if_true()
    with tf.control_dependencies([tf.identity(switch.output_false)]):
        false_values = if_false()
    return [
        tf.raw_ops.Merge(inputs=values).output
        for values in zip(true_values, false_values, strict=True)
    ]


def run_either(
    predicate: tf.Tensor, if_true: Callable, if_false: Callable
) -> tf.Operation | None:
    """`either`, over functions that return lists of operations.

    Returns:
        What runs after those of one branch; None in eager execution, where they have.
    """
    is_eager = tf.executing_eagerly()

    def run(make) -> list[tf.Tensor]:
        operations = make()
        with tf.control_dependencies([] if is_eager else operations):
            return [tf.constant(True)]

    done = either(predicate, lambda: run(if_true), lambda: run(if_false))[0]
    return None if is_eager else done.op
