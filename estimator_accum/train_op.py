"""`make_accumulating_train_op`: one call from a loss to an accumulating train op.

    update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i , clip_norm) )

over all micro-batches i of the window and all replicas. Order inside one micro-step,
every arrow a control or data dependency:

    gradients -> accumulate -> (boundary only: reduce over replicas once, normalize,
    clip, apply, clear, update_step += 1) -> global_step += 1
"""

import inspect
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.accumulators import (
    Accumulator,
    Gradient,
    accumulate,
    create_accumulator,
    sum_over_replicas,
    take_window,
)
from estimator_accum.window import (
    AccumulationSteps,
    accumulation_steps_tensor,
    check_accumulation_steps,
    get_counter,
    get_or_create_update_step,
)

_GRAPH_ATTRIBUTE = "_estimator_accum_windows"


class Window(NamedTuple):
    """What hooks may run and fetch of one accumulating train op; scalars throughout.

    Attributes:
        name: The scope of the window's variables.
        is_boundary: Whether this micro-step updates. Fed with True, any of
            `loss`, `gradient_norm`, `weight` and `update_step_after` applies a partial
            window without consuming a micro-batch.
        loss: Mean loss of the window that this micro-step closed; NaN off the boundary.
        gradient_norm: Its gradient's global norm before clipping; NaN off the boundary.
        weight: Sum of its weights over all replicas; NaN off the boundary.
        mean_loss: Mean loss of the open window so far, this replica's micro-batches;
            at a boundary that of the whole window.
        micro_steps: Counts the micro-steps of the open window; None for K = 1.
        steps: K of the open window [micro-steps per update].
        update_step: Counts updates.
        update_step_after: `update_step` as this micro-step leaves it.
        global_step: Counts micro-steps.
        global_step_after: `global_step` as this micro-step leaves it.
        state: Variables that a graph without accumulation does not have.
    """

    name: str
    is_boundary: tf.Tensor
    loss: tf.Tensor
    gradient_norm: tf.Tensor
    weight: tf.Tensor
    mean_loss: tf.Tensor
    micro_steps: tf.Variable | None
    steps: tf.Tensor
    update_step: tf.Variable
    update_step_after: tf.Tensor
    global_step: tf.Variable
    global_step_after: tf.Tensor
    state: list[tf.Variable]


class _Plan(NamedTuple):
    """What one accumulating train op is made of; the same in every replica."""

    optimizer: tf.compat.v1.train.Optimizer
    clip_norm: float | None
    loss_divisor: int  # by which `optimizer` divided the loss
    variables: list[tf.Variable]
    accumulators: list[Accumulator]  # of the variables, then of weight and loss
    micro_steps: tf.Variable | None  # None: every micro-step is a window
    update_step: tf.Variable
    global_step: tf.Variable
    name: str


def make_accumulating_train_op(
    loss: tf.Tensor,
    optimizer: tf.compat.v1.train.Optimizer,
    gradient_accumulation_steps: AccumulationSteps,
    clip_norm: float | None = None,
    weight: tf.Tensor | None = None,
    var_list: list[tf.Variable] | None = None,
    global_step: tf.Variable | None = None,
    name: str | None = None,
) -> tf.Operation:
    """Makes a train op of which each run is one micro-step and each K-th an update.

        update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i ) )

    The weights after an update are those of one batch that joins the window's
    micro-batches. Between boundaries neither variables nor optimizer slots change.
    Call it in a model_fn (under a `tf.distribute` strategy: in replica context) where
    `optimizer.minimize(loss, global_step)` would stand.

    Args:
        loss: Scalar, the mean over this replica's micro-batch; nobody divides it by K
            or by the number of replicas.
        optimizer: A `tf.compat.v1.train.Optimizer`. A learning rate that changes takes
            `get_or_create_update_step()` for its clock.
        gradient_accumulation_steps: K >= 1 [micro-steps per update], or a callable
            that maps the `update_step` variable to an int scalar Tensor. 1 is the
            plain optimizer.
        clip_norm: Largest global norm of the window's mean gradient, > 0; None does not
            clip.
        weight: Scalar, what the micro-batch counts for, e.g. its number of examples or
            tokens; None is 1.
        var_list: Variables to train; None is all trainable ones.
        global_step: Moves by 1 every micro-step; None is the graph's global step.
        name: Scope of the window's counters; a second train op in one graph needs one.
            None is "accumulation".

    Creates:
        `update_step`, `<name>/micro_steps` (int64 scalars), `<name>/weight`,
        `<name>/loss` (scalars), and for each trained variable `<variable>/accumulator`
        of its shape and dtype, with `<variable>/accumulator_rows` (float32 [rows]) where
        the gradient is sparse. All are global variables that checkpoints hold. K = 1
        makes `update_step` only.

    Returns:
        The train op.

    Raises:
        TypeError: If `optimizer`, K, `clip_norm` or `loss` is of another kind.
        ValueError: If K < 1, `clip_norm` <= 0, `loss` or `weight` is not a scalar, no
            variable gets a gradient, or the strategy's context does not fit.
    """
    check_accumulation_steps(gradient_accumulation_steps)
    _check_optimizer(optimizer)
    _check_clip_norm(clip_norm)
    loss = _check_scalar("loss", loss)
    replica = _check_replica_context(optimizer)
    update_step = get_or_create_update_step()
    if global_step is None:
        global_step = tf.compat.v1.train.get_or_create_global_step()
    is_always_boundary = gradient_accumulation_steps == 1
    weight = tf.constant(1.0) if weight is None else _check_scalar("weight", weight)
    # One micro-batch alone is its own mean: the weight would cancel, up to rounding.
    is_plain = is_always_boundary and replica.num_replicas_in_sync == 1
    gradients, variables = _compute_gradients(
        loss if is_plain else loss * tf.cast(weight, loss.dtype),
        optimizer,
        var_list,
    )
    dtype = _scalar_dtype(gradients)
    weight = tf.cast(weight, dtype)
    gradients = [*gradients, weight, weight * tf.cast(loss, dtype)]

    def prepare(strategy) -> _Plan:
        del strategy
        with tf.init_scope():  # before the tf.cond: slots then have their plain names
            optimizer._create_slots(variables)
        scope = name or "accumulation"
        return _Plan(
            optimizer,
            clip_norm,
            _loss_divisor(),
            variables,
            [] if is_always_boundary else _accumulators(scope, gradients, variables),
            None if is_always_boundary else _micro_steps(scope),
            update_step,
            global_step,
            scope,
        )

    plan = replica.merge_call(prepare)
    steps = accumulation_steps_tensor(gradient_accumulation_steps, update_step)
    if is_always_boundary:
        done, mean_loss = tf.constant(1, tf.int64), loss
    else:
        done, mean_loss = _accumulate_micro_batch(plan, gradients)
        gradients = None
    return replica.merge_call(
        _finish_micro_step, args=(plan, gradients, done, steps, mean_loss)
    )


def get_windows() -> list[Window]:
    """Returns the accumulating train ops of the default graph, in order of creation."""
    return list(getattr(tf.compat.v1.get_default_graph(), _GRAPH_ATTRIBUTE, []))


def _compute_gradients(loss, optimizer, var_list):
    pairs = optimizer.compute_gradients(loss, var_list=var_list)
    pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
    if not pairs:
        raise ValueError(
            "`loss` must depend on a trained variable. Received: "
            f"{loss.name}, of which no variable has a gradient. Check `var_list` and "
            "that nothing between the variables and the loss stops gradients."
        )
    _check_resource_variables([variable for _, variable in pairs])
    return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]


def _loss_divisor() -> int:
    """By what `compute_gradients` has divided the loss, to sum means over replicas."""
    graph = tf.compat.v1.get_default_graph()
    if getattr(graph, "_is_loss_scaled_by_optimizer", False):
        return tf.distribute.get_strategy().num_replicas_in_sync
    return 1


def _scalar_dtype(gradients: list[Gradient]) -> tf.DType:
    """Weights, losses and norms are as wide as the widest gradient, at least float32."""
    is_wide = any(gradient.dtype == tf.float64 for gradient in gradients)
    return tf.float64 if is_wide else tf.float32


def _accumulators(scope, gradients, variables) -> list[Accumulator]:
    # `op.name` of a mirrored variable is that of replica 0, the same in every replica.
    names = [f"{variable.op.name}/accumulator" for variable in variables]
    names += [f"{scope}/weight", f"{scope}/loss"]
    created = []
    for name, gradient, variable in zip(
        names, gradients, [*variables, None, None], strict=True
    ):
        dtype = gradient.dtype if variable is None else variable.dtype.base_dtype
        shape = tf.TensorShape([]) if variable is None else variable.shape
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        created.append(create_accumulator(name, shape, dtype, is_sparse))
    return created


def _micro_steps(scope: str) -> tf.Variable:
    if any(window.name == scope for window in get_windows()):
        raise ValueError(
            "`name` must be unique among the accumulating train ops of a graph. "
            f"Received: {scope!r} a second time. Pass another `name`."
        )
    return get_counter(f"{scope}/micro_steps")


def _accumulate_micro_batch(plan: _Plan, gradients) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns, once it is accumulated, (micro-steps in the window, its mean loss)."""
    before = plan.micro_steps.read_value()
    written = accumulate(plan.accumulators, gradients, is_first=tf.equal(before, 0))
    with tf.control_dependencies(written):
        weight, loss = (
            tf.raw_ops.ReadVariableOp(resource=a.total.handle, dtype=a.total.dtype)
            for a in plan.accumulators[-2:]
        )
        mean_loss = tf.reshape(tf.math.divide_no_nan(loss, weight), [])
        return before + 1, mean_loss


def _finish_micro_step(strategy, plan, gradients, done, steps, mean_loss):
    """Cross-replica: the `tf.cond` on the boundary, then global_step += 1.

    Args:
        strategy: The strategy in force, TensorFlow's default one included.
        plan: The train op's plan.
        gradients: For K = 1, the replicas' gradients; else None, they are accumulated.
        done: The replicas' counts of micro-steps in the window, this one included.
        steps: K.
        mean_loss: The replicas' mean losses of the window so far.
    """

    def first(values):  # of what every replica knows alike
        return strategy.experimental_local_results(values)[0]

    def update():
        results = strategy.extended.call_for_each_replica(
            _apply_window, args=(plan, gradients)
        )
        with tf.control_dependencies(_flatten(strategy, results)):
            counted = [plan.update_step.assign_add(1, read_value=False)]
            if plan.micro_steps is not None:
                counted.append(plan.micro_steps.assign(0, read_value=False))
        with tf.control_dependencies(counted):
            return tuple(tf.identity(first(result)) for result in results)

    def wait():
        with tf.control_dependencies(
            [plan.micro_steps.assign_add(1, read_value=False)]
        ):
            nothing = tf.constant(float("nan"), plan.accumulators[-1].total.dtype)
            return nothing, nothing, nothing

    train_ops = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)
    known_train_ops = list(train_ops)
    with tf.control_dependencies(_flatten(strategy, done)):
        is_boundary = first(done) >= first(steps)
    # A caller's control dependencies (batch norm's updates, say) need the micro-batch:
    # outside of them, feeding `is_boundary` is enough to apply a partial window.
    with tf.control_dependencies(None):
        if plan.micro_steps is None:
            is_boundary = tf.constant(True)
            loss, norm, weight = update()
        else:
            loss, norm, weight = tf.cond(is_boundary, update, wait)
        with tf.control_dependencies([loss]):
            update_step_after = tf.identity(plan.update_step.read_value())
    with tf.control_dependencies([update_step_after]):
        counted = tf.compat.v1.assign_add(plan.global_step, 1)
    with tf.control_dependencies([counted]):
        after = tf.identity(plan.global_step.read_value())
        train_op = tf.group(counted, name=f"{plan.name}_train")
    # Optimizers register ops of the branch's graph, which a MetaGraph cannot name.
    train_ops[:] = [*known_train_ops, train_op]
    _register(
        Window(
            name=plan.name,
            is_boundary=is_boundary,
            loss=loss,
            gradient_norm=norm,
            weight=weight,
            mean_loss=first(mean_loss),
            micro_steps=plan.micro_steps,
            steps=first(steps),
            update_step=plan.update_step,
            update_step_after=update_step_after,
            global_step=plan.global_step,
            global_step_after=after,
            state=_state(plan),
        )
    )
    return train_op


def _apply_window(plan: _Plan, gradients: list[Gradient] | None):
    """Replica context, at a boundary: reduce, normalize, clip, apply, clear.

    Returns:
        (mean loss, gradient norm before clipping, weight) of the window.
    """
    if plan.accumulators:
        sums, cleared = take_window(plan.accumulators)
    else:
        sums, cleared = sum_over_replicas(gradients), []
    *sums, weight, loss = sums
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    is_plain = not plan.accumulators and replicas == 1
    factor = tf.math.divide_no_nan(
        tf.constant(plan.loss_divisor, weight.dtype), weight
    )
    mean, norm = _normalize_and_clip(
        sums, None if is_plain else factor, plan.clip_norm, weight.dtype
    )
    # The sum above was the one reduction of the window.
    options = {"skip_gradients_aggregation": True} if tf.distribute.has_strategy() else {}
    train = plan.optimizer.apply_gradients(
        list(zip(mean, plan.variables, strict=True)), **options
    )
    with tf.control_dependencies([train, *cleared]):
        return (
            tf.math.divide_no_nan(loss, weight),
            tf.identity(norm),
            tf.identity(weight),
        )


def _normalize_and_clip(sums, factor, clip_norm, dtype):
    """Returns (clip(factor * sums), norm of factor * sums), in one pass each.

    Args:
        sums: Tensors or `IndexedSlices`.
        factor: Scalar of `dtype`; None is 1, exactly.
        clip_norm: Largest global norm; None does not clip.
        dtype: Of the norm.
    """
    norm = _global_norm(sums, dtype)
    if factor is not None:
        norm = norm * factor
    scale = factor
    if clip_norm is not None:
        # As tf.clip_by_global_norm does, to the bit: 1 where the norm is within, NaN
        # where it is not finite.
        clip = clip_norm * tf.minimum(1.0 / norm, tf.constant(1.0, dtype) / clip_norm)
        clip += norm - norm
        scale = clip if factor is None else clip * factor
    if scale is None:
        return sums, norm
    return [_scaled(value, scale) for value in sums], norm


def _global_norm(sums, dtype) -> tf.Tensor:
    halves = []
    for value in sums:
        if isinstance(value, tf.IndexedSlices):
            value = _sum_duplicates(value)
        if value.dtype in (tf.float16, tf.bfloat16):
            value = tf.cast(value, dtype)  # squares leave float16's range
        halves.append(tf.cast(tf.nn.l2_loss(value), dtype))
    return tf.sqrt(tf.reduce_sum(tf.stack(halves)) * tf.constant(2.0, dtype))


def _sum_duplicates(slices: tf.IndexedSlices) -> tf.Tensor:
    """A row that is looked up twice has one gradient: the sum of both slices."""
    unique, positions = tf.unique(slices.indices)
    return tf.math.unsorted_segment_sum(slices.values, positions, tf.size(unique))


def _scaled(value: Gradient, scale: tf.Tensor) -> Gradient:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(
            _scaled(value.values, scale), value.indices, value.dense_shape
        )
    return value * tf.cast(scale, value.dtype)


def _flatten(strategy, values) -> list[tf.Tensor]:
    per_value = tf.nest.map_structure(strategy.experimental_local_results, values)
    return tf.nest.flatten(per_value)


def _state(plan: _Plan) -> list[tf.Variable]:
    state = [plan.update_step]
    if plan.micro_steps is not None:
        state.append(plan.micro_steps)
    for accumulator in plan.accumulators:
        state.extend(variable for variable in accumulator if variable is not None)
    return state


def _register(window: Window) -> None:
    graph = tf.compat.v1.get_default_graph()
    # An attribute, not a collection: MetaGraphs could not serialize it.
    setattr(graph, _GRAPH_ATTRIBUTE, [*get_windows(), window])


def _check_optimizer(optimizer) -> None:
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise TypeError(
            "`optimizer` must be a tf.compat.v1.train.Optimizer. Received: "
            f"{optimizer!r}. Keras optimizers have no place in a v1 train op."
        )


def _check_clip_norm(clip_norm) -> None:
    if clip_norm is None:
        return
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float):
        raise TypeError(
            "`clip_norm` must be a number > 0 or None. "
            f"Received: {clip_norm!r}. Use None to turn clipping off."
        )
    if not clip_norm > 0:
        raise ValueError(
            "`clip_norm` must be a number > 0 or None. "
            f"Received: {clip_norm}. Use None to turn clipping off."
        )


def _check_scalar(argument: str, value) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    if value.shape.rank != 0:
        raise ValueError(
            f"`{argument}` must be a scalar. Received: shape {value.shape} from "
            f"{value.name}. Reduce it, e.g. with tf.reduce_mean."
        )
    return value


def _check_replica_context(optimizer):
    replica = tf.distribute.get_replica_context()
    if replica is None:
        raise ValueError(
            "make_accumulating_train_op must be called in replica context. Received: "
            "cross-replica context. Call it inside a model_fn or inside strategy.run."
        )
    if tf.distribute.has_strategy():
        parameters = inspect.signature(optimizer.apply_gradients).parameters
        if "skip_gradients_aggregation" not in parameters:
            raise ValueError(
                "Under a tf.distribute strategy `optimizer.apply_gradients` must take "
                "`skip_gradients_aggregation`, so that gradients are reduced once. "
                f"Received: {type(optimizer).__name__}, which overrides it without. "
                "Implement _resource_apply_dense and _resource_apply_sparse instead."
            )
    return replica


def _check_resource_variables(variables) -> None:
    if not tf.compat.v1.control_flow_v2_enabled():
        return
    for variable in variables:
        if not hasattr(variable, "handle"):
            raise ValueError(
                "Trained variables must be resource variables. Received: reference "
                f"variable {variable.name}. Make it with use_resource=True, or call "
                "tf.compat.v1.disable_v2_behavior() first."
            )
