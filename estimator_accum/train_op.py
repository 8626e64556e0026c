"""`make_accumulating_train_op`: one call from a loss to an accumulating train op.

    update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i , clip_norm) )

over all micro-batches i of the window and all replicas. Order inside one micro-step,
every arrow a control or data dependency:

    gradients -> accumulate -> (boundary only: reduce over replicas once, normalize,
    clip, apply, clear, update_step += 1) -> global_step += 1
"""

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
from estimator_accum.checks import (
    check_clip_norm,
    check_optimizer,
    check_replica_context,
    check_resource_variables,
    check_scalar,
)
from estimator_accum.clipping import normalize_and_clip
from estimator_accum.window import (
    AccumulationSteps,
    Window,
    accumulation_steps_tensor,
    check_accumulation_steps,
    check_window_name,
    get_counter,
    get_or_create_update_step,
    register,
)


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
    check_optimizer(optimizer)
    check_clip_norm(clip_norm)
    name = name or "accumulation"
    check_window_name(name)
    loss = check_scalar("loss", loss)
    replica = check_replica_context(optimizer)
    update_step = get_or_create_update_step()
    if global_step is None:
        global_step = tf.compat.v1.train.get_or_create_global_step()
    is_always_boundary = gradient_accumulation_steps == 1
    weight = tf.constant(1.0) if weight is None else check_scalar("weight", weight)
    weight = tf.stop_gradient(weight)  # it counts; it is not trained
    # One micro-batch alone is its own mean: the weight would cancel, up to rounding.
    is_plain = is_always_boundary and replica.num_replicas_in_sync == 1
    gradients, variables = _compute_gradients(
        loss if is_plain else loss * tf.cast(weight, loss.dtype),
        optimizer,
        var_list,
        loss.name,
    )
    dtype = _scalar_dtype(gradients)
    with tf.control_dependencies([loss]):
        # A constant weight must not be counted when the micro-batch fails to come.
        weight = tf.identity(tf.cast(weight, dtype))
    gradients = [*gradients, weight, weight * tf.cast(loss, dtype)]

    def prepare(strategy) -> _Plan:
        del strategy
        with tf.init_scope():  # before the tf.cond: slots then have their plain names
            optimizer._create_slots(variables)
        return _Plan(
            optimizer,
            clip_norm,
            _loss_divisor(),
            variables,
            [] if is_always_boundary else _accumulators(name, gradients, variables),
            None if is_always_boundary else get_counter(f"{name}/micro_steps"),
            update_step,
            global_step,
            name,
        )

    plan = replica.merge_call(prepare)
    with tf.control_dependencies(None):  # hooks ask for K without a micro-batch
        steps = accumulation_steps_tensor(gradient_accumulation_steps, update_step)
    if is_always_boundary:
        done, mean_loss = tf.constant(1, tf.int64), loss
    else:
        done, mean_loss = _accumulate_micro_batch(plan, gradients)
        gradients = None
    return replica.merge_call(
        _finish_micro_step, args=(plan, gradients, done, steps, mean_loss)
    )


def _compute_gradients(loss, optimizer, var_list, loss_name):
    pairs = optimizer.compute_gradients(loss, var_list=var_list)
    pairs = [
        (gradient, variable) for gradient, variable in pairs if gradient is not None
    ]
    if not pairs:
        raise ValueError(
            "`loss` must depend on a trained variable. Received: "
            f"{loss_name}, of which no variable has a gradient. Check `var_list` and "
            "that nothing between the variables and the loss stops gradients."
        )
    check_resource_variables([variable for _, variable in pairs])
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
    """Makes an accumulator for each variable, then those of weight and loss."""
    # `op.name` of a mirrored variable is that of replica 0, the same in every replica.
    made = [
        create_accumulator(
            f"{variable.op.name}/accumulator",
            variable.shape,
            variable.dtype.base_dtype,
            isinstance(gradient, tf.IndexedSlices),
        )
        for gradient, variable in zip(gradients[:-2], variables, strict=True)
    ]
    dtype = gradients[-1].dtype
    for scalar in ("weight", "loss"):
        shape = tf.TensorShape([])
        made.append(create_accumulator(f"{scope}/{scalar}", shape, dtype, False))
    return made


def _accumulate_micro_batch(plan: _Plan, gradients) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns, once it is accumulated, (micro-steps in the window, its mean loss)."""
    before = plan.micro_steps.read_value()
    with tf.control_dependencies([gradients[-1]]):  # no loss, nothing accumulated
        written = accumulate(plan.accumulators, gradients, tf.equal(before, 0))
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
    register(
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
    factor = tf.math.divide_no_nan(tf.constant(plan.loss_divisor, weight.dtype), weight)
    mean, norm = normalize_and_clip(
        sums,
        None if is_plain else factor,
        plan.clip_norm,
        dtype=weight.dtype,
        has_unique_rows=bool(plan.accumulators),
    )
    # The sum above was the one reduction of the window.
    options = (
        {"skip_gradients_aggregation": True} if tf.distribute.has_strategy() else {}
    )
    # An optimizer may decay a slot before its gradient is there. A micro-step that fails,
    # as the one does that finds the end of the data, must not move even that.
    with tf.control_dependencies([loss]):
        train = plan.optimizer.apply_gradients(
            list(zip(mean, plan.variables, strict=True)), **options
        )
    with tf.control_dependencies([train, *cleared]):
        return (
            tf.math.divide_no_nan(loss, weight),
            tf.identity(norm),
            tf.identity(weight),
        )


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
