"""One window: the accumulation rule, in the order in which things happen.

    for each micro-batch:                      # one session.run, or one pass of a batch
        sums += scale * (gradients, loss), weight         # add, on each replica
        if clock.count() >= K:                 # the boundary
            sums = all_reduce(sums)            # close: the only reduction
            mean = change(sums / weight)       # what a caller did to gradients, if anything
            check_finite(mean)                 # add does so with sums
            optimizer.apply(clip(mean))        # unless a policy skips the window
            update_step += 1
        global_step += 1

    update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i , clip_norm) )

over all micro-batches i of the window and all replicas; what code does to gradients
before `apply_gradients`, it does to the mean, before it is clipped. Where it does nothing,
dividing and clipping are one multiplication. Each line waits for the one before, by a
control or data dependency. `make_accumulating_train_op`,
`AccumulatingOptimizer`, `microbatch_model_fn` and `keras.accumulate` all train by `close`
and, if a window may have several micro-batches, by `add`; they differ in the clock, and
in how the mean is applied.

Two counters say where training stands, both global variables that checkpoints hold:

    update_step               optimizer updates so far   [updates]
    accumulation/micro_steps  micro-steps in the open window   [micro-steps]

The second one decides whether a micro-step is a boundary. It moves in the same chain of
control dependencies as `global_step`, so the two differ only by micro-batches that are
skipped, and unlike `global_step % K` it stays right when K changes and when a partial
window was applied.
"""

from collections.abc import Callable

import tensorflow as tf

from estimator_accum.checks.before_runs import look_at_changes, look_at_train_op
from estimator_accum.checks.global_step import warn_of_global_step
from estimator_accum.core.accumulators import add_up, commit, take_window
from estimator_accum.core.applying import apply
from estimator_accum.core.change import Change
from estimator_accum.core.clock import Clock
from estimator_accum.core.creation import create_window
from estimator_accum.core.gradients import (
    Gradient,
    cast,
    global_norm,
    half_squared_norms,
    scale_and_clip,
    scaled,
    values_of,
)
from estimator_accum.core.micro_batch import MicroBatch
from estimator_accum.core.noise_scale import update_noise_scale
from estimator_accum.core.nonfinite import check_micro_batch, check_window
from estimator_accum.core.options import Options
from estimator_accum.core.reduction import sum_over_replicas
from estimator_accum.core.registry import get_windows, register
from estimator_accum.core.state import Result, Window
from estimator_accum.core.update_ops import update_ops_of
from estimator_accum.core.v1_optimizers import innermost
from estimator_accum.graph.branches import nan
from estimator_accum.graph.replicas import first_of, flatten
from estimator_accum.graph.variables import add_to, read

# TensorFlow's collection of the one read of global_step.
_READ_BY_HOOKS = "global_step_read_op_cache"


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
    replica = tf.distribute.get_replica_context()
    window = replica.merge_call(
        lambda strategy: create_window(
            strategy, options, clock, micro_batch, global_step
        )
    )
    uses = {}  # filled by what the first replica gives to merge_call
    with tf.control_dependencies(None):  # hooks fetch K without a micro-batch
        steps = clock.steps(window.update_step)
    if clock.keeps_sums:
        counted = add(window, micro_batch)
        unsummed = None
    else:
        counted, unsummed = tf.constant(1, tf.int64), _sums_of_one(window, micro_batch)
    with tf.control_dependencies(update_ops_of(options)):
        counted = tf.identity(counted)
    counted = clock.hand_over(counted, window.all_accumulators)
    with clock.at_the_boundary():
        loss = _mean_loss(window, micro_batch, counted)
        train_op = replica.merge_call(
            lambda strategy, *args: _finish(
                strategy, window, micro_batch.variables, uses, *args
            ),
            args=(unsummed, counted, loss, steps, micro_batch.change),
        )
    counter = _micro_step_counter(window)
    if uses and counter is not None and window.has_several_micro_steps:
        optimizer = type(innermost(options.optimizer)).__name__
        warn_of_global_step(
            counter,
            micro_batch.loss,
            [values_of(gradient) for gradient in micro_batch.gradients],
            micro_batch.sums["weight"],
            steps,
            optimizer,
            uses,
            update_ops_of(options),
        )
    return train_op


def add(window: Window, micro_batch: MicroBatch) -> tf.Tensor:
    """Adds one micro-batch to this replica's sums.

    Returns:
        int64 scalar, 1 if the window counts the micro-batch, else 0; available after
        the micro-batch is added.
    """
    accumulators = window.all_accumulators
    gradients, scalars = micro_batch.gradients, list(micro_batch.sums.values())
    if micro_batch.scale is not None:  # in the accumulators' dtype: it may be wider
        gradients = [
            scaled(cast(gradient, accumulator.total.dtype), micro_batch.scale)
            for gradient, accumulator in zip(gradients, accumulators)
        ]
    weight, has_weight = micro_batch.sums["weight"], None
    loss = micro_batch.sums.get("loss", weight)
    with tf.control_dependencies([loss]):  # a failed loss writes nothing
        is_first = window.clock.opens_window(window.micro_steps)
        sums = add_up(accumulators, [*gradients, *scalars], is_first)
    if not tf.get_static_value(weight):  # a mean over no tokens is 0 / 0
        has_weight = tf.not_equal(weight, 0.0)
    is_good, checked = check_micro_batch(
        window.options.policy,
        window.names,
        _number(window),
        sums[: len(gradients)],
        [weight] if micro_batch.loss is None else [weight, micro_batch.loss],
        has_weight,
    )
    is_added = has_weight if is_good is None else is_good
    if has_weight is not None and is_good is not None:
        is_added = tf.logical_and(is_good, has_weight)
    with tf.control_dependencies(checked):
        written = commit(accumulators, sums, is_first, is_added)
    with tf.control_dependencies(written):
        if is_good is None or window.num_replicas > 1:
            return tf.constant(1, tf.int64)
        return tf.cast(is_good, tf.int64)  # another one takes its place in the window


def _sums_of_one(window: Window, micro_batch: MicroBatch) -> tuple[list, dict]:
    """Returns the sums of a window that is one micro-batch of each replica."""
    gradients = micro_batch.gradients
    if micro_batch.scale is not None and window.num_replicas > 1:
        gradients = [scaled(gradient, micro_batch.scale) for gradient in gradients]
    return gradients, micro_batch.sums


def _mean_loss(window: Window, micro_batch: MicroBatch, counted) -> tf.Tensor:
    """Returns the mean loss of this replica's micro-batches so far; NaN if unknown."""
    if micro_batch.loss is None:
        with tf.control_dependencies(None):
            return nan(micro_batch.sums["weight"].dtype)
    if not window.sums:
        return micro_batch.loss
    with tf.control_dependencies([counted]):
        sums = (window.sums["loss"], _divisor(window.sums))
        return _mean(window, *(read(each.total) for each in sums))


def _finish(
    strategy,
    window: Window,
    variables: list[tf.Variable],
    uses: dict[str, list[tf.Operation]],
    unsummed,
    counted,
    mean_loss,
    steps,
    change,
) -> tf.Operation:
    """Makes the `tf.cond` on the boundary, then global_step += 1, cross-replica.

    Args:
        strategy: The current strategy, which may be TensorFlow's default one.
        window: The window.
        variables: The trained variables.
        uses: Gets the operations of the update, by the names of what makes them.
        unsummed: The replicas' sums, if the window has no accumulators; else None.
        counted: Per replica, 1 if the window counts its micro-batch, else 0.
        mean_loss: The replicas' mean losses of the window so far.
        steps: K [micro-steps per update].
        change: The replicas' code that changes gradients; None if it changes nothing.
    """
    steps = first_of(strategy, steps)
    counted = flatten(strategy, counted)
    clock, name = window.clock, window.name
    train_ops = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)
    known_train_ops = list(train_ops)
    is_boundary, done = clock.count(window.micro_steps, counted, steps)

    changed = None if change is None else first_of(strategy, change)

    def apply_mean(mean, loss) -> list[tf.Operation]:
        return apply(
            strategy,
            window.options,
            mean,
            variables if changed is None else changed.variables,
            loss,
            window.update_step,
            uses,
        )

    def update() -> Result:
        return close(strategy, window, apply_mean, unsummed, change)

    # A caller's control dependencies (batch norm's updates, say) need the micro-batch:
    # outside of them, feeding `is_boundary` is enough to apply a partial window.
    with tf.control_dependencies(None):
        result = clock.branch(
            window.micro_steps, is_boundary, update, lambda: _no_result(window)
        )
        # A learning rate of this micro-step must read update_step before it changes.
        with tf.control_dependencies(_reads(strategy, window.update_step)):
            updates, clipped_share = _count_update(window, result.has_updated)
        of_partial = _count_update(window, result.has_updated)
    # Hooks such as StepCounterHook read global_step in the same run: before it changes,
    # or two runs may read the same value, of which TensorFlow warns.
    hooks_read = tf.compat.v1.get_collection(_READ_BY_HOOKS)
    with tf.control_dependencies([updates, *counted, *hooks_read]):
        if window.global_step is None:
            global_step_after, train_op = None, tf.no_op(f"{name}_train")
        else:
            global_step_after = add_to(window.global_step, 1)
            train_op = tf.group(global_step_after, name=f"{name}_train")
    if change is not None:
        changes = strategy.experimental_local_results(change)
        waits = [operation for each in changes for operation in each.waits]
        train_op = tf.group(train_op, *waits, name=f"{name}_train_all")
    # Optimizers register ops of the branch's graph, which a MetaGraph cannot name.
    train_ops[:] = [*known_train_ops, train_op]
    register(
        window._replace(
            is_boundary=is_boundary,
            result=result,
            mean_loss=first_of(strategy, mean_loss),
            micro_steps_after=done,
            gradient_accumulation_steps=steps,
            clipped_share=clipped_share,
            update_step_after=updates,
            of_partial=of_partial,
            global_step_after=global_step_after,
        )
    )
    if change is not None:
        look_at_changes(changes, get_windows)
    if window.has_several_micro_steps:
        look_at_train_op(strategy, get_windows()[-1], variables)
    return train_op


def close(
    strategy,
    window: Window,
    apply_mean: Callable[..., list[tf.Operation]],
    unsummed=None,
    change=None,
) -> Result:
    """Takes the window's mean and applies it, in cross-replica context.

    Args:
        strategy: The current strategy, which may be TensorFlow's default one.
        window: The window.
        apply_mean: Function of the replicas' gradients, which are already reduced, and
            the window's loss; it applies the gradients and returns the operations.
        unsummed: The replicas' sums, if the window has no accumulators; else None.
        change: The replicas' code that changes gradients; None if it changes nothing.

    Returns:
        The results, available after the window is applied and cleared.
    """
    mean, *scalars = strategy.extended.call_for_each_replica(
        lambda *args: _take_mean(window, *args), args=(unsummed, change)
    )
    everywhere = flatten(strategy, scalars)
    result, sums = tf.nest.map_structure(
        lambda value: first_of(strategy, value), scalars
    )

    def apply_and_observe() -> tf.Tensor:
        with tf.control_dependencies(apply_mean(mean, result.loss)):
            return _observe(window, result, sums)

    if window.options.policy in (None, "raise"):
        noise_scale = apply_and_observe()
    else:
        noise_scale = tf.cond(result.has_updated, apply_and_observe, nan)
    result = result._replace(noise_scale=noise_scale)
    # The other replicas' too: their sparse accumulators are then clear.
    with tf.control_dependencies([noise_scale, *everywhere]):
        return tf.nest.map_structure(tf.identity, result)


def _take_mean(window: Window, unsummed, change: Change | None):
    """Reduces, normalizes, changes, checks, clips, clears; in replica context.

    Returns:
        The gradients for the optimizer, the window's results, and its sums by name;
        "mean_norm" is the norm of the mean before it is changed.
    """
    options, names = window.options, window.names
    is_summed = bool(window.accumulators)
    gradients, sums, cleared = _reduce(window, unsummed)
    factor = None  # one micro-batch alone is its own mean
    if is_summed or window.num_replicas > 1:
        divisor = tf.constant(window.divisor, sums["weight"].dtype)
        factor = _mean(window, divisor, _divisor(sums))
    weight, loss, made = sums["weight"], sums.get("loss"), []
    if "squares" in sums:
        halves = half_squared_norms(gradients, weight.dtype, is_summed)
        norm = global_norm(gradients, halves, None)
        sums["mean_norm"] = norm if factor is None else norm * factor
    if change is not None:
        gradients = _changed_mean(change, gradients, factor, sums)
        names = [variable.op.name for variable in change.variables]
        # The micro-steps have not checked what was changed.
        factor, is_summed, made = None, False, [values_of(g) for g in gradients]
    # A Keras window has no `update_step`: nobody reads its norm, and a NaN in its loss
    # may be an unknown one.
    is_of_keras = window.update_step is None
    unknown = nan(weight.dtype)
    norm, is_good, checked = unknown, tf.constant(True), []
    if options.policy is not None or not is_of_keras:
        slices = sums.get("slices") if is_summed else None
        has_unique_rows = is_summed or options.sparse_norm == "slices"
        halves = half_squared_norms(gradients, weight.dtype, has_unique_rows)
        norm = global_norm(gradients, halves, slices)
        is_good, checked = check_window(
            options.policy,
            names,
            _number(window),
            gradients,
            halves,
            [weight] if loss is None or is_of_keras else [weight, loss],
            are_sums_checked=is_summed and window.num_replicas == 1,
        )
    mean, norm = scale_and_clip(gradients, factor, options.clip_norm, norm)
    # A change may read variables, which are written when the loss is there.
    with tf.control_dependencies([*cleared, *checked, *made]):
        loss = unknown if loss is None else _mean(window, loss, _divisor(sums))
        stop = sums.pop("stop", unknown)
        result = Result(is_good, loss, norm, weight, nan(), stop)
        return mean, *tf.nest.map_structure(tf.identity, (result, sums))


def _reduce(
    window: Window, unsummed
) -> tuple[list[Gradient], dict, list[tf.Operation]]:
    """Sums over replicas, once: gradients, scalars by name, and what clears them."""
    stop = {} if window.stop_request is None else {"stop": window.stop_request}
    if unsummed is None:
        taken, cleared = take_window(window.all_accumulators, list(stop.values()))
        names = [*window.sums, *stop]
    else:
        gradients, sums = unsummed
        taken = sum_over_replicas([*gradients, *sums.values(), *stop.values()])
        cleared, names = [], [*sums, *stop]
    number = len(window.names)
    return taken[:number], dict(zip(names, taken[number:], strict=True)), cleared


def _changed_mean(
    change: Change, sums: list[Gradient], factor, scalars: dict
) -> list[Gradient]:
    """Returns the gradients that code makes of the mean."""
    return change(
        [
            cast(scaled(value, factor), gradient.dtype)
            for value, gradient in zip(sums, change.gradients, strict=True)
        ],
        [
            scalars[f"slices_{i}"] * tf.square(factor)
            for i in range(len(change.with_norm))
        ],
    )


def _mean(window: Window, total: tf.Tensor, divisor: tf.Tensor) -> tf.Tensor:
    """Returns the window's mean, or `total` itself for `reduction="sum"`."""
    if window.options.reduction == "sum":
        return total
    return tf.math.divide_no_nan(total, divisor)


def _divisor(sums: dict):
    """Returns the sum by which sums of loss and gradients are divided."""
    return sums["scale"] if "scale" in sums else sums["weight"]


def _observe(window: Window, result: Result, sums: dict) -> tf.Tensor:
    """Counts clipping after an update; returns the noise scale, NaN without one."""
    counted = []
    if window.clipped_updates is not None:
        is_clipped = tf.cast(result.gradient_norm > window.options.clip_norm, tf.int64)
        counted = [window.clipped_updates.assign_add(is_clipped, read_value=False)]
    with tf.control_dependencies(counted):
        if not window.noise:
            return nan()
        return update_noise_scale(
            window.noise,
            sums["squares"],
            sums["count"],
            result.weight,
            sums["mean_norm"],
        )


def _no_result(window: Window) -> Result:
    """Returns the result off the boundary: nothing was applied."""
    unknown = nan(window.sums["weight"].total.dtype)
    stop = unknown if window.stop_request is None else nan()
    return Result(tf.constant(False), unknown, unknown, unknown, nan(), stop)


def _count_update(window: Window, has_updated) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (updates, share of them that were clipped), this one included."""
    updates = add_to(window.update_step, tf.cast(has_updated, tf.int64))
    if window.clipped_updates is None:
        return updates, tf.constant(0.0)
    with tf.control_dependencies([updates]):
        clipped = tf.cast(window.clipped_updates.read_value(), tf.float32)
        return updates, tf.math.divide_no_nan(clipped, tf.cast(updates, tf.float32))


def _reads(strategy, variable: tf.Variable) -> list[tf.Operation]:
    """Returns the operations of this graph that already read `variable`."""
    if tf.compat.v1.get_default_graph().building_function:
        return []
    return [
        operation
        for component in strategy.experimental_local_results(variable)
        for operation in component.handle.consumers()
        if operation.type == "ReadVariableOp"
    ]


def _micro_step_counter(window: Window) -> tf.Variable | None:
    """Returns the variable that counts micro-steps; None if there is none."""
    if window.global_step is not None:
        return window.global_step
    return tf.compat.v1.train.get_global_step()


def _number(window: Window) -> tf.Tensor | None:
    """Returns this micro-step's number for an error; None if nobody counts."""
    raises = window.options.policy == "raise"
    counter = _micro_step_counter(window) if raises else None
    return None if counter is None else counter + 1
