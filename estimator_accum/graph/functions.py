"""Functions that operations call."""

import functools
from collections.abc import Iterable, Iterator

import tensorflow as tf

from estimator_accum.graph.internals import (
    OWN_GRADIENT,
    attribute_types,
    captures_of,
    function_of,
    functions_in,
    graph_of_function,
)
from estimator_accum.graph.names import BRANCHES, CALLS
from estimator_accum.graph.walks import walk


def library_of_functions(graph: tf.Graph | None = None) -> dict:
    """Returns the definitions of a graph's functions by their names.

    They are the graph's own, not to be changed; its nodes, which may hold a data set, are
    not copied.

    Args:
        graph: The graph; None is the default graph.
    """
    return functions_in(graph or tf.compat.v1.get_default_graph())


def functions_of(node) -> list[str]:
    """Returns names of the functions that an operation or node calls, e.g. branches."""
    return [name for _, name in functions_by_attribute(node)]


def functions_by_attribute(node) -> list[tuple[str, str]]:
    """Returns (attribute, name) of the functions that an operation or node calls."""
    if isinstance(node, tf.Operation):
        if not _may_call(node.type):
            return []  # without its node, a copy of all numbers of a constant
        node = node.node_def
    attributes, pairs = node.attr, []
    for key in sorted(attributes):
        value = attributes[key]
        pairs += [(key, value.func.name)] if value.HasField("func") else []
        pairs += [(key, function.name) for function in value.list.func]
    return pairs


@functools.cache
def _may_call(kind: str) -> bool:
    """Returns whether operations of a type may have functions, as those of no type may."""
    kinds = attribute_types(kind)
    return kinds is None or not kinds.isdisjoint({"func", "list(func)"})


def graph_called(operation, name: str, tensors, results: int) -> tf.Graph:
    """Returns the graph of a function that an operation calls.

    Args:
        operation: The operation.
        name: The function's name.
        tensors: Its arguments.
        results: Number of its results.

    Returns:
        The function's own graph, which knows more shapes, or another.
    """
    function = function_of(operation.graph, name)
    graph = getattr(function, "graph", None)
    # The gradient of another call may have added outputs to it.
    numbers = len(tensors), results
    if graph is not None and (len(graph.inputs), len(graph.outputs)) == numbers:
        return graph
    shapes = [tensor.shape for tensor in tensors]
    return graph_of_function(operation, shapes, name)


def graphs_called(operation: tf.Operation) -> list[tf.Graph]:
    """Returns the graphs of the functions that an operation calls, sorted by attribute."""
    tensors = list(operation.inputs)[operation.type in BRANCHES :]
    number = len(operation.outputs)
    return [
        # The condition of a loop has one result.
        graph_called(operation, name, tensors, 1 if attribute == "cond" else number)
        for attribute, name in functions_by_attribute(operation)
    ]


def arguments_in(operation: tf.Operation, tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors that stand for one in the function or branches of a call."""
    if operation.type not in CALLS | BRANCHES:
        return []
    tensors = list(operation.inputs)[operation.type in BRANCHES :]
    pairs = [pair for g in graphs_called(operation) for pair in zip(tensors, g.inputs)]
    return [inner for outer, inner in pairs if outer is tensor]


def captured_among(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Returns the operations that stand for tensors from outside of their functions."""
    operations = {*operations}
    graphs = {operation.graph for operation in operations}
    captured = {inner.op for graph in graphs for _, inner in captures_of(graph)}
    return operations & captured


def producer_of(tensor: str) -> str:
    """Returns the name of the node that has a tensor, which is named as in a node."""
    return tensor.split(":")[0]


def nodes_of(names: Iterable[str], library: dict) -> Iterator:
    """Yields the nodes of functions, and of the functions that these call.

    Args:
        names: Names of functions; those that are not in `library` have no nodes.
        library: Definitions by name, as `library_of_functions` returns them.
    """

    for name in called_by(names, library):
        yield from library[name].node_def


def called_by(names: Iterable[str], library: dict) -> list[str]:
    """Returns names of functions, and of those that they call; see `nodes_of`."""

    def called(name: str) -> list[str]:
        nodes = library[name].node_def
        # A function of TensorFlow 1 is called by its name.
        others = (o for node in nodes for o in (*functions_of(node), node.op))
        return [other for other in others if other in library]

    starts = [name for name in names if name in library]
    return [*walk(starts, called)] if starts else []


def all_nodes(operations: Iterable[tf.Operation]) -> list:
    """Returns the nodes of operations, and then those of the functions that they call."""
    nodes = [operation.node_def for operation in operations]
    called = [name for node in nodes for name in functions_of(node)]
    return [*nodes, *nodes_of(called, library_of_functions())]


def kinds_in(node, library: dict) -> set[str]:
    """Returns the types of an operation or node, and of those in functions it calls."""
    kind = node.type if isinstance(node, tf.Operation) else node.op
    # A function of TensorFlow 1 is called by its name, which is no type.
    called = called_by([*functions_of(node), kind], library)
    kinds = {kind, *(inner.op for name in called for inner in library[name].node_def)}
    return kinds - library.keys() if called else kinds


def has_half_precision(operations: Iterable[tf.Operation]) -> bool:
    """Returns whether an operation, or a function that it calls, has half precision."""
    halves = {tf.float16.as_datatype_enum, tf.bfloat16.as_datatype_enum}
    outputs = {output.dtype.base_dtype for o in operations for output in o.outputs}
    called = [name for operation in operations for name in functions_of(operation)]
    return any(dtype.as_datatype_enum in halves for dtype in outputs) or any(
        not halves.isdisjoint({attribute.type, *attribute.list.type})
        for node in nodes_of(called, library_of_functions())
        for attribute in node.attr.values()
    )


def operations_with_own_gradients(
    operations: Iterable, may_be_linear: bool = True
) -> list[tf.Operation]:
    """Returns the operations with a gradient that somebody wrote, or with one inside.

    Args:
        operations: The operations.
        may_be_linear: Whether this library's count, which are linear.
    """
    library = library_of_functions()
    is_own = functools.partial(has_own_gradient, may_be_linear=may_be_linear)
    return [
        operation
        for operation in operations
        if operation.type != "Const"  # whose node copies its numbers
        if is_own(operation.node_def)
        or any(map(is_own, nodes_of(functions_of(operation), library)))
    ]


def has_own_gradient(node, may_be_linear: bool = True) -> bool:
    """Returns whether somebody wrote the gradient of a node."""
    name = node.attr[OWN_GRADIENT].s if OWN_GRADIENT in node.attr else b""
    if name.startswith(b"EstimatorAccum"):
        return may_be_linear
    return bool(name) and b"PartitionedCall" not in name  # of a tf.function
