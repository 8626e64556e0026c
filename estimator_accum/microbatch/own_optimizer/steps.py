"""Builds the phases of a training step of TensorFlow 2.

    each phase    micro-batches: forward and backward
                  once: what the step changes then, and its results

See phases.py for the order of events, and once_per_batch.py for one phase.
"""

import functools
from collections.abc import Callable, Iterable

import tensorflow as tf

from estimator_accum.core.current_batch import set_batches
from estimator_accum.graph.functions import library_of_functions
from estimator_accum.graph.names import is_draw
from estimator_accum.graph.replicas import in_each_replica
from estimator_accum.graph.walks import ancestors
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.own_optimizer.division import (
    BatchPlan,
    ModelGraph,
    divide,
)
from estimator_accum.microbatch.own_optimizer.interception import Interception
from estimator_accum.microbatch.own_optimizer.once_per_batch import Model
from estimator_accum.microbatch.own_optimizer.order import order
from estimator_accum.microbatch.own_optimizer.patches import intercepting
from estimator_accum.microbatch.own_optimizer.phases import Phases
from estimator_accum.microbatch.own_optimizer.times import Times
from estimator_accum.microbatch.repeatable import (
    draw_by_number,
    is_repeatable,
    make_repeatable,
)
from estimator_accum.microbatch.replica import ReplicaBatch, StepPhase, complete

_OF_OLD_ROWS = (
    "A variable that examples look up must not change before the last gradient that needs "
    "the rows. Received: {} of type {}. Look them up again after the change, or make two "
    "steps of it."
)
_OF_NEW_ROWS = (
    "Rows that gradients of several phases need are computed in each phase, so their "
    "operations must give one result. Received: {} of type {}. Compute them in the data "
    "set, or make two steps of it; for random numbers in functions, branches and loops "
    "there is micro_batch_seed."
)


def build_step(batches: list[WholeBatch], build: Callable) -> list[StepPhase]:
    """Returns the phases of a step.

    Args:
        batches: The batch of each replica; the operations of its micro-batches are added
            to it.
        build: Calls the step on micro-batches, and returns its results, tensors.

    Raises:
        ValueError: If what the step does with a micro-batch cannot be done with several.
    """
    graph = tf.compat.v1.get_default_graph()
    set_batches(graph, batches)
    phases = Phases(batches)
    with batches[0].as_current(), intercepting(phases.gradients, graph):
        results = [tf.identity(result) for result in build()]
    return complete_phases(phases, results)


def complete_phases(
    phases: Phases,
    results: list[tf.Tensor],
    ends: Iterable[tf.Operation] = (),
    losses: Iterable[tf.Tensor] = (),
) -> list[StepPhase]:
    """Returns the phases of a step or model_fn, to which nothing is added any more.

    Args:
        phases: The phases, with all gradients.
        results: Results of a step.
        ends: In the graph of a model_fn, its train op and others that run with it.
        losses: Further losses, whose values are shown.
    """
    models = _for_each(phases, lambda i, part: Model(part))
    works = [part.batch.works.total for parts in phases.all for part in parts]
    passes = [op for work in works for op in (*work.micro_ops, *work.once)]
    times = phases.times([*ends, *passes, *(loss.op for loss in losses)])
    phases.check(times)
    twice = [tensor for work in works for tensor in work.twice]
    if times.of_tensors(twice):
        raise ValueError(
            "whole_batch_loss must be computed from variables that the batch has not "
            f"changed. Received: {twice[0].name}, computed after an update. Take its "
            "gradient before the first update."
        )

    def losses_of(i: int, part: Interception) -> list[tf.Tensor]:
        shown = [loss for loss in losses if times.of_tensors([loss]) == i]
        called = [loss for call in part.calls for loss in call.losses]
        return [*shown, *called]

    plans = _divide(times, phases, models, [result.op for result in results], losses_of)
    fed = [tensor for plan in plans for tensor in plan.fed]
    fed = list({tensor.ref(): tensor for tensor in fed}.values())

    def values_of(i: int, part: Interception, model: Model):
        tensors = [
            tensor
            for tensor in fed
            if times.of_tensors([tensor]) == i and tensor.op in model.graph.of_batch
        ]
        before = reported.setdefault(part.batch.begin.name, [])
        works = part.batch.works.total
        inside = ancestors([*works.micro_ops, *works.once]) if before else {}
        others = [tensor for tensor in before if tensor.op not in inside]
        with part.batch.as_current():
            plan = plans[i]._replace(fed=tensors)
            computes = functools.partial(times.is_as_before, phase=i)
            values = model.values(plan, losses_of(i, part), others, computes)
        needed = ancestors(value.op for _, value in values.pairs)
        earlier[i] += [tensor for tensor in others if tensor.op in needed]
        before += [tensor for tensor, _ in values.pairs]
        return values

    reported, earlier = {}, [[] for _ in plans]
    values = _for_each(phases, values_of, models)
    has_more = len(phases.all) > 1
    _for_each(
        phases,
        lambda i, part, model, values: model.share_draws(values),
        models,
        values,
    )
    _for_each(phases, lambda i, part: _draw_again(part, has_more))

    def complete_part(i: int, part: Interception, model: Model, values) -> ReplicaBatch:
        with part.batch.as_current():
            parts = model.parts(values, losses_of(i, part))
            return complete(part.batch, **parts)

    replicas = _for_each(phases, complete_part, models, values)
    kept = _handed_on(times, replicas, plans, earlier)
    if not tf.compat.v1.get_default_graph().building_function:
        _order(plans, values, replicas, kept, earlier)
    built, returned = [], {result.op for result in results}
    for i, plan in enumerate(plans):
        ready = {n: r for n, r in enumerate(results) if _number(times, r.op) == i}
        changes = [operation for operation in plan.roots if operation not in returned]
        changes += [operation for model in models[i] for operation in model.clear]
        tensors = [tensor for operation in kept[i] for tensor in operation.outputs]
        built.append(StepPhase(replicas[i], ready, changes, tensors, earlier[i], times))
    return built


def _for_each(phases: Phases, function: Callable, *more: list[list]) -> list[list]:
    """Returns the results of a function for each phase and replica, in the replica.

    Args:
        phases: The phases.
        function: Function of a phase's number, a part, and those of `more`.
        more: Results of `_for_each`.
    """

    def of_replica(replica: int) -> list:
        return [
            function(i, parts[replica], *(results[i][replica] for results in more))
            for i, parts in enumerate(phases.all)
        ]

    columns = in_each_replica(of_replica, len(phases.all[0]))
    return [list(row) for row in zip(*columns, strict=True)]


def _divide(
    times: Times,
    phases: Phases,
    models: list[list[Model]],
    results: list,
    losses_of: Callable,
) -> list[BatchPlan]:
    """Returns the part of each phase that runs once."""
    works = [[part.batch.works for part in parts] for parts in phases.all]
    passes = [
        [op for work in row for op in (*work.total.micro_ops, *work.total.once)]
        for row in works
    ]
    losses = [
        [loss for part in parts for loss in losses_of(i, part)]
        for i, parts in enumerate(phases.all)
    ]
    times.cut_waits(passes, losses)
    inside = ancestors(op for row in passes for op in row)  # without changes
    once = [operation for operation in times.changes if operation not in inside]
    library, plans = library_of_functions(), []
    for i, parts in enumerate(phases.all):
        reads = [read for part in parts for read in part.reads]
        computes = functools.partial(times.is_as_before, phase=i)
        graph = ModelGraph(
            works[i], times.of_batch, reads, times.handles, library, computes
        )
        roots = [op for op in [*once, *results] if _number(times, op) == i]
        waits = [wait for model in models[i] for wait in model.waits]
        roots += [wait for wait in waits if _number(times, wait) == i]
        plans.append(divide(graph, roots, losses[i], times.late))
    return plans


def _number(times: Times, operation: tf.Operation) -> int:
    """Returns the number of the phase that runs an operation once."""
    return max(0, times.of(operation))


def _handed_on(
    times: Times,
    replicas: list[list[ReplicaBatch]],
    plans: list[BatchPlan],
    earlier: list[list[tf.Tensor]],
) -> list[dict]:
    """Returns the operations of each phase whose results later ones get.

    Raises:
        ValueError: If micro-batches of a later phase need such a result.
    """
    library, kept, number = library_of_functions(), [{} for _ in plans], -1
    while number < sum(map(len, kept)):  # those of later phases may need others
        number, first = sum(map(len, kept)), {}
        for i, plan in enumerate(plans):
            runs = functools.cache(
                functools.partial(_runs, times, library, first, kept, i)
            )
            starts = filter(runs, [*plan.roots, *kept[i]])
            _visit(starts, [*plan.fed, *earlier[i]], runs)
            for replica in replicas[i]:
                shown, work = [value.op for _, value in replica.reported], replica.total
                _visit([*work.micro_ops, *work.once, *shown], earlier[i], runs)
    return kept


def _order(plans, values, replicas, kept, earlier) -> None:
    """Orders the part of each phase of a model_fn that runs once, in its one replica."""
    before = []
    for i, plan in enumerate(plans):
        reported = [tensor for tensor, _ in values[i][0].pairs]
        fed = [*reported, *replicas[i][0].total.done, *before, *earlier[i]]
        order(plan._replace(roots=[*plan.roots, *kept[i]], fed=fed))
        before += [tensor for operation in kept[i] for tensor in operation.outputs]


def _runs(
    times: Times,
    library: dict,
    first: dict,
    kept: list[dict],
    phase: int,
    operation: tf.Operation,
) -> bool:
    """Returns whether a phase runs an operation itself; if not, notes it in `kept`.

    Args:
        times: When operations run.
        library: Definitions of functions by name.
        first: The first phase that runs an operation, which grows.
        kept: The operations of each phase that later ones get, which grow.
        phase: The phase.
        operation: The operation.
    """
    if times.is_as_before(operation, phase):
        source = first.setdefault(operation, phase)
        if source == phase or is_repeatable(operation, library):
            return True
        sentence = _OF_NEW_ROWS
    else:
        source, sentence = _number(times, operation), _OF_OLD_ROWS
    if times.is_in_passes(operation):
        raise ValueError(sentence.format(operation.name, operation.type))
    kept[source][operation] = None
    return False


def _visit(starts: Iterable, fed: Iterable[tf.Tensor], runs: Callable) -> None:
    """Calls `runs` for all that operations need, from fed tensors on."""
    ends = {tensor.op for tensor in fed}
    ancestors(starts, lambda operation: operation not in ends and runs(operation))


def _draw_again(part: Interception, has_more: bool) -> None:
    """Makes random numbers the same when a batch is retried, and in all its phases.

    Args:
        part: The part of a phase.
        has_more: Whether there are several phases.
    """
    draws = [op for op in ancestors(part.batch.works.total.micro_ops) if is_draw(op)]
    with part.batch.as_current():
        if has_more:
            drawn = [operation.outputs[0] for operation in draws]
            make_repeatable(drawn, "Random numbers of a step with several updates")
        else:
            draw_by_number(draws, is_shared=False)
