"""Walks through a graph, from operations to those that they need or feed."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import tensorflow as tf

from estimator_accum.graph.internals import captures_of, control_outputs


def ancestors(
    operations: Iterable[tf.Operation],
    where: Callable[[tf.Operation], bool] | None = None,
) -> dict[tf.Operation, tf.Operation | None]:
    """Maps `operations` to None, and their ancestors to an operation that needs them.

    Args:
        operations: Operations.
        where: Condition on the others; the search stops at one that fails it. None means
            all of them.
    """
    if where is None:
        return walk(operations, needed_by)
    return walk(operations, lambda operation: filter(where, needed_by(operation)))


def path_to(needed: dict, operation: tf.Operation | None, first: int = 3) -> str:
    """Returns the names of operations that need each other, down to `operation`.

    Args:
        needed: The result of `ancestors`.
        operation: One of its keys.
        first: Number of names before three dots; the last three are always there.
    """
    names = []
    while operation is not None:
        names.append(operation.name)
        operation = needed[operation]
    names.reverse()
    if len(names) > first + 3:
        names[first:-3] = ["..."]
    return ", which needs ".join(names)


def data_ancestors(
    operations: Iterable[tf.Operation],
    inputs_of: Callable[[tf.Operation], Iterable[tf.Tensor]] | None = None,
) -> dict[tf.Operation, tf.Operation | None]:
    """Returns `operations` and all operations whose values they are computed from.

    Ignores control dependencies; follows captures from branches' graphs to outer ones.

    Args:
        operations: Operations.
        inputs_of: Function of an operation that returns the tensors to follow. None
            means its inputs.

    Returns:
        Each operation with one that needs it; None for `operations` themselves.
    """
    captured = {}  # per graph: outer operation by the placeholder that stands for it

    def needed(operation: tf.Operation) -> list[tf.Operation]:
        graph = operation.graph
        if graph not in captured:
            pairs = captures_of(graph)
            # An eager tensor has no operation.
            captured[graph] = {
                inner.op: outer.op for outer, inner in pairs if hasattr(outer, "op")
            }
        outside = captured[graph].get(operation)
        tensors = operation.inputs if inputs_of is None else inputs_of(operation)
        inputs = [tensor.op for tensor in tensors]
        return inputs if outside is None else [*inputs, outside]

    return walk(operations, needed)


def origin_of(tensor: tf.Tensor, passing: Collection[str]) -> tf.Tensor:
    """Returns the tensor that operations of some types pass on, their first input."""
    while tensor.op.type in passing:
        tensor = tensor.op.inputs[0]
    return tensor


def control_inputs_of(operation: tf.Operation) -> list[tf.Operation]:
    """Returns the operations that an operation waits for, by name.

    TensorFlow keeps more than eight by their addresses, which differ between processes.
    """
    others = operation.control_inputs
    return others if len(others) < 2 else sorted(others, key=lambda op: op.name)


def walk(starts: Iterable, steps: Callable[[Any], Iterable]) -> dict:
    """Maps `starts` to None, and all that steps lead to, to where the step began.

    Args:
        starts: Operations, or other keys.
        steps: Function of a key that returns the keys next to it.
    """
    origins = dict.fromkeys(starts)
    waiting = list(origins)
    while waiting:
        place = waiting.pop()
        for other in steps(place):
            if other not in origins:
                origins[other] = place
                waiting.append(other)
    return origins


def in_order(starts: Iterable, before: Callable[[Any], Iterable]) -> Iterator:
    """Yields `starts` in their order, each behind all that comes before it.

    Args:
        starts: Operations, or other keys.
        before: Function of a key that returns the keys that come before it.
    """
    seen = set()
    for start in starts:
        waiting = [(start, False)]
        while waiting:
            place, is_ready = waiting.pop()
            if is_ready:
                yield place
            elif place not in seen:
                seen.add(place)
                waiting.append((place, True))
                waiting += [(other, False) for other in before(place)]


def needed_by(operation: tf.Operation) -> list[tf.Operation]:
    """Returns the operations that an operation computes from, or waits for."""
    return [*(tensor.op for tensor in operation.inputs), *control_inputs_of(operation)]


def users_of(source: tf.Tensor | tf.Operation) -> list[tf.Operation]:
    """Returns the operations that compute from a tensor or operation, or wait for it."""
    operation = getattr(source, "op", source)
    tensors = source.outputs if operation is source else [source]
    readers = [user for tensor in tensors for user in tensor.consumers()]
    return [*readers, *control_outputs(operation)]


def descendants(sources: Iterable[tf.Tensor | tf.Operation]) -> set[tf.Operation]:
    """Returns the operations that compute from tensors or operations, or wait for them."""
    return set(
        walk([user for source in sources for user in users_of(source)], users_of)
    )


def data_descendants(
    tensors: Iterable[tf.Tensor],
    where: Callable[[tf.Operation], bool] | None = None,
) -> set[tf.Operation]:
    """Returns the operations that compute from `tensors`.

    Args:
        tensors: Tensors.
        where: Condition on the operations; the search stops at one that fails it. None
            means all of them.
    """

    def users(tensors: Iterable[tf.Tensor]) -> list[tf.Operation]:
        readers = [user for tensor in tensors for user in tensor.consumers()]
        return readers if where is None else [*filter(where, readers)]

    return set(walk(users(tensors), lambda operation: users(operation.outputs)))


def fetched_operations(graph: tf.Graph, fetches) -> list[tf.Operation]:
    """Returns the operations that `session.run(fetches)` fetches.

    Args:
        graph: The session's graph.
        fetches: As `session.run` takes them: tensors, operations, variables, names and
            structures of these.
    """
    items = tf.nest.flatten(fetches, expand_composites=True)
    elements = map(graph.as_graph_element, items)
    return [getattr(element, "op", element) for element in elements]
