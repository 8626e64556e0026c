"""The look at a finished graph, before a session first runs it."""

import itertools
import logging
from collections.abc import Callable, Sequence

import tensorflow as tf

from estimator_accum.checks.micro_step_writes import warn_of_micro_step_writes
from estimator_accum.checks.repeated_writes import changes_once
from estimator_accum.graph.internals import call_before_runs
from estimator_accum.graph.names import SETTERS
from estimator_accum.graph.outermost import (
    has_mark,
    mark_graph,
    outermost_graph,
    value_of_graph,
)
from estimator_accum.graph.variables import find_global_step
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.graph.writers import (
    MicroStepWriters,
    micro_step_writers,
    writers_of,
)

# Attributes of a graph.
_HOOKS, _LOOKS = "_estimator_accum_has_hooks", "_estimator_accum_looks"
_DRAWS, _WARNED = "_estimator_accum_draws", "_estimator_accum_warned_of_draws"
_logger = logging.getLogger("tensorflow.estimator_accum")


def note_hooks(graph: tf.Graph) -> None:
    """Notes that the hooks of `make_accumulation_hooks` have begun in a graph."""
    mark_graph(graph, _HOOKS)


def note_draws(graph: tf.Graph, number: tf.Tensor) -> None:
    """Notes that random numbers in a graph are drawn by the number of its micro-step.

    Args:
        graph: The outermost graph.
        number: The number, in this graph or in one of its functions.
    """
    value_of_graph(graph, _DRAWS, []).append(number.op)


def look_at_changes(changes: Sequence, get_windows: Callable) -> None:
    """Checks the inputs of gradients' changes, now and whenever the graph has grown.

    Args:
        changes: The replicas' `Change`s, or `Multipliers`.
        get_windows: Returns the default graph's windows.
    """

    def look() -> None:
        for change in changes:
            change.check_variables(get_windows())

    if changes:
        look()
        _look_before_runs(outermost_graph(), look)


def look_at_train_op(
    strategy, window, variables: list[tf.Variable], get_windows: Callable
) -> None:
    """Checks once how a train op that accumulates over micro-steps is run.

    Args:
        strategy: The current strategy.
        window: Its `Window`.
        variables: The variables that it updates.
        get_windows: Returns the default graph's windows.
    """
    graph, is_done = outermost_graph(), False
    parts = map(strategy.experimental_local_results, variables)
    variables = list(itertools.chain(*parts))

    def look() -> None:
        nonlocal is_done
        if not is_done:
            writers = micro_step_writers(graph, get_windows())
            _check_other_writes(writers, variables)
            is_done = True
            if graph.get_collection(tf.compat.v1.GraphKeys.EVAL_STEP):
                return  # an evaluation
            warn_of_micro_step_writes(graph, writers, get_windows())
            if has_mark(graph, _DRAWS) and not has_mark(graph, _WARNED):
                _warn_of_equal_draws(graph, window, get_windows())
            if _takes_hooks(graph) and not has_mark(graph, _HOOKS):
                _warn_of_missing_hooks(graph, window.name)

    _look_before_runs(graph, look)


def _look_before_runs(graph: tf.Graph, look: Callable[[], None]) -> None:
    """Calls `look` before a session first runs a graph, and again once the graph grew.

    Every way into a session takes this lock of the graph, also a plain session's.
    """
    looks = value_of_graph(graph, _LOOKS, [])
    looks.append(look)
    if len(looks) > 1:
        return
    seen = None

    def look_if_grown() -> None:
        nonlocal seen
        if seen != (graph.version, len(looks)):
            with graph.as_default():
                for check in looks:
                    check()
            seen = graph.version, len(looks)

    call_before_runs(graph, look_if_grown)


def _check_other_writes(
    writers: MicroStepWriters, variables: list[tf.Variable]
) -> None:
    """Refuses operations that change a window's variables again with every micro-step."""
    for variable in variables:
        others = writers.of(variable.op)
        if others and not changes_once(variable.op, writers):
            raise ValueError(
                "A variable of an accumulating train op must not be changed by anything "
                "else in the same run, which would change it with every micro-step. "
                f"Received: {variable.op.name}, written by {others[0].name}. Wrap another "
                "optimizer in AccumulatingOptimizer; pass other writes as "
                "`after_update_ops`, to make them once per update."
            )


def _warn_of_equal_draws(graph: tf.Graph, window, windows: list) -> None:
    """Warns if a train op does not move the step from which its numbers are drawn.

    What a `session.run` fetches beside the train op is not known here. So an operation
    that belongs to no train op may run with each micro-step, and is believed to do so;
    one of another train op, such as that of a GAN's other network, is not.
    """
    step = find_global_step()
    if step is None:
        return
    writers, draws = micro_step_writers(graph, windows), getattr(graph, _DRAWS)
    of_window = MicroStepWriters(graph, [window.is_boundary])
    movers = _movers(graph, step.op, writers)
    if any(map(of_window.runs, draws)):
        movers = [op for op in movers if of_window.runs(op) or not writers.runs(op)]
    elif all(draw.graph is graph for draw in draws):  # in a function it may be of this
        return
    if movers:
        return
    mark_graph(graph, _WARNED)
    _logger.warning(
        "%s must move with every micro-step, since micro_batch_seed counts by it. "
        "Received: the train op %s, which does not move it, so its micro-steps between "
        "two moves draw the same random numbers, unless each run also fetches what moves "
        "it. Pass it to minimize or apply_gradients as `global_step`.",
        step.name,
        window.name,
    )


def _movers(
    graph: tf.Graph, step: tf.Operation, writers: MicroStepWriters
) -> list[tf.Operation]:
    """Returns operations that move a step, and do not do so with an update alone."""
    operations = writers_of(graph.get_operations()).get(step, ())

    def moves(operation: tf.Operation) -> bool:
        read = data_ancestors([tensor.op for tensor in operation.inputs[1:]])
        return operation.type not in SETTERS or step in read

    return [op for op in operations if moves(op) and not writers.is_in_update(op)]


def _takes_hooks(graph: tf.Graph) -> bool:
    """Returns whether a session with hooks runs a graph, as Estimator's does.

    It finalizes the graph, as a Supervisor does too, and fills this collection.
    """
    ready = tf.compat.v1.GraphKeys.READY_FOR_LOCAL_INIT_OP
    return graph.finalized and bool(graph.get_collection(ready))


def _warn_of_missing_hooks(graph: tf.Graph, name: str) -> None:
    note_hooks(graph)  # one warning is enough
    _logger.warning(
        "The train op %s runs without make_accumulation_hooks(): where the data ends in "
        "mid-window, the last micro-batches are not applied, and nothing is reported. "
        "Pass training_hooks=make_accumulation_hooks() to the EstimatorSpec, or "
        "hooks=make_accumulation_hooks() to train().",
        name,
    )
