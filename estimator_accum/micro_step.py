"""One micro-step: the rule, whoever calls for it.

    update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i , clip_norm) )

over all micro-batches i of the window and all replicas. Order inside one micro-step,
every arrow a control or data dependency:

    gradients -> accumulate -> (boundary only: reduce over replicas once, normalize,
    clip, apply, clear, update_step += 1) -> global_step += 1
"""

import tensorflow as tf

from estimator_accum.accumulators import (
    add,
    assign_zeros,
    clear,
    commit,
    read,
)
from estimator_accum.clipping import half_squared_norms
from estimator_accum.gradients import Gradient, cast, scaled, values_of
from estimator_accum.micro_step_plan import (
    MicroBatch,
    Plan,
    Rule,
    is_plain,
    loss_divisor_of,
    make_plan,
    scalars_of,
    state_of,
    statistics_of,
    variables_of,
)
from estimator_accum.nonfinite import all_finite
from estimator_accum.update import (
    first_of,
    flatten,
    nan,
    no_update,
    raise_unless_finite,
    reduced,
    rule_checks_micro_batches,
    update,
    with_scalars,
)
from estimator_accum.window import Window, accumulation_steps_tensor, register


def make_micro_step(
    rule: Rule, micro_batch: MicroBatch, global_step: tf.Variable | None
) -> tf.Operation:
    """Makes the train op, in replica context.

    Args:
        rule: What to do at the window's boundary.
        micro_batch: What to accumulate.
        global_step: Moves by 1 every micro-step; None leaves that to the caller.
    """
    replica = tf.distribute.get_replica_context()
    divisor = loss_divisor_of(micro_batch.gradients)
    scalars = scalars_of(rule, micro_batch, divisor)
    plan = replica.merge_call(
        lambda strategy: make_plan(
            strategy, rule, micro_batch, scalars, global_step, divisor
        )
    )
    with tf.control_dependencies(None):  # hooks ask for K without a micro-batch
        steps = accumulation_steps_tensor(
            rule.gradient_accumulation_steps, plan.update_step
        )
    if micro_batch.batch is not None:
        _accumulate_before_the_train_op(plan, micro_batch, scalars)
        # From here on nothing sees the micro-batch, whatever the caller depends on.
        with tf.control_dependencies(None):
            mean_loss = _mean_loss(plan)
            return replica.merge_call(
                _finish, args=(plan, None, tf.constant(1, tf.int64), steps, mean_loss)
            )
    if plan.micro_steps is not None:
        gradients = None
        counted, mean_loss = _accumulate(plan, micro_batch, scalars)
    else:
        gradients = [*micro_batch.gradients, *scalars]
        if not micro_batch.is_weighted and not is_plain(rule):
            gradients = [
                *(scaled(g, scalars[0]) for g in gradients[: -len(scalars)]),
                *scalars,
            ]
        counted, mean_loss = tf.constant(1, tf.int64), micro_batch.loss
        if mean_loss is None:
            mean_loss = nan(scalars[0].dtype)
    with tf.control_dependencies(_update_ops(rule)):
        counted = tf.identity(counted)
    return replica.merge_call(
        _finish, args=(plan, gradients, counted, steps, mean_loss)
    )


def _update_ops(rule: Rule) -> list[tf.Operation]:
    """What has to run once a micro-step: the moving averages of batch normalization."""
    if rule.update_ops is not None:
        return rule.update_ops
    if tf.compat.v1.get_default_graph().building_function:
        return []  # inside somebody's tf.cond; they belong outside
    return tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)


def _accumulate(
    plan: Plan, micro_batch: MicroBatch, scalars: list[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns, once it is accumulated, (what the window counts it for, mean loss)."""
    gradients = micro_batch.gradients
    if not micro_batch.is_weighted:  # in the accumulators' dtype: theirs may be wider
        gradients = [
            scaled(cast(gradient, accumulator.total.dtype), micro_batch.scale)
            for gradient, accumulator in zip(gradients, plan.accumulators)
        ]
    with tf.control_dependencies([scalars[1]]):  # no loss, nothing is written
        if micro_batch.batch is None:
            is_first = tf.equal(plan.micro_steps.read_value(), 0)
        else:
            is_first = tf.identity(micro_batch.batch.is_first)
        sums = add(plan.accumulators, [*gradients, *scalars], is_first)
    has_weight = None  # whatever it is
    if tf.get_static_value(micro_batch.weight) is None:
        has_weight = tf.not_equal(scalars[0], 0.0)
    is_good, checked = _check_micro_batch(
        plan, sums[: len(gradients)], scalars, has_weight
    )
    # What weighs nothing adds nothing: a mean over no tokens is 0 / 0.
    is_added = has_weight if is_good is None else is_good
    if is_good is not None and has_weight is not None:
        is_added = tf.logical_and(is_good, has_weight)
    with tf.control_dependencies(checked):
        written = commit(plan.accumulators, sums, is_first, is_added)
    with tf.control_dependencies(written):
        mean_loss = _mean_loss(plan)
        if is_good is None or plan.num_replicas > 1:
            counted = tf.constant(1, tf.int64)
        else:  # the window then takes another micro-batch instead
            counted = tf.cast(is_good, tf.int64)
        return tf.identity(counted), mean_loss


def _mean_loss(plan: Plan) -> tf.Tensor:
    """Of this replica's micro-batches so far."""
    weight, loss = plan.accumulators[len(plan.variables) :][:2]
    if not plan.has_loss:
        with tf.control_dependencies(None):
            return nan(loss.total.dtype)
    return reduced(plan, read(loss.total), read(weight.total))


def _accumulate_before_the_train_op(plan: Plan, micro_batch: MicroBatch, scalars):
    """Gives the batch what has to run of this train op, and when."""
    batch = micro_batch.batch
    counted, _ = _accumulate(plan, micro_batch, scalars)
    if batch.weight is None:
        batch.weight, batch.reduction = micro_batch.weight, plan.rule.reduction
    batch.micro_ops += [counted.op, *_update_ops(plan.rule)]
    with tf.control_dependencies(None):
        for variable in variables_of(plan.accumulators):
            batch.initialize_ops.append(variable.initializer)
            batch.handles.append(variable.handle)
        batch.discard_ops += clear(plan.accumulators)
        batch.empty_ops += assign_zeros(plan.accumulators)


def _check_micro_batch(
    plan: Plan,
    sums: list[Gradient],
    scalars: list[tf.Tensor],
    has_weight: tf.Tensor | None,
):
    """Returns (whether it counts; None is always, operations that must come first)."""
    if not rule_checks_micro_batches(plan.rule):  # the window's sum will tell
        return None, [values_of(value).op for value in sums]
    halves = half_squared_norms(sums, scalars[0].dtype, has_unique_rows=True)
    values, halves = with_scalars(sums, halves, scalars[:2])
    if has_weight is not None:
        halves = tf.where(has_weight, halves, tf.zeros_like(halves))
    if plan.rule.on_nonfinite == "skip_micro_batch":
        return all_finite(values, halves), []
    return None, [raise_unless_finite(values, halves, plan, plan.variables)]


def _finish(strategy, plan, gradients, counted, steps, mean_loss):
    """Cross-replica: the `tf.cond` on the boundary, then global_step += 1.

    Args:
        strategy: The strategy in force, TensorFlow's default one included.
        plan: The train op's plan.
        gradients: For K = 1, the replicas' gradients; else None, they are accumulated.
        counted: What the window counts each replica's micro-batch for, 0 or 1.
        steps: K.
        mean_loss: The replicas' mean losses of the window so far.
    """
    steps, mean_loss = first_of(strategy, steps), first_of(strategy, mean_loss)
    train_ops = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)
    known_train_ops = list(train_ops)
    is_boundary, done = tf.constant(True), steps
    if plan.micro_steps is not None:
        with tf.control_dependencies(flatten(strategy, counted)):
            done = _add(plan.micro_steps, first_of(strategy, counted))
            is_boundary = done >= steps
    # A caller's control dependencies (batch norm's updates, say) need the micro-batch:
    # outside of them, feeding `is_boundary` is enough to apply a partial window.
    with tf.control_dependencies(None):
        if plan.micro_steps is None:
            result = update(strategy, plan, gradients)
        else:
            result = tf.cond(
                is_boundary,
                lambda: update(strategy, plan, gradients),
                lambda: no_update(plan),
            )
        if not plan.has_loss:
            result = result._replace(loss=nan(result.loss.dtype))
        # Whoever computes a learning rate in this micro-step has read its clock before.
        with tf.control_dependencies(_reads(strategy, plan.update_step)):
            updates, clipped_share = _count_update(plan, result.has_updated)
        of_partial = _count_update(plan, result.has_updated)
    with tf.control_dependencies([updates, *flatten(strategy, counted)]):
        if plan.global_step is None:
            global_step_after, train_op = None, tf.no_op(f"{plan.rule.name}_train")
        else:
            global_step_after = _add(plan.global_step, 1)
            train_op = tf.group(global_step_after, name=f"{plan.rule.name}_train")
    # Optimizers register ops of the branch's graph, which a MetaGraph cannot name.
    train_ops[:] = [*known_train_ops, train_op]
    register(
        Window(
            name=plan.rule.name,
            is_boundary=is_boundary,
            mean_loss=mean_loss,
            micro_steps=plan.micro_steps,
            micro_steps_after=done,
            gradient_accumulation_steps=steps,
            num_replicas=plan.num_replicas,
            clipped_share=clipped_share,
            update_step=plan.update_step,
            update_step_after=updates,
            of_partial=of_partial,
            global_step=plan.global_step,
            global_step_after=global_step_after,
            stop_request=plan.stop_request,
            state=state_of(plan),
            statistics=statistics_of(plan),
            **result._asdict(),
        )
    )
    return train_op


def _add(counter: tf.Variable, value) -> tf.Tensor:
    """Returns the counter's value after adding."""
    value = tf.cast(value, counter.dtype.base_dtype)
    with tf.control_dependencies([tf.compat.v1.assign_add(counter, value)]):
        return tf.identity(counter.read_value())


def _reads(strategy, variable: tf.Variable) -> list[tf.Operation]:
    """The operations of this graph that read `variable`, so far."""
    if tf.compat.v1.get_default_graph().building_function:
        return []
    return [
        operation
        for component in strategy.experimental_local_results(variable)
        for operation in component.handle.consumers()
        if operation.type == "ReadVariableOp"
    ]


def _count_update(plan: Plan, has_updated: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (updates, the share of them that were clipped), after this one."""
    updates = _add(plan.update_step, tf.cast(has_updated, tf.int64))
    if plan.clipped_updates is None:
        return updates, tf.constant(0.0)
    with tf.control_dependencies([updates]):
        clipped = tf.cast(plan.clipped_updates.read_value(), tf.float32)
        return updates, tf.math.divide_no_nan(clipped, tf.cast(updates, tf.float32))
