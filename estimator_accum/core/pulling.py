"""The weights that a window reads from parameter servers, pulled once.

    first micro-step of a window:   copy = weights, over the network
    every micro-step:               gradients read the copy

Within a window the gradients then are those of one set of weights, whatever other
workers write meanwhile. Rows of embeddings are not copied: each micro-step looks up its
own. A read that waits for something, such as an assignment of the weight, stays as it
is.

A second train op may compute from the copies of the first one, as of the layers that
two losses share. The copies of all that share are pulled when a window of one begins.
"""

import functools
from collections.abc import Collection, Iterable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.clock import Clock
from estimator_accum.core.state import State
from estimator_accum.graph.internals import call_before_runs, set_input
from estimator_accum.graph.outermost import outermost_graph, value_of_graph
from estimator_accum.graph.variables import create_variable, read, reads_of
from estimator_accum.graph.walks import data_ancestors

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
        shared = [p for p in pulls if any(user in needed for user, _ in p.inputs)]
        due = [*(operation for p in shared for operation in p.due), is_due.op]
        begin = {operation.inputs[0].name: operation.inputs[0] for operation in due}
        one_begins = functools.reduce(tf.logical_or, begin.values())
        for operation in due:
            set_input(operation, 0, one_begins)
    places = {place for inputs in uses.values() for place in inputs}
    pulls[:] = [p for p in pulls if p not in shared]
    pulls.append(_Pull(due, places.union(*(p.inputs for p in shared))))
    use_before_runs(values, uses.values())


def find_uses(
    variables: list[tf.Variable],
    needed: Collection[tf.Operation],
    without: Collection[tuple] = (),
) -> dict:
    """Returns the inputs of operations that are whole values of variables.

    Args:
        variables: The variables.
        needed: The operations.
        without: Inputs to leave out.

    Returns:
        For each variable that they read, by its reference, (operation, number of the
        input) pairs.
    """
    uses = {}
    for variable in variables:
        inputs = [
            (user, number)
            for value in _values(variable)
            for user in value.consumers()
            if user in needed
            for number, tensor in enumerate(user.inputs)
            if tensor is value and (user, number) not in without
        ]
        if inputs:
            uses[variable.ref()] = inputs
    return uses


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


def use_before_runs(values: list[tf.Tensor], uses: Iterable[list]) -> None:
    """Makes `values` the inputs that `find_uses` returned, before a session runs.

    Until then the graph may grow, by gradients that another train op takes of these
    inputs: a copy has none.
    """
    waiting = [
        (*place, value)
        for value, inputs in zip(values, uses, strict=True)
        for place in inputs
    ]

    def look() -> None:
        while waiting:
            set_input(*waiting.pop())

    call_before_runs(outermost_graph(), look)


def _values(variable: tf.Variable) -> list[tf.Tensor]:
    """Returns the tensors that hold the variable's whole value at any time."""
    return [op.outputs[0] for op in reads_of(variable) if not op.control_inputs]
