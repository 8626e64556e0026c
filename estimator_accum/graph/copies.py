"""Parts of a graph as definitions, which are inserted elsewhere."""

from collections.abc import Iterable

import tensorflow as tf

from estimator_accum.graph.internals import COLOCATION, set_input
from estimator_accum.graph.outermost import value_of_graph
from estimator_accum.graph.walks import control_inputs_of

_CHANGED = "_estimator_accum_changed"  # attribute of a graph


def changed_operations(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the operations of which `change_input` was called, in that order."""
    return value_of_graph(graph, _CHANGED, [])


def change_input(operation: tf.Operation, number: int, tensor: tf.Tensor) -> None:
    """Changes one input of an operation, which analyses of the graph take note of."""
    set_input(operation, number, tensor)
    changed_operations(operation.graph).append(operation)


def replace(
    tensor: tf.Tensor, other: tf.Tensor, readers: Iterable | None = None
) -> None:
    """Makes readers of `tensor`, by default all consumers so far, read `other`."""
    for consumer in tensor.consumers() if readers is None else readers:
        for i, read in enumerate(consumer.inputs):
            if read.name == tensor.name:
                change_input(consumer, i, other)


def define(
    operations: Iterable[tf.Operation],
    in_order: frozenset[tf.Operation] = frozenset(),
    first: Iterable[tf.Operation] = (),
    late: Iterable[tf.Operation] = (),
) -> tuple[tf.compat.v1.GraphDef, dict[str, tf.Operation]]:
    """Returns a definition of operations, for `insert` to make copies.

    Args:
        operations: The operations to copy.
        in_order: Operations whose copies keep the originals' control inputs; the others
            wait for each other only.
        first: Some of `operations`, for which the copies of `late` wait.
        late: Others.

    Returns:
        The definition, and the operations outside for which copies wait, as inputs.
    """
    waits, copied = {}, {operation.name for operation in operations}
    definition = tf.compat.v1.GraphDef()
    for operation in sorted(operations, key=lambda op: op.name):  # always the same
        definition.versions.CopyFrom(operation.graph.graph_def_versions)
        node = definition.node.add()
        node.CopyFrom(operation.node_def)
        node.attr.pop(COLOCATION, None)  # colocation with operations outside
        del node.input[:]
        node.input.extend(tensor.name for tensor in operation.inputs)
        for other in control_inputs_of(operation):
            if other.name in copied or operation in in_order:
                node.input.append(f"^{other.name}")
            if other.name not in copied and operation in in_order:
                waits[f"^{other.name}"] = other
        if operation in late:
            node.input.extend(f"^{other.name}" for other in first)
    return definition, waits


def insert(
    definition: tf.compat.v1.GraphDef,
    inputs: dict[str, tf.Tensor | tf.Operation],
    wanted: list[tf.Tensor],
    name: str,
) -> list[tf.Tensor]:
    """Copies operations into the default graph.

    Args:
        definition: Result of `define`.
        inputs: Tensors and operations, by name, that copies read or wait for in place
            of originals that are not copied.
        wanted: Results of copied operations, or tensors of `inputs`.
        name: Scope of the copies.

    Returns:
        The copies of `wanted`.
    """
    if not definition.node:
        return [inputs[tensor.name] for tensor in wanted]
    graph = tf.compat.v1.get_default_graph()
    if graph.building_function:  # a branch's graph
        inputs = {name: graph.capture(tensor) for name, tensor in inputs.items()}
    scope = graph.unique_name(name)
    for node in definition.node:
        if "frame_name" in node.attr:  # a loop of its own
            node.attr["frame_name"].s += f"/{scope}".encode()
    copied = {node.name for node in definition.node}
    read = {name for node in definition.node for name in node.input}
    names = [tensor.name for tensor in wanted if tensor.op.name in copied]
    copies = tf.graph_util.import_graph_def(
        definition,
        {name: inputs[name] for name in inputs if name in read},
        return_elements=names,
        name=name,
    )
    copies = dict(zip(names, copies, strict=True))
    return [copies.get(tensor.name, inputs.get(tensor.name)) for tensor in wanted]
