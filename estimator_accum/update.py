"""A window's boundary: reduce, normalize, clip, then the optimizer.

    update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i , clip_norm) )

over all micro-batches i of the window and all replicas; see `micro_step` for what comes
before and after.
"""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum.accumulators import take_window
from estimator_accum.clipping import half_squared_norms, scale_and_clip
from estimator_accum.gradients import Gradient, cast, scaled, sum_over_replicas
from estimator_accum.loss_scaling import is_dynamic, is_loss_scaling
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


def no_update(plan: Plan) -> Result:
    """Between boundaries: there is nothing to report."""
    nothing = nan(plan.accumulators[-1].total.dtype)
    return Result(tf.constant(False), nothing, nothing, nothing, nan())


def update(strategy, plan: Plan, gradients) -> Result:
    """Cross-replica, at a boundary: the window's mean, then the optimizer."""
    extended = strategy.extended
    mean = extended.call_for_each_replica(_take_mean, args=(plan, gradients))
    gradients, scalars, is_good = mean
    loss, norm, weight, *noise = [first_of(strategy, value) for value in scalars]
    is_good = first_of(strategy, is_good)

    def apply() -> tf.Tensor:
        applied = extended.call_for_each_replica(_apply, args=(plan, gradients, loss))
        with tf.control_dependencies(flatten(strategy, applied)):
            return _observe(plan, norm, weight, noise)

    if plan.rule.on_nonfinite == "raise" or is_dynamic(plan.rule.optimizer):
        noise_scale = apply()
    else:
        noise_scale = tf.cond(is_good, apply, nan)
    # The other replicas' scalars too: their accumulators are then clear.
    done = [noise_scale, *flatten(strategy, scalars)]
    if plan.micro_steps is not None:
        with tf.control_dependencies(done):
            done = [plan.micro_steps.assign(0, read_value=False)]
    with tf.control_dependencies(done):
        return Result(
            *[tf.identity(v) for v in (is_good, loss, norm, weight, noise_scale)]
        )


def _take_mean(plan: Plan, gradients: list[Gradient] | None):
    """Replica context, at a boundary: reduce, normalize, clip, clear.

    Returns:
        The gradients for the optimizer; the window's scalars: mean loss, gradient norm
        before clipping, weight, and what the noise scale needs; whether all is finite.
    """
    rule = plan.rule
    if plan.accumulators:
        sums, cleared = take_window(plan.accumulators)
    else:
        sums, cleared = sum_over_replicas(gradients), []
    num_variables = len(plan.variables)
    sums, (weight, loss, *noise) = sums[:num_variables], sums[num_variables:]
    halves = half_squared_norms(sums, weight.dtype, bool(plan.accumulators))
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
        tf.sqrt(tf.reduce_sum(halves) * tf.constant(2.0, halves.dtype)),
    )
    mean = [cast(g, v.dtype) for g, v in zip(mean, plan.variables, strict=True)]
    with tf.control_dependencies(done):
        scalars = [reduced(plan, loss, weight), norm, weight, *noise]
        return mean, [tf.identity(value) for value in scalars], tf.identity(is_good)


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


def _apply(plan: Plan, gradients: list[Gradient], loss: tf.Tensor):
    """Replica context: the optimizer, which must not reduce a second time."""
    options = {}
    if is_loss_scaling(plan.rule.optimizer):  # cannot be told
        gradients = [scaled(g, 1.0 / plan.num_replicas) for g in gradients]
    elif tf.distribute.has_strategy():
        options = {"skip_gradients_aggregation": True}
    # An optimizer may decay a slot before its gradient is there. A micro-step that fails,
    # as the one does that finds the end of the data, must not move even that.
    with tf.control_dependencies([loss]):
        return plan.rule.optimizer.apply_gradients(
            list(zip(gradients, plan.variables, strict=True)), **options
        )


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
