"""Creates the plan of a train op, with its variables."""

import tensorflow as tf

from estimator_accum.core.accumulators import Accumulator, variables_of
from estimator_accum.core.clock import Clock
from estimator_accum.core.micro_batch import MicroBatch
from estimator_accum.core.noise_scale import create_noise_scale
from estimator_accum.core.options import Options
from estimator_accum.core.plan import Plan
from estimator_accum.core.registry import get_windows
from estimator_accum.core.state import Place, State, check_place, place_of_window
from estimator_accum.core.update_step import get_or_create_update_step
from estimator_accum.core.v1_optimizers import innermost
from estimator_accum.graph.internals import create_slots, is_in_cluster
from estimator_accum.graph.variables import create_shared_scalar


def create_plan(
    strategy,
    options: Options,
    clock: Clock,
    micro_batch: MicroBatch,
    global_step: tf.Variable | None,
) -> Plan:
    """Creates the variables, in cross-replica context, outside any branch."""
    windows = get_windows()
    name = _free_name(options.name, [window.name for window in windows])
    updated = (micro_batch.change or micro_batch).variables
    with tf.init_scope():  # slots then get their usual names
        create_slots(innermost(options.optimizer), updated)
    shared_step = get_or_create_update_step()
    accumulators, sums = [], {}
    place = place_of_window(
        micro_batch.variables, micro_batch.device, clock.has_counter
    )
    if clock.keeps_sums:
        taken = {v.op.name for window in windows for v in window.saved}
        accumulators = _create_accumulators(options, name, micro_batch, taken, place)
        sums = {
            term: place.create_sum(f"{name}/{term}", tf.TensorShape([]), value.dtype)
            for term, value in micro_batch.sums.items()
        }
    clipped = _counter(name, "clipped_updates") if options.clip_norm else None
    stop_request = None
    if is_in_cluster(strategy):
        with tf.control_dependencies(None):
            stop_request = tf.compat.v1.placeholder_with_default(
                0.0, [], "stop_request"
            )
    check_place(place, variables_of([*accumulators, *sums.values()]))
    return Plan(
        options=options.named(name),
        clock=clock,
        names=[variable.op.name for variable in micro_batch.variables],
        num_replicas=strategy.num_replicas_in_sync,
        replica_divisor=micro_batch.replica_divisor,
        is_observed=True,
        state=State(
            accumulators=accumulators,
            sums=sums,
            micro_steps=_counter(name, "micro_steps", place)
            if clock.has_counter
            else None,
            update_step=_counter(name, "update_step") if windows else shared_step,
            global_step=global_step,
            clipped_updates=clipped,
            noise=create_noise_scale(name) if options.noise_scale else [],
            place=place,
        ),
        stop_request=stop_request,
    )


def _counter(name: str, what: str, place: Place | None = None) -> tf.Variable:
    options = {} if place is None else place.options
    return create_shared_scalar(f"{name}/{what}", **options)


def _create_accumulators(
    options: Options, name: str, micro_batch: MicroBatch, taken: set[str], place: Place
) -> list[Accumulator]:
    """Creates an accumulator for each trained variable.

    `taken` has the names of other train ops' variables.
    """
    sums, taken = [], set(taken)
    pairs = zip(micro_batch.gradients, micro_batch.variables, strict=True)
    for gradient, variable in pairs:
        # `op.name` of a mirrored variable is replica 0's name in every replica.
        path = f"{variable.op.name}/accumulator"
        if path in taken:  # a second train op's variable
            path = f"{variable.op.name}/{name}/accumulator"
        taken.add(path)
        dtype = tf.as_dtype(options.accumulator_dtype or variable.dtype.base_dtype)
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        sums.append(place.create_sum(path, variable.shape, dtype, is_sparse))
    return sums


def _free_name(name: str | None, taken: list[str]) -> str:
    """Returns `name`, or the first free one of "accumulation", "accumulation_1", ..."""
    if name is None:
        further = (f"accumulation_{i}" for i in range(1, 1 + len(taken)))
        return next(word for word in ("accumulation", *further) if word not in taken)
    if name in taken:
        raise ValueError(
            "`name` must be unique among the accumulating train ops of a graph. "
            f"Received: {name!r} a second time. Pass another `name`."
        )
    return name
