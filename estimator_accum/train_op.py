"""`make_accumulating_train_op`: one call from a loss to an accumulating train op."""

from collections.abc import Callable

import tensorflow as tf

from estimator_accum.batch_window import current_batch
from estimator_accum.checks import (
    check_loss,
    check_replica_context,
    check_trained,
    checked_rule,
    checked_var_list,
    no_gradient,
    weight_and_scale,
)
from estimator_accum.graph import ancestors
from estimator_accum.loss_scaling import is_loss_scaling
from estimator_accum.micro_step import make_micro_step
from estimator_accum.micro_step_plan import MicroBatch, Rule, is_plain
from estimator_accum.window import AccumulationSteps


# Under a strategy TensorFlow would rewrite all of the library's Python, for seconds,
# and find nothing to rewrite.
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
    """Makes a train op of which each run is one micro-step and each K-th an update.

        update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i ) )

    The weights after an update are those of one batch that joins the window's
    micro-batches. Between boundaries neither variables nor optimizer slots change.
    Call it in a model_fn (under a `tf.distribute` strategy: in replica context) where
    `optimizer.minimize(loss, global_step)` would stand. Inside `microbatch_model_fn` the
    batch is the window, whatever K says, and a micro-batch counts for its examples.

    Args:
        loss: Scalar, the mean over this replica's micro-batch (or its sum, see
            `reduction`); nobody divides it by K or by the number of replicas.
        optimizer: A `tf.compat.v1.train.Optimizer`. A learning rate that changes takes
            `get_or_create_update_step()` for its clock.
        gradient_accumulation_steps: K >= 1 [micro-steps per update], or a callable
            that maps the `update_step` variable to an int scalar Tensor. 1 is the
            plain optimizer.
        clip_norm: Largest global norm of the window's mean gradient, > 0; None does not
            clip.
        weight: Scalar, what the micro-batch counts for, e.g. its number of examples or
            tokens; None is 1, inside `microbatch_model_fn` the number of examples.
        var_list: Variables to train; None is all trainable ones.
        global_step: Moves by 1 every micro-step; None is the graph's global step.
        name: Scope of the window's counters. None is "accumulation", for a second train
            op "accumulation_1" and so on.
        reduction: "mean" for a loss that is the mean over the micro-batch; "sum" for
            one that sums over its examples, whose big batch sums over the window's.
        sparse_norm: What `clip_norm` bounds where the gradient of an embedding looked a
            row up twice. "rows": the true norm, of what the row gets in all. "slices":
            that of every look-up by itself, as tf.clip_by_global_norm takes
            `IndexedSlices`; with it, code that clips so keeps its weights.
        on_nonfinite: What becomes of a micro-batch whose gradients or loss are NaN or
            infinite. "raise": the micro-step fails with the variables' names, and
            nothing was accumulated. "skip_micro_batch": it is left out, and the window
            takes another one instead (of several replicas, the others' count alone).
            "skip_window": the window ends without an update. An optimizer with dynamic
            loss scaling skips the window and lowers its scale by itself. Estimator
            stops by itself where `EstimatorSpec.loss` is NaN: to go on, give it
            tf.where(tf.math.is_finite(loss), loss, 0.0).
        accumulator_dtype: Of the accumulators, e.g. tf.float32 for float16 variables;
            None is each variable's own.
        accumulator_device: Where they live, e.g. "/cpu:0"; None is where the variables
            are created.
        noise_scale: Whether to estimate the gradient noise scale (McCandlish et al.
            2018, https://arxiv.org/abs/1812.06162) for hooks to report.
        update_ops: What runs with every micro-step, outside the branch that updates,
            also for a micro-batch that is skipped; None is the graph's `UPDATE_OPS`,
            batch normalization's moving averages.
        after_update_ops: A function that makes, when it is called, what runs once after
            each update, e.g. lambda: [ema.apply(variables)]; an operation made before
            would run with every micro-step.

    Creates:
        `update_step`, `<name>/micro_steps` (int64 scalars), `<name>/weight`,
        `<name>/loss` (scalars), and for each trained variable `<variable>/accumulator`
        of its shape, with `<variable>/accumulator_rows` (float32 [rows]) where the
        gradient is sparse; with clipping `<name>/clipped_updates` (int64 scalar), for
        the noise scale four scalars, for a further train op `<name>/update_step`. All
        are global variables that checkpoints hold. K = 1 makes no accumulator, unless
        several replicas skip micro-batches.

    Returns:
        The train op.

    Raises:
        TypeError: If `optimizer`, K, `clip_norm` or `loss` is of another kind.
        ValueError: If K < 1, `clip_norm` <= 0, `loss` or `weight` is not a scalar, no
            variable gets a gradient, a name is taken, or the context does not fit.
        tf.errors.InvalidArgumentError: From the session, if `on_nonfinite` is "raise".
    """
    rule = checked_rule(
        optimizer=optimizer,
        gradient_accumulation_steps=gradient_accumulation_steps,
        clip_norm=clip_norm,
        weight=weight,
        reduction=reduction,
        sparse_norm=sparse_norm,
        on_nonfinite=on_nonfinite,
        accumulator_dtype=accumulator_dtype,
        accumulator_device=accumulator_device,
        noise_scale=noise_scale,
        update_ops=update_ops,
        after_update_ops=after_update_ops,
        name=name,
    )
    check_replica_context(optimizer)
    loss = check_loss(loss)
    weight, scale = weight_and_scale(weight, rule)
    if var_list is None:
        var_list = tf.compat.v1.trainable_variables()
    var_list = checked_var_list(var_list)
    if not var_list:
        raise ValueError(no_gradient(loss))
    # Weighting the loss costs nothing; but what is float16 would leave its range.
    is_weighted = not is_plain(rule) and not _has_half_precision(loss, optimizer)
    pairs = optimizer.compute_gradients(
        loss * tf.cast(scale, loss.dtype) if is_weighted else loss,
        var_list=var_list,
        **_gating(rule),
    )
    gradients, variables = check_trained(pairs, loss)
    if global_step is None:
        global_step = tf.compat.v1.train.get_or_create_global_step()
    micro_batch = MicroBatch(
        gradients, variables, loss, weight, scale, is_weighted, current_batch()
    )
    return make_micro_step(rule, micro_batch, global_step)


def _gating(rule: Rule) -> dict:
    """How `compute_gradients` is to hold back gradients.

    By default until all of their operation's are there, lest a variable changes before
    the last gradient has read it. That is what a window does by itself, and a third of
    the gradients' graph.
    """
    if rule.gradient_accumulation_steps == 1:
        return {}
    return {"gate_gradients": tf.compat.v1.train.Optimizer.GATE_NONE}


def _has_half_precision(loss: tf.Tensor, optimizer) -> bool:
    """Returns whether the loss, or what it is made of, is or may become float16."""
    if is_loss_scaling(optimizer):  # TensorFlow may rewrite the graph when it runs
        return True
    halves = (tf.float16, tf.bfloat16)
    return any(
        tensor.dtype.base_dtype in halves
        for operation in ancestors([loss.op])
        for tensor in operation.outputs
    )
