"""Walks over a graph: the operations that others need, and that a fetch runs."""

import tensorflow as tf


def ancestors(
    operations: list[tf.Operation],
) -> dict[tf.Operation, tf.Operation | None]:
    """Returns `operations` and all that they need, each with who asked for it."""
    found = dict.fromkeys(operations)
    waiting = list(operations)
    while waiting:
        operation = waiting.pop()
        needed = [tensor.op for tensor in operation.inputs] + operation.control_inputs
        for other in needed:
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
