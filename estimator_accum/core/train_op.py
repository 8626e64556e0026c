"""`make_accumulating_train_op`: one call from a loss to an accumulating train op."""

from collections.abc import Callable

import tensorflow as tf

from estimator_accum.checks.declared_loss import (
    check_declared_loss,
    check_equal_weights,
)
from estimator_accum.core.arguments import check_loss
from estimator_accum.core.clock import EveryKRuns, clock_of
from estimator_accum.core.current_batch import current_batch
from estimator_accum.core.interception import without_interception
from estimator_accum.core.linear import check_linear
from estimator_accum.core.micro_batch import makes_mean, micro_batch_of, weigh
from estimator_accum.core.options import AccumulationSteps, Options, check_minimize
from estimator_accum.core.replica_context import check_replica_context
from estimator_accum.core.replica_divisor import divisor_of_next_loss
from estimator_accum.core.trained import (
    check_trained,
    checked_var_list,
    no_gradient_message,
)
from estimator_accum.core.v1_optimizers import changes_gradients, is_loss_scaling, takes
from estimator_accum.core.window import make_train_op
from estimator_accum.graph.functions import (
    has_half_precision,
    operations_with_own_gradients,
)
from estimator_accum.graph.walks import ancestors


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
    noise_scale: bool = False,
    update_ops: list[tf.Operation] | None = None,
    after_update_ops: Callable[[], list[tf.Operation]] | None = None,
) -> tf.Operation:
    """Makes a train op: every run is a micro-step, every K-th run an update.

        update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i ) )

    An update gives the weights of training on one batch that joins the window's
    micro-batches. Between boundaries neither variables nor optimizer slots
    change. Call it in a model_fn (under a `tf.distribute` strategy: in replica context)
    instead of `optimizer.minimize(loss, global_step)`. Inside `microbatch_model_fn` the
    batch is the window, for any value of K, and a micro-batch is weighted by its
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
            `IndexedSlices`; code that clips so keeps its weights. An embedding that
            `embedding_lookup_sparse` looks up has one slice a row, so both are the same.
        on_nonfinite: Policy for a micro-batch whose gradients or loss are NaN or
            infinite. "raise": the micro-step fails with the variables' names, and
            nothing is accumulated. "skip_micro_batch": the window takes another
            micro-batch instead (with several replicas, the other replicas' micro-batches
            count alone).
            "skip_window": the window ends without an update. An optimizer with dynamic
            loss scaling skips the window and lowers its scale by itself. Estimator
            stops by itself if `EstimatorSpec.loss` is NaN: to continue, give it
            tf.where(tf.math.is_finite(loss), loss, 0.0).
        accumulator_dtype: Dtype of the accumulators; None keeps each variable's dtype,
            and sums the gradients of float16 and bfloat16 variables in float32.
        noise_scale: Whether to estimate the gradient noise scale (McCandlish et al.
            2018, https://arxiv.org/abs/1812.06162) for hooks to report.
        update_ops: Operations that run with every micro-step, outside the branch that
            updates, also for a micro-batch that is skipped; None takes the graph's
            `UPDATE_OPS`, batch normalization's moving averages.
        after_update_ops: A function that makes the operations to run once after each
            update, e.g. lambda: [ema.apply(variables)], where `update_step` counts this
            update, too; an operation made before the call would run with every
            micro-step.

    Creates:
        `update_step`, `<name>/micro_steps` (int64 scalars), `<name>/weight`,
        `<name>/loss` (scalars), and for each trained variable `<variable>/accumulator`
        of its shape, with `<variable>/accumulator_rows` (float32 [rows]) if the
        gradient is sparse; with `clip_norm` `<name>/clipped_updates` (int64 scalar),
        with "slices" `<name>/slices`, for the noise scale four scalars. A further train
        op has `<name>/update_step`. Checkpoints hold all of them but the sums inside
        `microbatch_model_fn`. K = 1 creates no sums, nor a counter of micro-steps.
        With parameter servers the sums and the counter of micro-steps are local to the
        worker, with `<variable>/copy` for each dense gradient, and in no checkpoint.

    Returns:
        The train op.

    Raises:
        RuntimeError: In eager execution.
        TypeError: If an argument has the wrong type.
        ValueError: If a value is out of range, `loss` or `weight` is not a scalar, no
            variable gets a gradient, a name is taken, or the context does not fit.
        tf.errors.InvalidArgumentError: From the session, if `on_nonfinite` is "raise".
    """
    options = Options.of(locals()).inside(current_batch())
    check_minimize(optimizer)
    clock = clock_of(options)
    check_replica_context(optimizer)
    loss = check_loss(loss)
    weight, scale = weigh(weight, options.reduction)
    if var_list is None:
        var_list = tf.compat.v1.trainable_variables()
    var_list = checked_var_list(var_list)
    if not var_list:
        raise ValueError(no_gradient_message(loss))
    # Weighting the loss is free, but may overflow float16, and a term that an optimizer
    # adds by itself, for weight decay say, counts by the weight too. A gradient that
    # somebody wrote may clip the one that it gets, and under loss scaling TensorFlow may
    # rewrite the graph to half precision when it runs.
    is_own = changes_gradients(optimizer)
    is_weighted = makes_mean(clock) and not (is_own or is_loss_scaling(optimizer))
    is_weighted = is_weighted and _has_usual_gradients(loss)
    # So is undoing its division by the number of replicas, which no sum must contain.
    multiplier = divisor_of_next_loss() if is_weighted and clock.keeps_sums else 1
    factor = scale if multiplier == 1 else scale * multiplier
    # By default each gradient waits until all gradients of its operation are computed,
    # so that no variable changes before the last one has read it. A window ensures that
    # anyway, and the gates would be a third of the gradients' graph.
    gates = {}
    if clock.keeps_sums and takes(optimizer, "gate_gradients"):
        gates["gate_gradients"] = tf.compat.v1.train.Optimizer.GATE_NONE
    with without_interception():
        pairs = optimizer.compute_gradients(
            loss * tf.cast(factor, loss.dtype) if is_weighted else loss,
            var_list=var_list,
            **gates,
        )
    gradients, variables, device = check_trained(pairs, loss)
    if is_own and makes_mean(clock):
        check_linear(gradients, optimizer)
    if isinstance(clock, EveryKRuns):
        check_declared_loss(gradient_accumulation_steps, reduction, loss)
        check_equal_weights(
            gradient_accumulation_steps, loss, reduction, options.weight
        )
    if global_step is None:
        global_step = tf.compat.v1.train.get_or_create_global_step()
    micro_batch = micro_batch_of(
        options,
        clock,
        gradients,
        variables,
        loss,
        weight,
        scale,
        is_weighted,
        multiplier=multiplier,
    )._replace(device=device)
    return make_train_op(options, clock, micro_batch, global_step)


def _has_usual_gradients(loss: tf.Tensor) -> bool:
    """Returns whether neither half precision nor a gradient of a user is behind a loss."""
    operations = ancestors([loss.op])
    return not (
        has_half_precision(operations)
        or operations_with_own_gradients(operations, may_be_linear=False)
    )
