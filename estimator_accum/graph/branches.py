"""Branches of a graph."""

from collections.abc import Callable

import tensorflow as tf

from estimator_accum.graph.internals import context_of, context_of_outputs


def is_in_branch() -> bool:
    """Returns whether operations are made in a function, or in a branch or loop."""
    graph = tf.compat.v1.get_default_graph()
    return graph.building_function or context_of(graph) is not None


def is_in_loop(operation: tf.Operation) -> bool:
    """Returns whether the outputs are inside a loop or branch of TensorFlow 1."""
    return context_of_outputs(operation) is not None


def either(predicate: tf.Tensor, if_true: Callable, if_false: Callable) -> list:
    """`tf.cond` without captures.

    Every tensor that the branches of a `tf.cond` read becomes an input of the `tf.cond`:
    a placeholder in each of two functions, and a Switch that runs at every step. Here, in
    a graph, a branch is the operations with a control dependency on the predicate,
    built in place.

    Args:
        predicate: Scalar bool.
        if_true: Returns a list of tensors. It must make all its operations under the
            current control dependencies.
        if_false: Likewise, with the same dtypes. Within functions and in eager
            execution the rules of `tf.cond` apply to both.

    Returns:
        The tensors of the branch that ran.
    """
    # A tf.function adds control dependencies; an operation that waits for a dead one
    # is dead.
    if is_in_function():
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


def is_in_function() -> bool:
    """Returns whether operations are made in a function, or run eagerly."""
    return tf.executing_eagerly() or tf.compat.v1.get_default_graph().building_function


def run_either(
    predicate: tf.Tensor, if_true: Callable, if_false: Callable
) -> tf.Operation | None:
    """`either` for functions that return lists of operations.

    Returns:
        An operation that runs after those of the chosen branch; None in eager
        execution, where they have already run.
    """
    is_eager = tf.executing_eagerly()

    def run(make) -> list[tf.Tensor]:
        operations = make()
        with tf.control_dependencies([] if is_eager else operations):
            return [tf.constant(True)]

    done = either(predicate, lambda: run(if_true), lambda: run(if_false))[0]
    return None if is_eager else done.op


def nan(dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Returns NaN, which reports that a value is unknown."""
    return tf.constant(float("nan"), dtype)
