"""Creates the plan of a train op, with its variables."""

import tensorflow as tf

from estimator_accum.core.accumulators import Accumulator, variables_of
from estimator_accum.core.clock import Clock
from estimator_accum.core.gradients import dtype_of_sum
from estimator_accum.core.micro_batch import MicroBatch
from estimator_accum.core.noise_scale import create_noise_scale
from estimator_accum.core.options import Options
from estimator_accum.core.plan import Plan
from estimator_accum.core.registry import get_windows
from estimator_accum.core.slice_list import SliceList
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
    name = _free_name(options.name, [window.name for window in get_windows()])
    options = options.named(name)
    updated = (micro_batch.change or micro_batch).variables
    with tf.init_scope():  # slots then get their usual names
        create_slots(innermost(options.optimizer), updated)
    state = _create_state(options, clock, micro_batch, global_step)
    stop_request = None
    if is_in_cluster(strategy):
        with tf.control_dependencies(None):
            stop_request = tf.compat.v1.placeholder_with_default(
                0.0, [], "stop_request"
            )
    return Plan(
        options=options,
        clock=clock,
        names=[variable.op.name for variable in micro_batch.variables],
        state=state,
        num_replicas=strategy.num_replicas_in_sync,
        replica_divisor=micro_batch.replica_divisor,
        are_slices=micro_batch.are_slices,
        is_observed=True,
        stop_request=stop_request,
    )


def _create_state(
    options: Options,
    clock: Clock,
    micro_batch: MicroBatch,
    global_step: tf.Variable | None,
) -> State:
    """Creates the window's own variables, in their place."""
    name, windows = options.name, get_windows()
    update_step = get_or_create_update_step()
    place = place_of_window(
        micro_batch.variables, micro_batch.device, clock.has_counter
    )
    accumulators, sums = [], {}
    if clock.keeps_sums:
        used_names = {v.op.name for window in windows for v in window.saved}
        accumulators = _create_accumulators(options, micro_batch, used_names, place)
        sums = {
            term: place.create_sum(f"{name}/{term}", tf.TensorShape([]), value.dtype)
            for term, value in micro_batch.sums.items()
        }
    check_place(place, variables_of([*accumulators, *sums.values()]))
    clipped_updates = micro_steps = None
    if options.clip_norm:
        clipped_updates = create_shared_scalar(f"{name}/clipped_updates")
    if clock.has_counter:
        micro_steps = create_shared_scalar(f"{name}/micro_steps", **place.options)
    if windows:  # of other train ops
        update_step = create_shared_scalar(f"{name}/update_step")
    return State(
        accumulators=accumulators,
        sums=sums,
        micro_steps=micro_steps,
        update_step=update_step,
        global_step=global_step,
        clipped_updates=clipped_updates,
        noise=create_noise_scale(name) if options.noise_scale else [],
        place=place,
    )


def _create_accumulators(
    options: Options, micro_batch: MicroBatch, used_names: set[str], place: Place
) -> list[Accumulator | SliceList]:
    """Creates an accumulator for each trained variable.

    Args:
        options: The options, with the window's name.
        micro_batch: The replica's micro-batch.
        used_names: Names of other train ops' variables.
        place: Place of the accumulators.
    """
    accumulators, used_names = [], set(used_names)
    pairs = zip(micro_batch.gradients, micro_batch.variables, strict=True)
    for gradient, variable in pairs:
        # `op.name` of a mirrored variable is replica 0's name in every replica.
        name = f"{variable.op.name}/accumulator"
        if name in used_names:  # a second train op's variable
            name = f"{variable.op.name}/{options.name}/accumulator"
        used_names.add(name)
        usual = dtype_of_sum(variable.dtype.base_dtype)
        dtype = tf.as_dtype(options.accumulator_dtype or usual)
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        accumulators.append(place.create_sum(name, variable.shape, dtype, is_sparse))
    return accumulators


def _free_name(name: str | None, used_names: list[str]) -> str:
    """Returns `name`, or the first free one of "accumulation", "accumulation_1", ..."""
    if name is None:
        numbered = (f"accumulation_{i}" for i in range(1, 1 + len(used_names)))
        names = ("accumulation", *numbered)
        return next(name for name in names if name not in used_names)
    if name in used_names:
        raise ValueError(
            "`name` must be unique among the accumulating train ops of a graph. "
            f"Received: {name!r} a second time. Pass another `name`."
        )
    return name
