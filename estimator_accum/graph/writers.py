"""Operations that write variables."""

import functools
from collections.abc import Collection, Iterable

import tensorflow as tf

from estimator_accum.graph.functions import functions_of, library_of_functions, nodes_of
from estimator_accum.graph.handles import Ways, places_behind
from estimator_accum.graph.internals import context_of, dtype_of_handle, is_stateful
from estimator_accum.graph.names import (
    CALLERS,
    FED,
    LOOK_UPS,
    PASSING,
    READERS,
    SETTERS,
    SETTLED,
    VARIABLES,
    WRITERS,
    WRITERS_OF_TABLES,
    moves_generator,
)
from estimator_accum.graph.outermost import value_of_graph
from estimator_accum.graph.walks import (
    ancestors,
    data_ancestors,
    descendants,
    origin_of,
)

# Attributes of a graph.
_UPDATES, _WRITERS_SO_FAR = "_estimator_accum_updates", "_estimator_accum_writers"


def writers_of(
    operations: Iterable[tf.Operation], without: Collection[tf.Operation] = ()
) -> dict[tf.Operation, list[tf.Operation]]:
    """Maps each variable that `operations` may write to those that do.

    Args:
        operations: Operations of one graph.
        without: Variables to leave out.
    """
    writers = {}
    ways = functools.cache(lambda: Ways(library_of_functions(), writes))
    for operation in operations:
        if operation.type in READERS or operation.type in PASSING:
            continue
        handles = {
            place: variable_of(tensor)
            for place, tensor in enumerate(operation.inputs)
            if may_be_variable(tensor)
        }
        node = operation.node_def if handles else None  # made anew with each call
        for place, variable in handles.items():
            if variable is None or variable in without:
                continue
            if _may_write(operation, node, place, ways):
                writers.setdefault(variable, []).append(operation)
    return writers


def may_be_variable(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is a handle, or a variable of TensorFlow 1."""
    return tensor.dtype == tf.resource or is_reference(tensor)


def is_reference(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is a variable of TensorFlow 1 that can be written."""
    dtype = tensor.dtype
    return dtype.base_dtype is not dtype


def variable_of(tensor: tf.Tensor) -> tf.Operation | None:
    """Returns the variable that `tensor` is a handle of; None for tables etc."""
    operation = source_of_handle(tensor)
    is_known = operation.type in VARIABLES or _is_captured(operation)
    return operation if is_known else None


def source_of_handle(tensor: tf.Tensor) -> tf.Operation:
    """Returns the variable or table, of any kind, that `tensor` is a handle of."""
    return origin_of(tensor, PASSING).op


def _is_captured(operation: tf.Operation) -> bool:
    """Returns whether an operation stands for a variable outside of a function."""
    is_argument = operation.type == "Placeholder"
    return is_argument and dtype_of_handle(operation.outputs[0]) is not None


def _may_write(operation: tf.Operation, node, place: int, ways) -> bool:
    if is_reference(operation.inputs[place]):
        return WRITERS.search(operation.type) is not None
    if not functions_of(node):
        return True
    return any(ways().to_writes(node, place))


def writes(node) -> bool:
    """Returns whether an operation or node may write a variable by itself."""
    kind = node.type if isinstance(node, tf.Operation) else node.op
    if kind in READERS or not (WRITERS.search(kind) or moves_generator(kind)):
        return False
    return not functions_of(node)  # else its functions decide


def operations_of_updates(graph: tf.Graph) -> set[tf.Operation]:
    """Returns the operations that were made for the updates of a graph, to add to."""
    return value_of_graph(graph, _UPDATES, set())


def needed_by_updates(graph: tf.Graph) -> dict[tf.Operation, tf.Operation | None]:
    """Returns the ancestors of all updates that layers have registered."""
    updates = graph.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
    return ancestors([getattr(update, "op", update) for update in updates])


def writing(operations: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Returns those of the operations that may write a variable."""
    library = functools.cache(library_of_functions)
    return [
        operation
        for operation in operations
        if writes(operation)
        or (operation.type in CALLERS and _calls_writer(operation, library()))
    ]


def written_handles(graph: tf.Graph) -> list[tuple[tf.Operation, tf.Tensor]]:
    """Returns (operation, handle) of all variables and tables that a graph writes."""

    def is_write(node) -> bool:
        return writes(node) or WRITERS_OF_TABLES.search(node.op) is not None

    ways = Ways(library_of_functions(graph), is_write, READERS | LOOK_UPS)
    return [
        (operation, tensor)
        for operation in graph.get_operations()
        for place, tensor in enumerate(operation.inputs)
        if tensor.dtype == tf.resource and operation.type not in READERS | PASSING
        if any(ways.to_writes(operation.node_def, place))
        if functions_of(operation) or is_write(operation.node_def)
    ]


def _calls_writer(operation: tf.Operation, library: dict) -> bool:
    return any(map(writes, nodes_of(functions_of(operation), library)))


def varying(operations: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Returns the operations by which one micro-batch differs from another."""
    return {
        operation
        for operation in operations
        if operation.type in FED
        or (operation.op_def.is_stateful and operation.type not in SETTLED)
    }


def _varies(node) -> bool:
    return is_stateful(node.op) is not False and node.op not in SETTLED


def deciding_inputs(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the inputs of an operation, and predicates of its TensorFlow 1 branches."""
    inputs, context = list(operation.inputs), context_of(operation)
    while context is not None:
        if context.IsCondContext():
            inputs.append(context.pred)
        context = context.outer_context
    return inputs


def micro_step_writers(graph: tf.Graph, windows: list) -> "MicroStepWriters":
    """Returns the writers of every micro-step of the graph's train ops.

    Args:
        graph: The graph.
        windows: Its `Window`s.
    """
    counted = [w.is_boundary for w in windows if w.micro_steps is not None]
    writers = value_of_graph(graph, _WRITERS_SO_FAR, {})  # of one version of the graph
    version = graph.version, *(tensor.name for tensor in counted)
    if version not in writers:
        writers.clear()
        writers[version] = MicroStepWriters(graph, counted)
    return writers[version]


class MicroStepWriters:
    """Operations that write another value into a variable with every micro-step.

    These are in the graph so far, run whenever a train op runs, and neither belong to
    the branch that updates nor write in every micro-step of a window the same value.

    Args:
        graph: The graph.
        boundaries: `is_boundary` of the train ops that accumulate over micro-steps.
    """

    def __init__(self, graph: tf.Graph, boundaries: list[tf.Tensor]):
        self._boundaries = {tensor.op for tensor in boundaries}
        self._running = ancestors(descendants(boundaries))
        self._graph = graph
        with graph.as_default():
            self._writers = writers_of(self._running)
        self._known, self._in_update = {}, {}

    def runs(self, operation: tf.Operation) -> bool:
        """Returns whether an operation runs with a train op."""
        return operation in self._running

    def all_of(self, variables: Iterable[tf.Operation]) -> list[tf.Operation]:
        """Returns all operations that run with a train op and write the variables."""
        return [writer for v in variables for writer in self._writers.get(v, ())]

    def changing(self, variable: tf.Operation) -> list[tf.Operation]:
        """Returns those that change a variable, also with an update."""
        writers = self._writers.get(variable, ())
        once = [writer for writer in writers if self.is_in_update(writer)]
        return [*once, *self.of(variable)]

    def of(self, variable: tf.Operation) -> list[tf.Operation]:
        """Returns those of the operations that write a variable."""
        begun, waiting = set(), [variable]
        while waiting:  # not one call in the other, for long chains of variables
            place = waiting[-1]
            writers = self._writers.get(place, [])
            if place not in self._known:
                self._known[place] = writers  # for variables that are written in turn
                begun.add(place)
                read = [v for w in writers for v in self._variables_set_by(w)]
                waiting += [v for v in read if v not in self._known]
                continue
            waiting.pop()
            if place in begun:
                begun.remove(place)
                self._known[place] = [
                    writer
                    for writer in writers
                    if not self.is_in_update(writer) and not self._settles(writer)
                ]
        return self._known[variable]

    def deciding(
        self, variable: tf.Operation, writer: tf.Operation
    ) -> list[tf.Tensor] | None:
        """Returns the inputs of a writer from which a variable's value is computed.

        Returns:
            None if a function draws the value, or takes it from elsewhere.
        """
        if not functions_of(writer):
            return list(writer.inputs[1:])
        decisive = set()
        for place, tensor in enumerate(writer.inputs):
            if may_be_variable(tensor) and variable_of(tensor) is variable:
                for way in self._ways.to_writes(writer.node_def, place):
                    places = places_behind(way, _varies)
                    if places is None:
                        return None
                    decisive |= places
        return [writer.inputs[place] for place in sorted(decisive)]

    def is_in_update(self, operation: tf.Operation) -> bool:
        """Returns whether the boundary decides the effect of an operation."""
        if operation not in self._in_update:
            needed = data_ancestors([operation], deciding_inputs)
            self._in_update[operation] = not self._boundaries.isdisjoint(needed)
        return self._in_update[operation]

    @functools.cached_property
    def _ways(self) -> Ways:
        return Ways(library_of_functions(self._graph), writes)

    def _settles(self, operation: tf.Operation) -> bool:
        """Returns whether an operation writes the same value in a whole window."""
        if operation.type not in SETTERS:
            return False
        read = data_ancestors([tensor.op for tensor in operation.inputs[1:]])
        variables = self._variables_set_by(operation)
        return not varying(read) and not any(self._known[v] for v in variables)

    def _variables_set_by(self, operation: tf.Operation) -> list[tf.Operation]:
        """Returns the variables from which an operation sets another one."""
        if operation.type not in SETTERS or self.is_in_update(operation):
            return []
        read = data_ancestors([tensor.op for tensor in operation.inputs[1:]])
        return [op for op in read if op.type in VARIABLES]
