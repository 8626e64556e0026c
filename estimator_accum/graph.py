"""Graphs: walks over them, branches without captures, values of replicas."""

from collections.abc import Callable

import tensorflow as tf


def ancestors(
    operations: list[tf.Operation],
) -> dict[tf.Operation, tf.Operation | None]:
    """Returns `operations` and all that they need, each with who asked for it."""
    return _walk(
        operations,
        lambda operation: [
            *(tensor.op for tensor in operation.inputs),
            *operation.control_inputs,
        ],
    )


def data_ancestors(
    operations: list[tf.Operation],
) -> dict[tf.Operation, tf.Operation | None]:
    """Returns `operations` and whose values they are computed from.

    Goes no way of control dependencies, and out of branches' graphs into outer ones.

    Returns:
        Each with who asked for it.
    """
    captured = {}  # of each graph: what its placeholders stand for

    def needed(operation: tf.Operation) -> list[tf.Operation]:
        graph = operation.graph
        if graph not in captured:
            pairs = getattr(graph, "captures", ())
            captured[graph] = {inner.op: outer.op for outer, inner in pairs}
        outside = captured[graph].get(operation)
        inputs = [tensor.op for tensor in operation.inputs]
        return inputs if outside is None else [*inputs, outside]

    return _walk(operations, needed)


def _walk(
    operations: list[tf.Operation],
    needed: Callable[[tf.Operation], list[tf.Operation]],
) -> dict[tf.Operation, tf.Operation | None]:
    found = dict.fromkeys(operations)
    waiting = list(operations)
    while waiting:
        operation = waiting.pop()
        for other in needed(operation):
            if other not in found:
                found[other] = operation
                waiting.append(other)
    return found


def fetched_operations(graph: tf.Graph, fetches) -> list[tf.Operation]:
    """Returns the operations that `session.run(fetches)` asks for.

    Args:
        graph: The session's.
        fetches: As `session.run` takes them: tensors, operations, variables, names and
            structures of these.
    """
    found = []
    for item in tf.nest.flatten(fetches, expand_composites=True):
        element = graph.as_graph_element(item)
        found.append(element if isinstance(element, tf.Operation) else element.op)
    return found


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


def nan(dtype: tf.DType = tf.float32) -> tf.Tensor:
    """Returns what is reported where there is no number."""
    return tf.constant(float("nan"), dtype)


def first_of(strategy, values):
    """Returns one replica's value, of what every replica knows alike."""
    return strategy.experimental_local_results(values)[0]


def flatten(strategy, values) -> list:
    """Returns every replica's values, of any structure."""
    per_value = tf.nest.map_structure(strategy.experimental_local_results, values)
    return tf.nest.flatten(per_value)
