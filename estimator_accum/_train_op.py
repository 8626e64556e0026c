"""`make_accumulating_train_op`: one call from a loss to an accumulating train op."""

from collections.abc import Callable

import tensorflow as tf

from estimator_accum._applying import apply
from estimator_accum._checks import (
    check_loss,
    check_replica_context,
    check_trained,
    check_weight,
    checked_var_list,
    has_half_precision,
    no_gradient,
)
from estimator_accum._graph import add_to, first_of, flatten, nan
from estimator_accum._kinds import Kind, own_gradients
from estimator_accum._micro_step import Closed, close_window
from estimator_accum._rule import Rule, update_ops_of
from estimator_accum._state import (
    Computed,
    State,
    count_update,
    create_state,
    loss_divisor_of,
    micro_batch_of,
    nothing_closed,
    observe,
    publish,
    reads,
)
from estimator_accum._window import AccumulationSteps

_READ_BY_HOOKS = "global_step_read_op_cache"  # TensorFlow's collection of the one read


# Under a strategy AutoGraph would otherwise spend seconds on the library's Python, and
# find nothing to convert.
@tf.autograph.experimental.do_not_convert
def make_accumulating_train_op(
    loss: tf.Tensor,
    optimizer: tf.compat.v1.train.Optimizer,
    gradient_accumulation_steps: AccumulationSteps,
    clip_norm: float | None = None,
    weight: tf.Tensor | None = None,
    var_list: list[tf.Variable] | None = None,
    global_step: tf.Variable | None = None,
    name: str | None = None,
    *,
    reduction: str = "mean",
    sparse_norm: str = "rows",
    on_nonfinite: str = "raise",
    accumulator_dtype: tf.DType | None = None,
    accumulator_device: str | None = None,
    noise_scale: bool = False,
    update_ops: list[tf.Operation] | None = None,
    after_update_ops: Callable[[], list[tf.Operation]] | None = None,
) -> tf.Operation:
    """Makes a train op: every run is a micro-step, every K-th run an update.

        update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i ) )

    The weights after an update are those of training on one batch that joins the
    window's micro-batches. Between boundaries neither variables nor optimizer slots
    change. Call it in a model_fn (under a `tf.distribute` strategy: in replica context)
    instead of `optimizer.minimize(loss, global_step)`. Inside `microbatch_model_fn` the
    batch is the window, whatever the value of K, and a micro-batch is weighted by its
    number of examples.

    Args:
        loss: Scalar, the mean over this replica's micro-batch (or its sum, see
            `reduction`), not divided by K or by the number of replicas.
        optimizer: A `tf.compat.v1.train.Optimizer`. Its learning-rate schedule must be
            computed from `get_or_create_update_step()`.
        gradient_accumulation_steps: K >= 1 [micro-steps per update], or a callable
            that maps the `update_step` variable to an int scalar Tensor. 1 is the
            plain optimizer.
        clip_norm: Largest global norm of the window's mean gradient, > 0; None does not
            clip.
        weight: Scalar, the micro-batch's weight, e.g. its number of examples or tokens.
            None means 1; inside `microbatch_model_fn` the number of examples.
        var_list: Variables to train; None is all trainable ones.
        global_step: Variable that increases by 1 every micro-step; None is the graph's
            global step.
        name: Scope of the window's counters. None is "accumulation", for a second train
            op "accumulation_1" and so on.
        reduction: "mean" for a loss that is the mean over the micro-batch; "sum" for
            one that sums over its examples, so that the window's loss is the sum too.
        sparse_norm: Norm that `clip_norm` limits, if a row of an embedding is looked up
            twice. "rows": the true norm, of each row's total gradient. "slices": the
            norm of all look-ups separately, as tf.clip_by_global_norm computes it for
            `IndexedSlices`; code that clips so keeps its weights.
        on_nonfinite: Policy for a micro-batch whose gradients or loss are NaN or
            infinite. "raise": the micro-step fails with the variables' names, and
            nothing is accumulated. "skip_micro_batch": it is left out, and the window
            takes another one instead (with several replicas, only the others count).
            "skip_window": the window ends without an update. An optimizer with dynamic
            loss scaling skips the window and lowers its scale by itself. Estimator
            stops by itself if `EstimatorSpec.loss` is NaN: to continue, give it
            tf.where(tf.math.is_finite(loss), loss, 0.0).
        accumulator_dtype: Dtype of the accumulators, e.g. tf.float32 for float16
            variables; None keeps each variable's dtype.
        accumulator_device: Device of the accumulators, e.g. "/cpu:0"; None is where the
            variables are created.
        noise_scale: Whether to estimate the gradient noise scale (McCandlish et al.
            2018, https://arxiv.org/abs/1812.06162) for hooks to report.
        update_ops: Operations that run with every micro-step, outside the branch that
            updates, also for a micro-batch that is skipped; None takes the graph's
            `UPDATE_OPS`, batch normalization's moving averages.
        after_update_ops: A function that makes the operations to run once after each
            update, e.g. lambda: [ema.apply(variables)]; an operation made before the
            call would run with every micro-step.

    Creates:
        `update_step`, `<name>/micro_steps` (int64 scalars), `<name>/weight`,
        `<name>/loss` (scalars), and for each trained variable `<variable>/accumulator`
        of its shape, with `<variable>/accumulator_rows` (float32 [rows]) if the
        gradient is sparse; with `clip_norm` `<name>/clipped_updates` (int64 scalar),
        with "slices" `<name>/slices`, for the noise scale four scalars. A further train
        op has `<name>/update_step`. Checkpoints hold all of them but the sums inside
        `microbatch_model_fn`. K = 1 creates no sums, nor a counter of micro-steps.

    Returns:
        The train op.

    Raises:
        RuntimeError: In eager execution.
        TypeError: If an argument has the wrong type.
        ValueError: If a value is out of range, `loss` or `weight` is not a scalar, no
            variable gets a gradient, a name is taken, or the context does not fit.
        tf.errors.InvalidArgumentError: From the session, if `on_nonfinite` is "raise".
    """
    rule, kind = Rule(
        optimizer=optimizer,
        gradient_accumulation_steps=gradient_accumulation_steps,
        clip_norm=clip_norm,
        weight=weight,
        name=name,
        reduction=reduction,
        sparse_norm=sparse_norm,
        on_nonfinite=on_nonfinite,
        accumulator_dtype=accumulator_dtype,
        accumulator_device=accumulator_device,
        noise_scale=noise_scale,
        update_ops=update_ops,
        after_update_ops=after_update_ops,
    ).of_train_op()
    check_replica_context(optimizer)
    loss = check_loss(loss)
    if weight is not None:
        weight = check_weight(weight)
    weight, scale = kind.weigh(weight, rule.reduction)
    if var_list is None:
        var_list = tf.compat.v1.trainable_variables()
    var_list = checked_var_list(var_list)
    if not var_list:
        raise ValueError(no_gradient(loss))
    # Weighting the loss is free, but may overflow float16.
    is_weighted = kind.needs_weight and not has_half_precision(loss, optimizer)
    # By default each gradient waits until all gradients of its operation are computed,
    # so that no variable changes before the last one has read it. A window ensures that
    # anyway, and the gates would be a third of the gradients' graph.
    gate_none = {"gate_gradients": tf.compat.v1.train.Optimizer.GATE_NONE}
    with own_gradients():
        pairs = optimizer.compute_gradients(
            loss * tf.cast(scale, loss.dtype) if is_weighted else loss,
            var_list=var_list,
            **(gate_none if kind.keeps_sums else {}),
        )
    gradients, variables = check_trained(pairs, loss)
    if global_step is None:
        global_step = tf.compat.v1.train.get_or_create_global_step()
    computed = Computed(gradients, variables, loss, weight, scale, is_weighted)
    return make_train_op(rule, kind, computed, global_step)


def make_train_op(
    rule: Rule, kind: Kind, computed: Computed, global_step: tf.Variable | None
) -> tf.Operation:
    """Makes the train op, in replica context.

    Args:
        rule: The caller's options.
        kind: The kind of window.
        computed: This replica's gradients, loss and weight.
        global_step: Variable that increases by 1 every micro-step; None leaves that to
            the caller.
    """
    replica = tf.distribute.get_replica_context()
    divisor = loss_divisor_of(computed.gradients)
    micro_batch = micro_batch_of(rule, computed, divisor)
    state = replica.merge_call(
        lambda strategy: create_state(
            strategy, rule, kind, computed, micro_batch, global_step, divisor
        )
    )
    with tf.control_dependencies(None):  # hooks fetch K without a micro-batch
        steps = kind.steps(state.update_step)
    added = kind.add(state.terms, state.micro_steps, micro_batch, update_ops_of(rule))
    with kind.at_the_boundary():
        args = (state, *added, steps, computed.change)
        return replica.merge_call(_finish, args=args)


def _finish(strategy, state: State, gradients, counted, mean_loss, steps, change):
    """Makes the `tf.cond` on the boundary, then global_step += 1, cross-replica.

    Args:
        strategy: The current strategy, which may be TensorFlow's default one.
        state: The train op's variables.
        gradients: The replicas' gradients and scalars, if nothing is accumulated.
        counted: Per replica, 1 if the window counts its micro-batch, else 0.
        mean_loss: The replicas' mean losses of the window so far.
        steps: K [micro-steps per update].
        change: The replicas' code that changes gradients; None if it changes nothing.
    """
    steps, mean_loss = first_of(strategy, steps), first_of(strategy, mean_loss)
    counted = flatten(strategy, counted)
    kind, name = state.kind, state.rule.name
    train_ops = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.TRAIN_OP)
    known_train_ops = list(train_ops)
    is_boundary, done = kind.count(state.micro_steps, counted, steps)

    def update() -> tuple[Closed, tf.Tensor]:
        closed, noise_scale = close_window(
            strategy, state.terms, apply_and_observe, gradients, change
        )
        return closed._replace(more=[]), noise_scale  # only `apply` uses them

    def apply_and_observe(mean, closed: Closed) -> tf.Tensor:
        with tf.control_dependencies(apply(strategy, state, mean, closed.loss)):
            return observe(state, closed)

    # A caller's control dependencies (batch norm's updates, say) need the micro-batch:
    # outside of them, feeding `is_boundary` is enough to apply a partial window.
    with tf.control_dependencies(None):
        closed, noise_scale = kind.close(
            state.micro_steps, is_boundary, update, lambda: nothing_closed(state)
        )
        # A learning rate of this micro-step must read update_step before it changes.
        with tf.control_dependencies(reads(strategy, state.update_step)):
            updates, clipped_share = count_update(state, closed.is_good)
        of_partial = count_update(state, closed.is_good)
        if not state.terms.has_loss:
            closed = closed._replace(loss=nan(closed.loss.dtype))
    # Hooks such as StepCounterHook read global_step in the same run: before it changes,
    # or two runs may read the same value, of which TensorFlow warns.
    hooks_read = tf.compat.v1.get_collection(_READ_BY_HOOKS)
    with tf.control_dependencies([updates, *counted, *hooks_read]):
        if state.global_step is None:
            global_step_after, train_op = None, tf.no_op(f"{name}_train")
        else:
            global_step_after = add_to(state.global_step, 1)
            train_op = tf.group(global_step_after, name=f"{name}_train")
    if change is not None:
        changes = strategy.experimental_local_results(change)
        waits = [operation for each in changes for operation in each.waits]
        train_op = tf.group(train_op, *waits, name=f"{name}_train_all")
    # Optimizers register ops of the branch's graph, which a MetaGraph cannot name.
    train_ops[:] = [*known_train_ops, train_op]
    publish(
        state,
        closed,
        is_boundary=is_boundary,
        noise_scale=noise_scale,
        mean_loss=mean_loss,
        micro_steps_after=done,
        gradient_accumulation_steps=steps,
        clipped_share=clipped_share,
        update_step_after=updates,
        of_partial=of_partial,
        global_step_after=global_step_after,
    )
    return train_op
