"""What one accumulating train op is made of: its rule, its inputs, its variables."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.accumulators import Accumulator, create_accumulator, variables_of
from estimator_accum.batch_window import BatchWindow
from estimator_accum.clipping import half_squared_norms
from estimator_accum.gradients import Gradient, values_of
from estimator_accum.graph import ancestors
from estimator_accum.loss_scaling import innermost
from estimator_accum.noise_scale import NoiseScale, create_noise_scale
from estimator_accum.window import (
    AccumulationSteps,
    create_shared_scalar,
    get_or_create_update_step,
    get_windows,
)


class Rule(NamedTuple):
    """What the caller asked for, checked; see `make_accumulating_train_op`."""

    optimizer: tf.compat.v1.train.Optimizer
    gradient_accumulation_steps: AccumulationSteps
    clip_norm: float | None
    sparse_norm: str
    reduction: str
    on_nonfinite: str
    accumulator_dtype: tf.DType | None
    accumulator_device: str | None
    noise_scale: bool
    update_ops: list[tf.Operation] | None
    after_update_ops: Callable | None
    name: str


class MicroBatch(NamedTuple):
    """What one replica computed of one micro-batch.

    Attributes:
        gradients: One for each variable.
        variables: The trained variables.
        loss: Scalar mean over the micro-batch; None where nobody knows.
        weight: Scalar, what it counts for.
        scale: Scalar by which loss and gradients are multiplied: `weight`, or 1 if the
            micro-batch is all of the window, and its own mean.
        is_weighted: Whether `gradients` are those of scale * loss already.
        batch: The batch that is the window; None where micro-steps make it.
    """

    gradients: list[Gradient]
    variables: list[tf.Variable]
    loss: tf.Tensor | None
    weight: tf.Tensor
    scale: tf.Tensor
    is_weighted: bool
    batch: BatchWindow | None


class Plan(NamedTuple):
    """What one accumulating train op is made of; the same in every replica."""

    rule: Rule
    variables: list[tf.Variable]
    loss_divisor: int  # by which compute_gradients divided the loss
    num_replicas: int
    has_loss: bool
    accumulators: list[Accumulator]  # of the variables, then of the scalars
    micro_steps: tf.Variable | None  # None: every micro-step, or batch, is a window
    is_whole: tf.Tensor | None  # whether the window is one micro-batch; None: never
    clipped_updates: tf.Variable | None
    noise_scale: NoiseScale | None
    update_step: tf.Variable
    global_step: tf.Variable | None
    stop_request: tf.Tensor | None


def is_plain(rule: Rule) -> bool:
    """Whether every micro-batch is a window, and this replica the only one."""
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    return rule.gradient_accumulation_steps == 1 and replicas == 1


def make_plan(
    strategy, rule, micro_batch, scalars, global_step, loss_divisor: int
) -> Plan:
    """Cross-replica: creates the variables, before any branch that would own them."""
    replicas = strategy.num_replicas_in_sync
    with tf.init_scope():  # slots then have their plain names
        innermost(rule.optimizer)._create_slots(micro_batch.variables)
    # Several replicas leave out a micro-batch each on their own: from accumulators.
    has_window = rule.gradient_accumulation_steps != 1 or (
        replicas > 1 and rule.on_nonfinite == "skip_micro_batch"
    )
    batch = micro_batch.batch
    shared_step = get_or_create_update_step()
    is_first = not get_windows()
    return Plan(
        rule=rule,
        variables=micro_batch.variables,
        loss_divisor=loss_divisor,
        num_replicas=replicas,
        has_loss=micro_batch.loss is not None,
        accumulators=_accumulators(rule, micro_batch, scalars) if has_window else [],
        micro_steps=(
            create_shared_scalar(f"{rule.name}/micro_steps")
            if has_window and batch is None
            else None
        ),
        is_whole=batch.is_whole if batch is not None and replicas == 1 else None,
        clipped_updates=(
            create_shared_scalar(f"{rule.name}/clipped_updates")
            if rule.clip_norm is not None
            else None
        ),
        noise_scale=create_noise_scale(rule.name) if rule.noise_scale else None,
        update_step=(
            shared_step
            if is_first
            else create_shared_scalar(f"{rule.name}/update_step")
        ),
        global_step=global_step,
        stop_request=_stop_request(strategy),
    )


def _stop_request(strategy) -> tf.Tensor | None:
    if not strategy.extended._in_multi_worker_mode():
        return None
    with tf.control_dependencies(None):
        return tf.compat.v1.placeholder_with_default(0.0, [], "stop_request")


def _accumulators(rule: Rule, micro_batch: MicroBatch, scalars) -> list[Accumulator]:
    """Makes an accumulator for each variable, then those of the scalars."""
    taken = {v.op.name for window in get_windows() for v in window.state}
    # A batch's are never saved: a checkpoint lies between two batches.
    options = {} if micro_batch.batch is None else {"collections": []}
    made = []
    with tf.device(rule.accumulator_device):
        for gradient, variable in zip(
            micro_batch.gradients, micro_batch.variables, strict=True
        ):
            # `op.name` of a mirrored variable is replica 0's, the same in every replica.
            name = f"{variable.op.name}/accumulator"
            if name in taken:  # a second train op's variable
                name = f"{variable.op.name}/{rule.name}/accumulator"
            dtype = rule.accumulator_dtype or variable.dtype.base_dtype
            is_sparse = isinstance(gradient, tf.IndexedSlices)
            shape = variable.shape
            made.append(create_accumulator(name, shape, dtype, is_sparse, **options))
    names = ["weight", "loss"]
    names += ["squares", "count"] if rule.noise_scale else []
    names += ["slices"] if rule.sparse_norm == "slices" else []
    for scalar, value in zip(names, scalars, strict=True):
        name = f"{rule.name}/{scalar}"
        shape = tf.TensorShape([])
        made.append(create_accumulator(name, shape, value.dtype, **options))
    return made


def scalars_of(
    rule: Rule, micro_batch: MicroBatch, loss_divisor: int
) -> list[tf.Tensor]:
    """Returns the sums beside the gradients: weights, losses, and what norms need."""
    is_wide = any(gradient.dtype == tf.float64 for gradient in micro_batch.gradients)
    dtype = tf.float64 if is_wide else tf.float32  # at least, for norms too
    loss = micro_batch.loss
    if loss is None:  # nothing to report, and nothing to find not finite
        with tf.control_dependencies([values_of(micro_batch.gradients[0])]):
            loss = tf.zeros([], dtype)
    with tf.control_dependencies([loss]):
        # A constant weight must not be counted when the micro-batch fails to come.
        weight = tf.identity(tf.cast(micro_batch.weight, dtype))
    scalars = [weight, tf.cast(micro_batch.scale, dtype) * tf.cast(loss, dtype)]
    if rule.noise_scale:
        squares = (
            2.0
            * tf.reduce_sum(half_squared_norms(micro_batch.gradients, dtype))
            * tf.constant(loss_divisor**2, dtype)
        )
        squares = (
            tf.math.divide_no_nan(squares, weight)
            if micro_batch.is_weighted
            else squares * weight
        )
        # A micro-batch of weight 0, all of it masked, says nothing.
        scalars += [squares, tf.cast(weight > 0, dtype)]
    if rule.sparse_norm == "slices":
        scalars.append(_half_squared_slices(micro_batch, dtype))
    return scalars


def _half_squared_slices(micro_batch: MicroBatch, dtype: tf.DType) -> tf.Tensor:
    """Of the weighted sparse gradients: what summing their rows would forget."""
    sparse = [g for g in micro_batch.gradients if isinstance(g, tf.IndexedSlices)]
    if not sparse:
        return tf.zeros([], dtype)
    halves = tf.reduce_sum(half_squared_norms(sparse, dtype, has_unique_rows=True))
    if micro_batch.is_weighted:
        return halves
    return halves * tf.square(tf.cast(micro_batch.scale, dtype))


def loss_divisor_of(gradients: list[Gradient]) -> int:
    """By what `compute_gradients` has divided the loss, to sum means over replicas.

    TensorFlow divides in Estimator's model_fns, and notes in the graph whether its last
    call did. Whether these gradients come from such a call, or from `tf.gradients`, the
    factor among their ancestors tells.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas == 1:
        return 1
    needed = ancestors([values_of(gradient).op for gradient in gradients])
    return replicas if any(_scales_a_loss(op, replicas) for op in needed) else 1


def _scales_a_loss(operation: tf.Operation, replicas: int) -> bool:
    if operation.type != "Const":
        return False
    (constant,) = operation.outputs
    if constant.shape.rank != 0 or not constant.dtype.is_floating:
        return False
    value = tf.get_static_value(constant)
    return value == value.dtype.type(1.0 / replicas) and any(
        frame.name == "_scale_loss" for frame in operation.traceback
    )


def state_of(plan: Plan) -> list[tf.Variable]:
    """What a graph without accumulation does not have, and cannot do without."""
    state = [plan.update_step]
    if plan.micro_steps is not None:
        state += [plan.micro_steps, *variables_of(plan.accumulators)]
    return state


def statistics_of(plan: Plan) -> list[tf.Variable]:
    """What is only reported: a checkpoint without it restores all the same."""
    statistics = list(plan.noise_scale or [])
    if plan.clipped_updates is not None:
        statistics.append(plan.clipped_updates)
    return statistics
