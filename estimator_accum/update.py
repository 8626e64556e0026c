"""A window's boundary: reduce, normalize, clip, then the optimizer.

    update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i , clip_norm) )

over all micro-batches i of the window and all replicas; see `micro_step` for what comes
before and after.
"""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum.accumulators import take_window
from estimator_accum.applying import apply
from estimator_accum.clipping import half_squared_norms, scale_and_clip
from estimator_accum.gradients import Gradient, cast, sum_over_replicas
from estimator_accum.loss_scaling import is_dynamic
from estimator_accum.micro_step_plan import Plan, Rule
from estimator_accum.noise_scale import update_noise_scale
from estimator_accum.nonfinite import all_finite, assert_finite


class Result(NamedTuple):
    """Of one micro-step; the fields of `Window` with these names."""

    has_updated: tf.Tensor
    loss: tf.Tensor
    gradient_norm: tf.Tensor
    weight: tf.Tensor
    noise_scale: tf.Tensor
    stop_requests: tf.Tensor


def no_update(plan: Plan) -> Result:
    """Between boundaries: there is nothing to report."""
    nothing = nan(plan.accumulators[-1].total.dtype)
    return Result(tf.constant(False), nothing, nothing, nothing, nan(), nan())


def update(strategy, plan: Plan, gradients) -> Result:
    """Cross-replica, at a boundary: the window's mean, then the optimizer."""
    extended = strategy.extended
    mean = extended.call_for_each_replica(_take_mean, args=(plan, gradients))
    gradients, scalars, is_good, stop_requests = mean
    stop_requests = first_of(strategy, stop_requests)
    loss, norm, weight, *noise = [first_of(strategy, value) for value in scalars]
    is_good = first_of(strategy, is_good)

    def apply_and_observe() -> tf.Tensor:
        with tf.control_dependencies(apply(strategy, plan, gradients, loss)):
            return _observe(plan, norm, weight, noise)

    if plan.rule.on_nonfinite == "raise" or is_dynamic(plan.rule.optimizer):
        noise_scale = apply_and_observe()
    else:
        noise_scale = tf.cond(is_good, apply_and_observe, nan)
    # The other replicas' scalars too: their accumulators are then clear.
    done = [noise_scale, *flatten(strategy, scalars)]
    if plan.micro_steps is not None:
        with tf.control_dependencies(done):
            done = [plan.micro_steps.assign(0, read_value=False)]
    with tf.control_dependencies(done):
        result = Result(is_good, loss, norm, weight, noise_scale, stop_requests)
        return Result(*map(tf.identity, result))


def _take_mean(plan: Plan, gradients: list[Gradient] | None):
    """Replica context, at a boundary: reduce, normalize, clip, clear.

    Returns:
        The gradients for the optimizer; the window's scalars: mean loss, gradient norm
        before clipping, weight, and what the noise scale needs; whether all is finite;
        how many replicas ask for a stop.
    """
    rule = plan.rule
    asked = [] if plan.stop_request is None else [plan.stop_request]
    if plan.accumulators:
        sums, cleared = take_window(plan.accumulators, asked)
    else:
        sums, cleared = sum_over_replicas([*gradients, *asked]), []
    stop_requests = sums.pop() if asked else nan()
    num_variables = len(plan.variables)
    sums, (weight, loss, *more) = sums[:num_variables], sums[num_variables:]
    is_by_slices = rule.sparse_norm == "slices"
    has_unique_rows = is_by_slices or bool(plan.accumulators)
    halves = half_squared_norms(sums, weight.dtype, has_unique_rows)
    half_square, noise = tf.reduce_sum(halves), more
    if is_by_slices:
        *noise, of_slices = more
        if plan.accumulators:  # where slices were summed to rows
            dense = [i for i, g in enumerate(sums) if isinstance(g, tf.Tensor)]
            half_square = of_slices + tf.reduce_sum(tf.gather(halves, dense))
    unknown = _unknown(plan, sums)
    unknown_halves = tf.gather(halves, tf.constant(unknown, tf.int32))
    checked = with_scalars([sums[i] for i in unknown], unknown_halves, [weight, loss])
    done, is_good = cleared, tf.constant(True)
    if rule.on_nonfinite == "raise" and not is_dynamic(rule.optimizer):
        variables = [plan.variables[i] for i in unknown]
        done = [*cleared, raise_unless_finite(*checked, plan, variables)]
    else:
        is_good = all_finite(*checked)
    if rule.on_nonfinite != "raise":
        is_good = tf.logical_and(is_good, weight > 0)  # every micro-batch left out
    is_alone = not plan.accumulators and plan.num_replicas == 1
    mean, norm = scale_and_clip(
        sums,
        # One micro-batch alone is its own mean.
        None
        if is_alone
        else reduced(plan, tf.constant(plan.loss_divisor, weight.dtype), weight),
        rule.clip_norm,
        tf.sqrt(half_square * tf.constant(2.0, halves.dtype)),
    )
    mean = [cast(g, v.dtype) for g, v in zip(mean, plan.variables, strict=True)]
    with tf.control_dependencies(done):
        scalars = [reduced(plan, loss, weight), norm, weight, *noise]
        scalars = [tf.identity(value) for value in scalars]
        return mean, scalars, tf.identity(is_good), tf.identity(stop_requests)


def _unknown(plan: Plan, sums: list[Gradient]) -> list[int]:
    """Which sums no micro-step has found finite."""
    are_checked = rule_checks_micro_batches(plan.rule) and plan.accumulators
    if not are_checked or plan.num_replicas > 1:
        return list(range(len(sums)))
    # Of a sparse one it has seen the slices, not the rows that they are added to.
    return [i for i, value in enumerate(sums) if isinstance(value, tf.IndexedSlices)]


def rule_checks_micro_batches(rule: Rule) -> bool:
    """Whether every micro-step looks at its sums, and not the boundary alone."""
    return rule.on_nonfinite != "skip_window" and not is_dynamic(rule.optimizer)


def reduced(plan: Plan, total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """The mean or the sum over the window of what was summed."""
    if plan.rule.reduction == "sum":
        return total
    mean = tf.math.divide_no_nan(total, weight)
    return mean if plan.is_whole is None else tf.where(plan.is_whole, total, mean)


def _observe(plan: Plan, norm, weight, noise: list[tf.Tensor]) -> tf.Tensor:
    """Cross-replica, after an update: returns the noise scale, NaN without one."""
    counted = []
    if plan.clipped_updates is not None:
        is_clipped = tf.cast(norm > plan.rule.clip_norm, tf.int64)
        counted = [plan.clipped_updates.assign_add(is_clipped, read_value=False)]
    with tf.control_dependencies(counted):
        if plan.noise_scale is None:
            return nan()
        return update_noise_scale(plan.noise_scale, *noise, weight, norm)


def with_scalars(gradients, halves: tf.Tensor, scalars: list[tf.Tensor]):
    """Weight and loss are checked like gradients, as they are."""
    return [*gradients, *scalars], tf.concat([halves, tf.stack(scalars)], 0)


def raise_unless_finite(
    values, halves: tf.Tensor, plan: Plan, variables: list[tf.Variable]
) -> tf.Operation:
    """Names the variables whose gradients are not finite, and the micro-step."""
    names = [v.op.name for v in variables] + ["the weight", "the loss"]
    clock = plan.global_step
    if clock is None:
        clock = tf.compat.v1.train.get_global_step()
    return assert_finite(values, halves, names, None if clock is None else clock + 1)


def nan(dtype: tf.DType = tf.float32) -> tf.Tensor:
    """What is reported where there is no number."""
    return tf.constant(float("nan"), dtype)


def first_of(strategy, values):
    """One replica's value, of what every replica knows alike."""
    return strategy.experimental_local_results(values)[0]


def flatten(strategy, values) -> list:
    """Every replica's values, of any structure."""
    per_value = tf.nest.map_structure(strategy.experimental_local_results, values)
    return tf.nest.flatten(per_value)
