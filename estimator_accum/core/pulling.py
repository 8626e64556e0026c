"""The weights that a window reads from parameter servers, pulled once.

    first micro-step of a window:   copy = weights, over the network
    every micro-step:               gradients read the copy

Within a window the gradients then are those of one set of weights, whatever other
workers write meanwhile. A function, loop or branch that reads a weight is given the
handle of the copy. Rows of embeddings are not copied: each micro-step looks up its
own. A read behind a write of the weight by this worker stays as it is.

A second train op may compute from the copies of the first one, as of the layers that
two losses share. The copies of all that share are pulled when a window of one begins.
"""

import functools
from collections.abc import Collection
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.clock import Clock
from estimator_accum.core.state import State
from estimator_accum.graph.functions import library_of_functions
from estimator_accum.graph.handles import Ways
from estimator_accum.graph.internals import call_before_runs, set_input
from estimator_accum.graph.names import READERS
from estimator_accum.graph.outermost import outermost_graph, value_of_graph
from estimator_accum.graph.variables import create_variable, read, reads_of
from estimator_accum.graph.walks import data_ancestors, descendants
from estimator_accum.graph.writers import writes

_PULLS = "_estimator_accum_pulls"  # a graph's attribute


class _Pull(NamedTuple):
    """Copies of train ops that share weights.

    Attributes:
        due: For each train op, the operation whose result is whether this micro-step
            pulls.
        inputs: The inputs that read a copy, (operation, number) pairs.
    """

    due: list[tf.Operation]
    inputs: set


def pull_once(
    clock: Clock, state: State, variables: list[tf.Variable], terms: list[tf.Tensor]
) -> None:
    """Lets `terms` be computed from this worker's copies of the trained weights.

    Args:
        clock: When the window opens.
        state: The train op's variables.
        variables: The trained variables.
        terms: Gradients and scalars of a micro-batch.

    Creates:
        `<variable>/copy`, local, for each trained variable that they read as a whole.
    """
    needed = data_ancestors([term.op for term in terms])
    pulls = value_of_graph(outermost_graph(), _PULLS, [])
    copied = {place for pull in pulls for place in pull.inputs}
    uses = find_uses(variables, needed, copied)
    with tf.control_dependencies(None), tf.device(state.place.worker):
        copies, pull = make_copies(list(uses), state.place.options)
        is_due = tf.identity(clock.opens_window(state.micro_steps))
        with tf.control_dependencies(clock.once_per_window(is_due, pull)):
            values = [read(copy) for copy in copies]
            handles = [tf.identity(copy.handle) for copy in copies]
        replaced = {
            (use.operation, use.number): use.of_copy(handle if use.is_handle else value)
            for value, handle, of_one in zip(
                values, handles, uses.values(), strict=True
            )
            for use in of_one
        }
        shared = [p for p in pulls if any(user in needed for user, _ in p.inputs)]
        due = [*(operation for p in shared for operation in p.due), is_due.op]
        begin = {operation.inputs[0].name: operation.inputs[0] for operation in due}
        one_begins = functools.reduce(tf.logical_or, begin.values())
        for operation in due:
            set_input(operation, 0, one_begins)
    pulls[:] = [p for p in pulls if p not in shared]
    pulls.append(_Pull(due, {*replaced}.union(*(p.inputs for p in shared))))
    _replace_before_runs(replaced)


class _Use(NamedTuple):
    """An input of an operation by which it reads a variable.

    Attributes:
        operation: The operation.
        number: Number of its input.
        is_handle: Whether the input is the handle, which a function reads, or the value.
        way: Tensors between the variable and the input: its value, and the handle in
            loops and branches of TensorFlow 1.
    """

    operation: tf.Operation
    number: int
    is_handle: bool
    way: tuple[tf.Tensor, ...]

    def of_copy(self, copy: tf.Tensor) -> tf.Tensor:
        """Returns the input for a copy's handle or value."""
        return functools.reduce(_as_passed_on, self.way, copy)


def _as_passed_on(value: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Passes `value` on in the way in which `tensor` is."""
    operation = tensor.op
    if operation.type == "Switch":
        branches = tf.raw_ops.Switch(data=value, pred=operation.inputs[1])
        return branches[tensor.value_index]
    if operation.type == "Enter":
        names = ("frame_name", "is_constant", "parallel_iterations")
        options = {name: operation.get_attr(name) for name in names}
        return tf.raw_ops.Enter(data=value, **options)
    if not operation.control_inputs:
        return value
    with tf.control_dependencies(operation.control_inputs):
        return tf.identity(value)


def find_uses(
    variables: list[tf.Variable],
    needed: Collection[tf.Operation],
    without: Collection[tuple] = (),
) -> dict:
    """Returns the inputs by which operations read whole values of variables.

    Args:
        variables: The variables.
        needed: The operations.
        without: Inputs to leave out, (operation, number) pairs.

    Returns:
        For each variable that they read, by its reference, its `_Use`s.

    Raises:
        ValueError: If one of them calls a function that reads and writes a variable.
    """
    ways = Ways(library_of_functions(), writes, READERS - {"ReadVariableOp"})
    uses = {}
    for variable in variables:
        readers, writers = _users_of(variable, ways)
        behind = descendants(writers)
        of_one = []
        for operation, place, way in readers:
            if operation in behind:
                continue
            if place is not None:  # calls a function
                if operation in writers and operation in needed:
                    raise ValueError(_writes_inside(variable, operation))
                of_one += [_Use(operation, place, True, way)]
                continue
            value = operation.outputs[0]
            of_one += [
                _Use(user, number, False, (*way, value))
                for user in dict.fromkeys(value.consumers())
                for number, tensor in enumerate(user.inputs)
                if tensor is value
            ]
        of_one = [
            use
            for use in of_one
            if use.operation in needed and (use.operation, use.number) not in without
        ]
        if of_one:
            uses[variable.ref()] = of_one
    return uses


def _users_of(variable: tf.Variable, ways: Ways) -> tuple[list, set[tf.Operation]]:
    """Returns the operations that read a variable, and those that write it.

    Returns:
        Of the first: (operation, number of its input, tensors before it) for calls of
        functions that read it, and with None as number for a read.
    """
    if not hasattr(variable, "handle"):  # a reference variable
        reference, reads = variable.op.outputs[0], reads_of(variable)
        others = {*reference.consumers()}.difference(reads)
        return [(operation, None, ()) for operation in reads], others
    readers, writers = [], set()
    waiting = [(variable.handle, ())]
    while waiting:
        handle, way = waiting.pop()
        for user in dict.fromkeys(handle.consumers()):
            if user.type == "ReadVariableOp":
                readers.append((user, None, way))
            elif user.type in {"Identity", "Enter", "Switch"}:
                waiting += [(tensor, (*way, tensor)) for tensor in user.outputs]
            elif user.type not in READERS:
                node = user.node_def
                for place, tensor in enumerate(user.inputs):
                    if tensor is handle:
                        ends = {way[-1][0].op for way in ways.to_writes(node, place)}
                        if "ReadVariableOp" in ends:
                            readers.append((user, place, way))
                        if ends - {"ReadVariableOp"}:
                            writers.add(user)
    return readers, writers


def _writes_inside(variable: tf.Variable, operation: tf.Operation) -> str:
    return (
        "A function, loop or branch that a loss needs must not read and write a weight "
        "of a parameter server, because a window reads its weights once. Received: "
        f"{operation.name!r}, which reads and writes {variable.name}. Assign to the "
        "weight before or behind it."
    )


def make_copies(references: list, options: dict):
    """Creates copies of variables; returns them, and a function that makes the pull."""
    variables = [reference.deref() for reference in references]
    copies = [
        create_variable(
            f"{variable.op.name}/copy",
            variable.shape,
            variable.dtype.base_dtype,
            **options,
        )
        for variable in variables
    ]

    def pull() -> list[tf.Operation]:
        return [
            tf.raw_ops.AssignVariableOp(
                resource=copy.handle, value=variable.read_value()
            )
            for copy, variable in zip(copies, variables, strict=True)
        ]

    return copies, pull


def _replace_before_runs(replaced: dict[tuple, tf.Tensor]) -> None:
    """Sets inputs, by (operation, number), before a session runs.

    Until then the graph may grow, by gradients that another train op takes of these
    inputs: a copy has none.
    """

    def look() -> None:
        while replaced:
            place, tensor = replaced.popitem()
            set_input(*place, tensor)

    call_before_runs(outermost_graph(), look)
