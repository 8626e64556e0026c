"""Walks over a graph: the operations that others need, and that a fetch runs."""

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
