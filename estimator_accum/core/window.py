"""One window: the accumulation rule, in the order in which things happen.

    for each micro-batch:                      # one session.run, or one pass of a batch
        sums += scale * (gradients, loss), weight         # add, on each replica
        UPDATE_OPS                             # of this micro-batch
        micro_steps += counted                 # clock.count()
        if micro_steps >= K:                   # the boundary, in a branch of the clock
            sums = all_reduce(sums)            # close: the only reduction
            mean = change(sums / weight)       # a caller's change of gradients, if any
            check_finite(mean)                 # add does so with dense sums
            clear(rows of sparse sums)         # the next window overwrites dense ones
            optimizer.apply(clip(mean))        # unless a policy skips the window
            after_update_ops
            micro_steps = 0
        update_step += has_updated             # outside of the branch: 0 or 1
        global_step += 1

    update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i , clip_norm) )

over all micro-batches i of the window and all replicas. Changes to the gradients before
`apply_gradients` apply to the mean, before it is clipped; without any, dividing and
clipping are one multiplication. `make_accumulating_train_op`, `AccumulatingOptimizer`,
`microbatch_model_fn` and `keras.accumulate` all train by `close` and, if a window may
have several micro-batches, by `add`; they differ in the clock and the optimizer's call.

Each line waits for the one before, by a control or data dependency, except UPDATE_OPS:
they run beside `add`, in any order, and the count waits for both. If a check of `add`
raises, no sum has changed; if a check of `close` raises, the window keeps its sums. The
functions of a boundary, each called by the last one above it with less indentation, and
TensorFlow's context:

    make_train_op              replica          adds, hands over
      _finish                  cross-replica    counts; at the end, makes the `Step`
        _close_or_skip         cross-replica    the two branches
          clock.branch         cross-replica    a tf.cond, if there is a counter
            close              cross-replica
              _take_mean       replica          all_reduce to clear, and clip
              apply            cross-replica    in a tf.cond, if a policy may skip
                _apply         replica          the optimizer's call

Two counters say where training stands, both global variables that checkpoints hold:

    update_step               optimizer updates so far   [updates]
    accumulation/micro_steps  micro-steps in the open window   [micro-steps]

The second one decides whether a micro-step is a boundary. It moves in the same chain of
control dependencies as `global_step`, so the two differ only by micro-batches that are
skipped, and unlike `global_step % K` it stays right when K changes and when a partial
window was applied.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.checks.before_runs import look_at_changes, look_at_train_op
from estimator_accum.checks.global_step import warn_of_global_step
from estimator_accum.checks.other_clocks import warn_of_other_clocks
from estimator_accum.core.accumulators import add_up, commit, take_window
from estimator_accum.core.applying import Origins, apply
from estimator_accum.core.change import Change
from estimator_accum.core.clock import Clock
from estimator_accum.core.creation import create_plan
from estimator_accum.core.gradients import (
    Gradient,
    cast,
    global_norm,
    half_squared_norms,
    scale_and_clip,
    scaled,
    values_of,
    with_unique_rows,
)
from estimator_accum.core.micro_batch import MicroBatch
from estimator_accum.core.noise_scale import update_noise_scale
from estimator_accum.core.nonfinite import CheckedValues
from estimator_accum.core.options import Options
from estimator_accum.core.plan import Plan
from estimator_accum.core.pulling import pull_once
from estimator_accum.core.reduction import sum_over_replicas
from estimator_accum.core.registry import Window, get_windows, register
from estimator_accum.core.step import Result, Step
from estimator_accum.core.update_ops import update_ops_of
from estimator_accum.core.v1_optimizers import innermost
from estimator_accum.graph.branches import nan
from estimator_accum.graph.internals import READS_OF_GLOBAL_STEP
from estimator_accum.graph.replicas import first_of, flatten
from estimator_accum.graph.variables import add_to, find_global_step, read, reads_of


class WindowSums(NamedTuple):
    """Sums of one replica, or of all after the reduction.

    Attributes:
        gradients: One for each trained variable.
        scalars: Sums of scalars, by name.
    """

    gradients: list[Gradient]
    scalars: dict[str, tf.Tensor]


class Added(NamedTuple):
    """Values of one replica for the boundary; there, of all replicas.

    Attributes:
        sums: The `WindowSums` of a window that is one micro-batch; None if they are in
            accumulators.
        counted: 1 if the window counts the micro-batch, else 0.
        mean_loss: Mean loss of the replica's micro-batches in the window so far.
        steps: K [micro-steps per update].
        change: Code that changes gradients; None if it changes nothing.
    """

    sums: WindowSums | None
    counted: tf.Tensor
    mean_loss: tf.Tensor
    steps: tf.Tensor
    change: Change | None


def make_train_op(
    options: Options,
    clock: Clock,
    micro_batch: MicroBatch,
    global_step: tf.Variable | None,
) -> tf.Operation:
    """Makes a train op: one micro-step, in replica context.

    Args:
        options: The caller's options.
        clock: When the window closes.
        micro_batch: This replica's gradients, loss and weight.
        global_step: Variable that increases by 1 every micro-step; None leaves that to
            the caller.
    """
    update_ops = update_ops_of(options)

    def create(strategy) -> Plan:
        return create_plan(strategy, options, clock, micro_batch, global_step)

    def finish(strategy, *added) -> tf.Operation:  # the first replica's is called
        return _finish(strategy, plan, micro_batch, update_ops, Added(*added))

    in_cross_replica_context = tf.distribute.get_replica_context().merge_call
    plan = in_cross_replica_context(create)
    if plan.state.place.is_on_worker and clock.keeps_sums:
        terms = map(values_of, micro_batch.gradients)
        terms = [*terms, *micro_batch.sums.values()]
        pull_once(clock, plan.state, micro_batch.variables, terms)
    with tf.control_dependencies(None):  # hooks fetch K without a micro-batch
        steps = clock.steps(plan.state.update_step)
    if clock.keeps_sums:
        sums, counted = None, add(plan, micro_batch)
    else:
        counted, sums = tf.constant(1, tf.int64), _sums_of_one(plan, micro_batch)
    with tf.control_dependencies(update_ops):
        counted = tf.identity(counted)
    counted = clock.hand_over(counted, micro_batch.loss, plan.state.all_accumulators)
    with clock.at_the_boundary():
        loss = _mean_loss(plan, micro_batch, counted)
        added = Added(sums, counted, loss, steps, micro_batch.change)
        return in_cross_replica_context(finish, args=tuple(added))


def _warn_of_clocks(
    window: Window, micro_batch: MicroBatch, updates: dict, update_ops: list
) -> None:
    """Warns of values that move with every micro-step, such as global_step."""
    optimizer = type(innermost(window.options.optimizer)).__name__
    gradients = [values_of(gradient) for gradient in micro_batch.gradients]
    warn_of_other_clocks(micro_batch.loss, gradients, updates[optimizer])
    counter = _micro_step_counter(window.plan)
    if counter is None:
        return
    warn_of_global_step(
        counter,
        micro_batch.loss,
        gradients,
        micro_batch.sums["weight"],
        window.gradient_accumulation_steps,
        optimizer,
        updates,
        update_ops,
    )


def add(plan: Plan, micro_batch: MicroBatch) -> tf.Tensor:
    """Adds one micro-batch to this replica's sums.

    Returns:
        int64 scalar, 1 if the window counts the micro-batch, else 0; available after
        the micro-batch is added.
    """
    accumulators = plan.state.all_accumulators
    gradients, scalars = micro_batch.gradients, list(micro_batch.sums.values())
    if micro_batch.scale is not None:  # in the accumulators' dtype: it may be wider
        gradients = [
            scaled(cast(gradient, accumulator.total.dtype), micro_batch.scale)
            for gradient, accumulator in zip(gradients, accumulators)
        ]
    weight, has_weight = micro_batch.sums["weight"], None
    loss = micro_batch.sums.get("loss", weight)
    with tf.control_dependencies([loss]):  # a failed loss writes nothing
        is_first = plan.clock.opens_window(plan.state.micro_steps)
        sums = add_up(accumulators, [*gradients, *scalars], is_first)
    if not tf.get_static_value(weight):  # a mean over no tokens is 0 / 0
        has_weight = tf.not_equal(weight, 0.0)
    values = CheckedValues(
        plan.names,
        _number(plan),
        sums[: len(gradients)],
        [weight] if micro_batch.loss is None else [weight, micro_batch.loss],
    )
    is_good, checked = plan.policy.check_micro_batch(values, has_weight)
    is_added = has_weight if is_good is None else is_good
    if has_weight is not None and is_good is not None:
        is_added = tf.logical_and(is_good, has_weight)
    with tf.control_dependencies(checked):
        written = commit(accumulators, sums, is_first, is_added)
    with tf.control_dependencies(written):
        if is_good is None or plan.num_replicas > 1:
            return tf.constant(1, tf.int64)
        return tf.cast(is_good, tf.int64)  # another one takes its place in the window


def _sums_of_one(plan: Plan, micro_batch: MicroBatch) -> WindowSums:
    """Returns the sums of a window that is one micro-batch of each replica."""
    gradients = micro_batch.gradients
    if micro_batch.scale is not None and plan.num_replicas > 1:
        gradients = [scaled(gradient, micro_batch.scale) for gradient in gradients]
    return WindowSums(gradients, micro_batch.sums)


def _mean_loss(plan: Plan, micro_batch: MicroBatch, counted) -> tf.Tensor:
    """Returns the mean loss of this replica's micro-batches so far; NaN if unknown."""
    if micro_batch.loss is None:
        with tf.control_dependencies(None):
            return nan(micro_batch.sums["weight"].dtype)
    if not plan.clock.keeps_sums:
        return micro_batch.loss
    sums = plan.state.sums
    with tf.control_dependencies([counted]):
        totals = (read(term.total) for term in (sums["loss"], _divisor_of(sums)))
        return _mean(plan, *totals)


def _finish(
    strategy,
    plan: Plan,
    micro_batch: MicroBatch,
    update_ops: list[tf.Operation],
    added: Added,
) -> tf.Operation:
    """Closes the window at the boundary, then counts; in cross-replica context.

    Args:
        strategy: The current strategy, which may be TensorFlow's default one.
        plan: The train op's plan.
        micro_batch: That of the first replica.
        update_ops: Operations that run with every micro-step of the first replica.
        added: The replicas' `Added`.

    Returns:
        The train op.
    """
    steps = first_of(strategy, added.steps)
    counted = flatten(strategy, added.counted)
    train_ops = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)
    known_train_ops = list(train_ops)
    is_boundary, done = plan.clock.count(plan.state.micro_steps, counted, steps)
    # A caller's control dependencies (batch norm's updates, say) need the micro-batch:
    # outside of them, feeding `is_boundary` is enough to apply a partial window.
    with tf.control_dependencies(None):
        result, updates = _close_or_skip(
            strategy, plan, is_boundary, micro_batch, added
        )
        # A learning rate of this micro-step must read update_step before it changes.
        with tf.control_dependencies(_reads(strategy, plan.state.update_step)):
            update_step, clipped_share = _count_update(plan, result.has_updated)
        # A hook that applies a partial window fetches this count in its place: without
        # those reads, which may need a micro-batch. One run never executes both.
        of_partial = _count_update(plan, result.has_updated)
    changes = ()
    if added.change is not None:
        changes = strategy.experimental_local_results(added.change)
    global_step, train_op = _count_micro_step(plan, [update_step, *counted], changes)
    # Optimizers register ops of the branch's graph, which a MetaGraph cannot name.
    train_ops[:] = [*known_train_ops, train_op]
    step = Step(
        is_boundary=is_boundary,
        result=result,
        mean_loss=first_of(strategy, added.mean_loss),
        micro_steps_after=done,
        gradient_accumulation_steps=steps,
        clipped_share=clipped_share,
        update_step_after=update_step,
        of_partial=of_partial,
        global_step_after=global_step,
    )
    window = Window(plan, step)
    register(window)
    look_at_changes(changes, get_windows)
    if plan.has_several_micro_steps:
        look_at_train_op(strategy, window, micro_batch.variables, get_windows)
        _warn_of_clocks(window, micro_batch, updates, update_ops)
    return train_op


def _close_or_skip(
    strategy, plan: Plan, is_boundary: tf.Tensor, micro_batch: MicroBatch, added: Added
) -> tuple[Result, dict[str, list[tf.Operation]]]:
    """Closes the window if it is complete: the two branches of the boundary."""
    updates, origins = {}, None
    variables, sources = micro_batch.variables, micro_batch.gradients
    if added.change is not None:
        change = first_of(strategy, added.change)
        variables, sources = change.variables, change.changed
    if added.sums is None or plan.num_replicas > 1:
        are_rows = added.sums is None or _takes_norms(plan, added.change)
        origins = Origins(sources, are_rows)

    def apply_mean(mean, loss) -> list[tf.Operation]:
        step = plan.state.update_step
        done, operations = apply(
            strategy, plan.options, mean, variables, loss, step, origins
        )
        updates.update(operations)
        return done

    def update() -> Result:
        return close(strategy, plan, apply_mean, added.sums, added.change)

    def skip() -> Result:  # nothing was applied
        unknown = nan(plan.state.sums["weight"].total.dtype)
        stop = unknown if plan.stop_request is None else nan()
        return Result(tf.constant(False), unknown, unknown, unknown, nan(), stop)

    counter = plan.state.micro_steps
    return plan.clock.branch(counter, is_boundary, update, skip), updates


def _count_micro_step(
    plan: Plan, done: list, changes: Sequence[Change]
) -> tuple[tf.Tensor | None, tf.Operation]:
    """Returns (global_step after this micro-step, the train op).

    Args:
        plan: The train op's plan.
        done: Operations to run before; None is returned if the caller counts.
        changes: The replicas' code that changes gradients.
    """
    # Hooks such as StepCounterHook read global_step in the same run: before it changes,
    # or two runs may read the same value, of which TensorFlow warns.
    hooks_read = tf.compat.v1.get_collection(READS_OF_GLOBAL_STEP)
    name = f"{plan.options.name}_train"
    with tf.control_dependencies([*done, *hooks_read]):
        if plan.state.global_step is None:
            global_step, train_op = None, tf.no_op(name)
        else:
            global_step = add_to(plan.state.global_step, 1)
            train_op = tf.group(global_step, name=name)
    awaited = [operation for change in changes for operation in change.awaited]
    if changes:
        train_op = tf.group(train_op, *awaited, name=f"{name}_all")
    return global_step, train_op


def close(
    strategy,
    plan: Plan,
    apply_mean: Callable[..., list[tf.Operation]],
    sums: WindowSums | None = None,
    change=None,
) -> Result:
    """Takes the window's mean and applies it, in cross-replica context.

    Args:
        strategy: The current strategy, which may be TensorFlow's default one.
        plan: The train op's plan.
        apply_mean: Function of the replicas' gradients, which are already reduced, and
            the window's loss; it applies the gradients and returns the operations.
        sums: The replicas' sums, if the window has no accumulators; else None.
        change: The replicas' code that changes gradients; None if it changes nothing.

    Returns:
        The results, available after the window is applied and cleared.
    """

    def take(sums, change):  # in replica context
        return _take_mean(plan, sums, change)

    mean, *scalars = strategy.extended.call_for_each_replica(take, (sums, change))
    everywhere = flatten(strategy, scalars)
    result, sums = tf.nest.map_structure(
        lambda value: first_of(strategy, value), scalars
    )

    def apply_and_observe() -> tf.Tensor:
        with tf.control_dependencies(apply_mean(mean, result.loss)):
            return _observe(plan, result, sums)

    if plan.policy.may_skip:
        noise_scale = tf.cond(result.has_updated, apply_and_observe, nan)
    else:
        noise_scale = apply_and_observe()
    result = result._replace(noise_scale=noise_scale)
    # The other replicas' too: their sparse accumulators are then clear.
    with tf.control_dependencies([noise_scale, *everywhere]):
        return tf.nest.map_structure(tf.identity, result)


def _take_mean(plan: Plan, sums: WindowSums | None, change: Change | None):
    """Reduces, normalizes, changes, checks, clips, clears; in replica context.

    Returns:
        The gradients for the optimizer, the window's results, and its sums of scalars;
        "mean_norm" is the norm of the mean before it is changed.
    """
    names, is_summed, changed = plan.names, sums is None, []
    sums, stop, clear = _reduce(plan, sums)
    gradients, scalars = sums
    weight, loss = scalars["weight"], scalars.get("loss")
    factor = None  # one micro-batch alone is its own mean
    if _takes_norms(plan, change) and not is_summed and plan.num_replicas > 1:
        # Replicas may look up the same rows, of which a batch has one slice.
        gradients = [with_unique_rows(gradient) for gradient in gradients]
        sums = sums._replace(gradients=gradients)
    if is_summed or plan.num_replicas > 1:
        divisor = tf.constant(plan.replica_divisor, weight.dtype)
        factor = _mean(plan, divisor, _divisor_of(scalars))
    if plan.options.noise_scale:
        halves = half_squared_norms(gradients, weight.dtype, is_summed)
        norm = global_norm(halves, None)
        scalars["mean_norm"] = norm if factor is None else norm * factor
    if change is not None:
        gradients = _changed_mean(change, sums, factor)
        names = [variable.op.name for variable in change.variables]
        # The micro-steps have not checked the changed mean.
        factor, is_summed, changed = None, False, [values_of(g) for g in gradients]
    unknown = nan(weight.dtype)
    norm, is_good, checked = unknown, tf.constant(True), []
    if plan.is_observed or plan.options.policy is not None:
        norm, is_good, checked = _check(plan, names, gradients, scalars, is_summed)
    mean, norm = scale_and_clip(gradients, factor, plan.options.clip_norm, norm)
    with tf.control_dependencies([*checked, *changed]):  # if refused, keep the sums
        cleared = clear()
    # A change may read variables, which are written when the loss is there.
    with tf.control_dependencies([*cleared, *checked, *changed]):
        loss = unknown if loss is None else _mean(plan, loss, _divisor_of(scalars))
        stop = unknown if stop is None else stop
        result = Result(is_good, loss, norm, weight, nan(), stop)
        return mean, *tf.nest.map_structure(tf.identity, (result, scalars))


def _takes_norms(plan: Plan, change: Change | None) -> bool:
    """Returns whether norms of slices are taken."""
    return change is not None or plan.options.sparse_norm == "slices"


def _check(
    plan: Plan,
    names: list[str],
    gradients: list[Gradient],
    scalars: dict[str, tf.Tensor],
    is_summed: bool,
) -> tuple[tf.Tensor, tf.Tensor, list[tf.Operation]]:
    """Checks the window's sums, or its mean, by the policy.

    Args:
        plan: The train op's plan.
        names: Names of the gradients' variables.
        gradients: Sums of gradients, or their mean that code has changed.
        scalars: Sums of scalars, by name.
        is_summed: Whether `gradients` are the sums of accumulators.

    Returns:
        (Norm of `gradients`, whether the window is applied, operations before).
    """
    weight, loss = scalars["weight"], scalars.get("loss")
    has_slices = plan.options.sparse_norm == "slices"
    halves = half_squared_norms(gradients, weight.dtype, is_summed or has_slices)
    is_of_several = is_summed or plan.num_replicas > 1
    slices = scalars["slices"] if is_of_several and has_slices else None
    norm = global_norm(halves, slices, plan.are_slices)
    terms = [weight] if loss is None or not plan.is_observed else [weight, loss]
    values = CheckedValues(names, _number(plan), gradients, terms)
    are_sums_checked = is_summed and plan.num_replicas == 1
    return norm, *plan.policy.check_window(values, halves, are_sums_checked)


def _reduce(
    plan: Plan, sums: WindowSums | None
) -> tuple[WindowSums, tf.Tensor | None, Callable[[], list[tf.Operation]]]:
    """Sums over replicas, once; returns (sums, stop requests, function that clears)."""
    stop = [] if plan.stop_request is None else [plan.stop_request]
    if sums is None:
        totals, clear = take_window(plan.state.all_accumulators, stop)
        names = plan.state.sums
    else:
        names, clear = sums.scalars, list
        totals = sum_over_replicas([*sums.gradients, *names.values(), *stop])
    gradients, scalars = totals[: len(plan.names)], totals[len(plan.names) :]
    stop = scalars.pop() if stop else None
    return WindowSums(gradients, dict(zip(names, scalars, strict=True))), stop, clear


def _changed_mean(change: Change, sums: WindowSums, factor) -> list[Gradient]:
    """Returns the gradients that code makes of the mean."""
    means = [
        cast(scaled(total, factor), gradient.dtype)
        for total, gradient in zip(sums.gradients, change.gradients, strict=True)
    ]
    numbers = range(len(change.with_norm))
    return change(
        means, [sums.scalars[f"slices_{i}"] * tf.square(factor) for i in numbers]
    )


def _mean(plan: Plan, total: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
    """Returns the window's mean, or `total` itself for `reduction="sum"`."""
    if plan.options.reduction == "sum":
        return total
    return tf.math.divide_no_nan(total, divisor)


def _divisor_of(scalars: dict):
    """Returns the sum, or accumulator, by which those of loss and gradients are divided."""
    return scalars.get("scale", scalars["weight"])


def _observe(plan: Plan, result: Result, scalars: dict) -> tf.Tensor:
    """Counts clipping after an update; returns the noise scale, NaN without one."""
    counted, clipped_updates = [], plan.state.clipped_updates
    if clipped_updates is not None:
        is_clipped = tf.cast(result.gradient_norm > plan.options.clip_norm, tf.int64)
        counted = [clipped_updates.assign_add(is_clipped, read_value=False)]
    with tf.control_dependencies(counted):
        if not plan.options.noise_scale:
            return nan()
        return update_noise_scale(
            plan.state.noise,
            scalars["squares"],
            scalars["count"],
            result.weight,
            scalars["mean_norm"],
        )


def _count_update(plan: Plan, has_updated) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (updates, share of them that were clipped), this one included."""
    updates = add_to(plan.state.update_step, tf.cast(has_updated, tf.int64))
    if plan.state.clipped_updates is None:
        return updates, tf.constant(0.0)
    with tf.control_dependencies([updates]):
        clipped = tf.cast(plan.state.clipped_updates.read_value(), tf.float32)
        return updates, tf.math.divide_no_nan(clipped, tf.cast(updates, tf.float32))


def _reads(strategy, variable: tf.Variable) -> list[tf.Operation]:
    """Returns the operations of this graph that already read `variable`."""
    if tf.compat.v1.get_default_graph().building_function:
        return []
    components = strategy.experimental_local_results(variable)
    return [op for component in components for op in reads_of(component)]


def _micro_step_counter(plan: Plan) -> tf.Variable | None:
    """Returns the variable that counts micro-steps; None if there is none."""
    if plan.state.global_step is not None:
        return plan.state.global_step
    return find_global_step()


def _number(plan: Plan) -> tf.Tensor | None:
    """Returns this micro-step's number for an error; None if nobody counts."""
    is_named = plan.policy.raises
    counter = _micro_step_counter(plan) if is_named else None
    return None if counter is None else counter + 1
