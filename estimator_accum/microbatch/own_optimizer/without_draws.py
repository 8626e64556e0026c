"""Copies that draw no random numbers where these cannot be fed.

Functions, branches and loops draw other numbers in every run. In the
copies it is the same number everywhere, so that two runs may be compared.
"""

import tensorflow as tf

from estimator_accum.graph.branches import is_in_loop
from estimator_accum.graph.copies import define, insert
from estimator_accum.graph.functions import functions_of, library_of_functions, nodes_of
from estimator_accum.graph.internals import context_of
from estimator_accum.graph.names import DRAWS, FED, SHAPED_DRAWS, VARIABLES
from estimator_accum.graph.walks import control_inputs_of, data_ancestors

_DRAWN = 0.95  # dropout keeps what is drawn above its rate
# Draws of integers, and the place of the lowest one among the inputs.
_LOWEST = {
    "RandomUniformInt": 1,
    "StatelessRandomUniformInt": 2,
    "StatelessRandomUniformIntV2": 4,
}
_SUFFIX = "_without_draws"


def drawing_inside(operations, kinds=DRAWS) -> set[tf.Operation]:
    """Returns the operations that draw random numbers inside a function or loop.

    Args:
        operations: Operations to look at.
        kinds: Types of the operations that draw.
    """
    library = library_of_functions()
    return {
        operation
        for operation in operations
        if operation.type in kinds
        and context_of(operation) is not None
        or any(node.op in kinds for node in nodes_of(functions_of(operation), library))
    }


def without_draws(needed, tensors: list[tf.Tensor], *, always: bool) -> dict:
    """Copies operations, if some of them draw random numbers inside functions or loops.

    Args:
        needed: All that `tensors` are computed from.
        tensors: Tensors.
        always: Whether operations are copied if none of them draws, too.

    Returns:
        The copies by reference of the tensors that they are of; none if nothing draws.
    """
    if not always and not drawing_inside(needed):
        return {}
    copied = _with_pivots([op for op in needed if not _is_source(op)])
    definition, _ = define(copied)
    graph, rewriting = tf.compat.v1.get_default_graph(), _Rewriting()
    for node in list(definition.node):
        if node.op in SHAPED_DRAWS:
            operation = graph.get_operation_by_name(node.name)
            if is_in_loop(operation):
                values = _fill(node)
                for value in values:  # in the same loop
                    value.input.append(f"^{operation.inputs[0].op.name}")
                definition.node.extend(values)
        rewriting.rename(node)
    definition.library.function.extend(rewriting.functions.values())
    inputs = {
        tensor.name: tensor
        for operation in copied
        for tensor in operation.inputs
        if tensor.op not in copied
    }
    wanted = [tensor for tensor in tensors if tensor.op in copied]
    copies = insert(definition, inputs, wanted, "without_draws")
    return {tensor.ref(): copy for tensor, copy in zip(wanted, copies, strict=True)}


def _is_source(operation: tf.Operation) -> bool:
    is_resource = any(output.dtype == tf.resource for output in operation.outputs)
    is_given = is_resource and not operation.inputs  # a table, whose name counts
    return operation.type in VARIABLES | FED or is_given


def _with_pivots(operations: list[tf.Operation]) -> dict[tf.Operation, None]:
    """Returns operations with those of loops that they wait for."""
    copied, waiting = dict.fromkeys(operations), list(operations)
    while waiting:
        for other in control_inputs_of(waiting.pop()):
            if other not in copied and is_in_loop(other):
                new = [e for e in data_ancestors([other]) if e not in copied]
                new = [op for op in new if not _is_source(op)]
                copied |= dict.fromkeys(new)
                waiting += new
    return copied


def _fill(node) -> list:
    """Makes a draw one of the same number everywhere; returns further nodes."""
    integers = _LOWEST.get(node.op)
    dtype = node.attr["dtype" if "dtype" in node.attr else "Tout"].type
    shape_dtype = node.attr["T" if "T" in node.attr else "Tshape"].type
    shape, nodes = node.input[0], []
    waits = [tensor for tensor in node.input if tensor.startswith("^")]
    if integers is not None:
        number = node.input[integers]
    else:
        value = tf.compat.v1.NodeDef(name=f"{node.name}_drawn", op="Const")
        value.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(_DRAWN, dtype))
        value.attr["dtype"].type = dtype
        number, nodes = value.name, [value]
    node.op = "Fill"
    del node.input[:]
    node.input.extend([shape, number, *waits])
    node.attr.clear()
    node.attr["T"].type, node.attr["index_type"].type = dtype, shape_dtype
    return nodes


class _Rewriting:
    """Functions without draws.

    Attributes:
        functions: Definitions of the functions without draws, by names of those with.
    """

    def __init__(self):
        self._library = library_of_functions()
        self._drawing = {}
        self.functions = {}

    def rename(self, node) -> None:
        """Has a node call functions without draws in place of those with some."""
        if self._draws(node.op):
            node.op = self._without(node.op)
        for value in node.attr.values():
            called = [value.func] if value.HasField("func") else value.list.func
            for function in called:
                if self._draws(function.name):
                    function.name = self._without(function.name)

    def _draws(self, name: str) -> bool:
        if name not in self._drawing:
            nodes = nodes_of([name], self._library)
            self._drawing[name] = any(node.op in SHAPED_DRAWS for node in nodes)
        return self._drawing[name]

    def _without(self, name: str) -> str:
        """Returns the name of a function without draws, which is made if there is none."""
        if name not in self.functions:
            function = self.functions[name] = type(self._library[name])()
            function.CopyFrom(self._library[name])
            function.signature.name += _SUFFIX
            for node in list(function.node_def):
                if node.op in SHAPED_DRAWS:
                    values = _fill(node)
                    for value in values:
                        node.input[1] = f"{value.name}:output:0"
                    function.node_def.extend(values)
                self.rename(node)
        return self.functions[name].signature.name
