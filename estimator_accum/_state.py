"""Variables of one accumulating train op, and the terms of one micro-batch."""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum._accumulators import Accumulator, create_accumulator, variables_of
from estimator_accum._change import Change
from estimator_accum._gradients import Gradient, half_squared_norms, values_of
from estimator_accum._graph import add_to, ancestors, create_shared_scalar, nan
from estimator_accum._kinds import Kind
from estimator_accum._micro_step import Closed, MicroBatch, Terms
from estimator_accum._noise_scale import (
    NoiseScale,
    create_noise_scale,
    update_noise_scale,
)
from estimator_accum._rule import Rule, innermost, is_dynamic
from estimator_accum._window import (
    Window,
    get_or_create_update_step,
    get_windows,
    register,
)


class Computed(NamedTuple):
    """Gradients, loss and weight that one replica computed from one micro-batch.

    Attributes:
        gradients: One for each variable.
        variables: The trained variables.
        loss: Scalar mean over the micro-batch; None if unknown.
        weight: Scalar, the micro-batch's weight.
        scale: Scalar by which loss and gradients are multiplied: `weight`, or 1 if the
            micro-batch is the whole window and so its own mean.
        is_weighted: Whether `gradients` are already those of scale * loss.
        change: Code between these gradients and the optimizer; None if there is none.
    """

    gradients: list[Gradient]
    variables: list[tf.Variable]
    loss: tf.Tensor | None
    weight: tf.Tensor
    scale: tf.Tensor
    is_weighted: bool
    change: Change | None = None

    @property
    def updated(self) -> list[tf.Variable]:
        """The variables that the optimizer gets."""
        return self.variables if self.change is None else self.change.variables


class State(NamedTuple):
    """Variables of one accumulating train op, the same in every replica.

    `change` is the first replica's.
    """

    rule: Rule
    kind: Kind
    terms: Terms
    variables: list[tf.Variable]
    change: Change | None
    micro_steps: tf.Variable | None  # None if every run of the train op ends a window
    clipped_updates: tf.Variable | None
    noise_scale: NoiseScale | None
    update_step: tf.Variable
    global_step: tf.Variable | None

    @property
    def num_replicas(self) -> int:
        """Number of replicas that train in sync."""
        return self.terms.num_replicas

    @property
    def saved(self) -> list[tf.Variable]:
        """Variables that only accumulation has, and that a restore needs."""
        if self.micro_steps is None:
            return [self.update_step]
        sums = variables_of(self.terms.accumulators)
        return [self.update_step, self.micro_steps, *sums]

    @property
    def statistics(self) -> list[tf.Variable]:
        """Variables that are only reported: a checkpoint may lack them."""
        statistics = list(self.noise_scale or [])
        if self.clipped_updates is not None:
            statistics.append(self.clipped_updates)
        return statistics


def create_state(
    strategy,
    rule: Rule,
    kind: Kind,
    computed: Computed,
    micro_batch: MicroBatch,
    global_step: tf.Variable | None,
    loss_divisor: int,
) -> State:
    """Creates the variables in cross-replica context, outside any branch.

    Args:
        strategy: The current strategy.
        rule: The caller's options.
        kind: The kind of window.
        computed: One replica's gradients, loss and weight.
        micro_batch: The terms that the replica adds to its sums.
        global_step: Variable that increases by 1 every micro-step; None leaves that to
            the caller.
        loss_divisor: Number by which compute_gradients divided the loss.
    """
    with tf.init_scope():  # slots then get their usual names
        innermost(rule.optimizer)._create_slots(computed.updated)
    shared_step = get_or_create_update_step()
    is_first = not get_windows()
    accumulators = []
    if kind.keeps_sums:
        accumulators = _create_accumulators(rule, kind, computed, micro_batch.scalars)
    micro_steps = clipped_updates = noise_scale = None
    if kind.has_counter:
        micro_steps = create_shared_scalar(f"{rule.name}/micro_steps")
    if rule.clip_norm is not None:
        clipped_updates = create_shared_scalar(f"{rule.name}/clipped_updates")
    if rule.noise_scale:
        noise_scale = create_noise_scale(rule.name)
    own_step = f"{rule.name}/update_step"
    clock = global_step
    if clock is None:
        clock = tf.compat.v1.train.get_global_step()
    return State(
        rule=rule,
        kind=kind,
        terms=Terms(
            names=[variable.op.name for variable in computed.variables],
            dtypes=[variable.dtype for variable in computed.variables],
            accumulators=accumulators,
            num_replicas=strategy.num_replicas_in_sync,
            gradient_divisor=loss_divisor,
            on_nonfinite=None if is_dynamic(rule.optimizer) else rule.on_nonfinite,
            has_loss=micro_batch.loss is not None,
            reduction=rule.reduction,
            clip_norm=rule.clip_norm,
            sparse_norm=rule.sparse_norm,
            is_mean=kind.is_mean(),
            clock=clock,
            requests=_stop_requests(strategy),
        ),
        variables=computed.updated,
        change=computed.change,
        micro_steps=micro_steps,
        clipped_updates=clipped_updates,
        noise_scale=noise_scale,
        update_step=shared_step if is_first else create_shared_scalar(own_step),
        global_step=global_step,
    )


def _stop_requests(strategy) -> tuple[tf.Tensor, ...]:
    """Returns, in clusters, a placeholder by which this task asks all to stop."""
    if not strategy.extended._in_multi_worker_mode():
        return ()
    with tf.control_dependencies(None):
        return (tf.compat.v1.placeholder_with_default(0.0, [], "stop_request"),)


def _create_accumulators(
    rule: Rule, kind: Kind, computed: Computed, scalars: list[tf.Tensor]
) -> list[Accumulator]:
    """Creates an accumulator for each variable, then one for each scalar."""
    taken = {v.op.name for window in get_windows() for v in window.state}
    # Without a counter they are not saved: checkpoints are written between windows.
    options = {} if kind.has_counter else {"collections": []}
    made = []
    with tf.device(rule.accumulator_device):
        for gradient, variable in zip(
            computed.gradients, computed.variables, strict=True
        ):
            # `op.name` of a mirrored variable is replica 0's name in every replica.
            name = f"{variable.op.name}/accumulator"
            if name in taken:  # a second train op's variable
                name = f"{variable.op.name}/{rule.name}/accumulator"
            dtype = tf.as_dtype(rule.accumulator_dtype or variable.dtype.base_dtype)
            is_sparse = isinstance(gradient, tf.IndexedSlices)
            shape = variable.shape
            made.append(create_accumulator(name, shape, dtype, is_sparse, **options))
            taken.add(name)
    names = ["weight", "loss"]
    names += ["squares", "count"] if rule.noise_scale else []
    names += ["slices"] if rule.sparse_norm == "slices" else []
    names += [f"slices_{i}" for i in range(len(scalars) - len(names))]
    for scalar, value in zip(names, scalars, strict=True):
        name = f"{rule.name}/{scalar}"
        shape = tf.TensorShape([])
        made.append(create_accumulator(name, shape, value.dtype, **options))
    return made


def micro_batch_of(rule: Rule, computed: Computed, loss_divisor: int) -> MicroBatch:
    """Returns the terms that a replica adds to its sums.

    Args:
        rule: The caller's options.
        computed: The replica's gradients, loss and weight.
        loss_divisor: Number by which compute_gradients divided the loss.
    """
    is_wide = any(gradient.dtype == tf.float64 for gradient in computed.gradients)
    dtype = tf.float64 if is_wide else tf.float32  # norms need float32 or wider
    loss = computed.loss
    if loss is None:  # a zero is always finite and is never reported
        with tf.control_dependencies([values_of(computed.gradients[0])]):
            loss = tf.zeros([], dtype)
    weight = tf.cast(computed.weight, dtype)
    scalars = [weight, tf.cast(computed.scale, dtype) * tf.cast(loss, dtype)]
    if rule.noise_scale:
        squares = (
            2.0
            * tf.reduce_sum(half_squared_norms(computed.gradients, dtype))
            * tf.constant(loss_divisor**2, dtype)
        )
        squares = (
            tf.math.divide_no_nan(squares, weight)
            if computed.is_weighted
            else squares * weight
        )
        # A micro-batch of weight 0, where all is masked, is not a sample of the noise.
        scalars += [squares, tf.cast(weight > 0, dtype)]
    sparse = [g for g in computed.gradients if isinstance(g, tf.IndexedSlices)]
    if rule.sparse_norm == "slices":
        zero = tf.zeros([], dtype)
        scalars.append(sum(_half_squared_slices(computed, sparse, dtype), zero))
    if computed.change is not None:
        normed = computed.change.with_norm
        scalars += _half_squared_slices(computed, normed, dtype)
    is_known = tf.get_static_value(computed.weight) is not None
    return MicroBatch(
        gradients=computed.gradients,
        scale=None if computed.is_weighted else computed.scale,
        scalars=scalars,
        loss=computed.loss,
        has_weight=None if is_known else tf.not_equal(weight, 0.0),
    )


def _half_squared_slices(
    computed: Computed, gradients: list[tf.IndexedSlices], dtype: tf.DType
) -> list[tf.Tensor]:
    """Returns half the squared norms of all weighted slices, which row sums lose."""
    if not gradients:
        return []
    halves = half_squared_norms(gradients, dtype, has_unique_rows=True)
    if not computed.is_weighted:
        halves *= tf.square(tf.cast(computed.scale, dtype))
    return tf.unstack(halves)


def loss_divisor_of(gradients: list[Gradient]) -> int:
    """Returns the number by which `compute_gradients` divided the loss.

    In Estimator's model_fns TensorFlow divides by the number of replicas, so that sums
    over replicas are means, and the graph only records whether its last call did. These
    gradients may come from another call, or from `tf.gradients`, so the function looks
    for the factor 1 / replicas among their ancestors.
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
        frame.name == "_scale_loss"
        for frame in operation.traceback or ()  # a copied operation has none
    )


def observe(state: State, closed: Closed) -> tf.Tensor:
    """Counts clipping after an update; returns the noise scale, NaN without one."""
    counted, norm = [], closed.gradient_norm
    if state.clipped_updates is not None:
        is_clipped = tf.cast(norm > state.rule.clip_norm, tf.int64)
        counted = [state.clipped_updates.assign_add(is_clipped, read_value=False)]
    with tf.control_dependencies(counted):
        if state.noise_scale is None:
            return nan()
        squares, count, norm = closed.more
        return update_noise_scale(
            state.noise_scale, squares, count, closed.weight, norm
        )


def count_update(state: State, has_updated: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (updates, share of them that were clipped), this one included."""
    updates = add_to(state.update_step, tf.cast(has_updated, tf.int64))
    if state.clipped_updates is None:
        return updates, tf.constant(0.0)
    with tf.control_dependencies([updates]):
        clipped = tf.cast(state.clipped_updates.read_value(), tf.float32)
        return updates, tf.math.divide_no_nan(clipped, tf.cast(updates, tf.float32))


def reads(strategy, variable: tf.Variable) -> list[tf.Operation]:
    """Returns the operations of this graph that already read `variable`."""
    if tf.compat.v1.get_default_graph().building_function:
        return []
    return [
        operation
        for component in strategy.experimental_local_results(variable)
        for operation in component.handle.consumers()
        if operation.type == "ReadVariableOp"
    ]


def publish(state: State, closed: Closed, **tensors) -> None:
    """Makes a train op known to `get_windows`.

    Args:
        state: The train op's variables.
        closed: Values of the window that this micro-step closes.
        **tensors: Further fields of `Window`.
    """
    (stop_request,) = state.terms.requests or (None,)
    register(
        Window(
            name=state.rule.name,
            has_updated=closed.is_good,
            loss=closed.loss,
            gradient_norm=closed.gradient_norm,
            weight=closed.weight,
            micro_steps=state.micro_steps,
            num_replicas=state.num_replicas,
            update_step=state.update_step,
            global_step=state.global_step,
            stop_request=stop_request,
            stop_requests=closed.requests,
            state=state.saved,
            statistics=state.statistics,
            **tensors,
        )
    )


def nothing_closed(state: State) -> tuple[Closed, tf.Tensor]:
    """Returns the results off the boundary: not applied, all values NaN."""
    *_, last = state.terms.accumulators
    nothing = nan(last.total.dtype)
    is_good = tf.constant(False)
    return Closed(is_good, nothing, nothing, nothing, [], nan()), nan()
