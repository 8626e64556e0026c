"""`make_accumulating_train_op`: one call from a loss to an accumulating train op.

Its parts also serve `AccumulatingOptimizer`: weights, the micro-batch that a replica
adds, and checks of what v1 optimizers train and where.
"""

import inspect
from collections.abc import Callable

import tensorflow as tf

from estimator_accum._change import Change
from estimator_accum._declared import check_declared_loss
from estimator_accum._gradients import (
    Gradient,
    are_cpus_of_one_process,
    half_squared_norms,
    loss_divisor_of,
    without_interception,
)
from estimator_accum._graph import ancestors
from estimator_accum._options import (
    AccumulationSteps,
    Clock,
    Options,
    always_reduces,
    check_loss,
    check_own_copies,
    check_own_job,
    check_weight,
    clock_of,
    current_batch,
    is_loss_scaling,
)
from estimator_accum._window import MicroBatch, make_train_op


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
    options = Options(
        optimizer=optimizer,
        gradient_accumulation_steps=gradient_accumulation_steps,
        clip_norm=clip_norm,
        weight=weight,
        name=name,
        reduction=reduction,
        sparse_norm=sparse_norm,
        on_nonfinite=on_nonfinite,
        accumulator_dtype=accumulator_dtype,
        noise_scale=noise_scale,
        update_ops=update_ops,
        after_update_ops=after_update_ops,
    )
    options = options.checked().inside(current_batch())
    clock = clock_of(options)
    check_replica_context(optimizer)
    loss = check_loss(loss)
    weight, scale = weigh(weight, options.reduction)
    if var_list is None:
        var_list = tf.compat.v1.trainable_variables()
    var_list = _checked_var_list(var_list)
    if not var_list:
        raise ValueError(_no_gradient(loss))
    # Weighting the loss is free, but may overflow float16.
    is_weighted = makes_mean(clock) and not _has_half_precision(loss, optimizer)
    # By default each gradient waits until all gradients of its operation are computed,
    # so that no variable changes before the last one has read it. A window ensures that
    # anyway, and the gates would be a third of the gradients' graph.
    gate_none = {"gate_gradients": tf.compat.v1.train.Optimizer.GATE_NONE}
    with without_interception():
        pairs = optimizer.compute_gradients(
            loss * tf.cast(scale, loss.dtype) if is_weighted else loss,
            var_list=var_list,
            **(gate_none if clock.keeps_sums else {}),
        )
    gradients, variables = check_trained(pairs, loss)
    check_declared_loss(options, clock, loss)
    if global_step is None:
        global_step = tf.compat.v1.train.get_or_create_global_step()
    micro_batch = micro_batch_of(
        options, gradients, variables, loss, weight, scale, is_weighted
    )
    return make_train_op(options, clock, micro_batch, global_step)


def makes_mean(clock: Clock) -> bool:
    """Returns whether a window may be more than one micro-batch of one replica."""
    return clock.keeps_sums or tf.distribute.get_strategy().num_replicas_in_sync > 1


def _has_half_precision(loss: tf.Tensor, optimizer) -> bool:
    """Returns whether the loss or its ancestors are, or may become, half precision."""
    if is_loss_scaling(optimizer):  # TensorFlow may rewrite the graph when it runs
        return True
    halves = (tf.float16, tf.bfloat16)
    return any(
        tensor.dtype.base_dtype in halves
        for operation in ancestors([loss.op])
        for tensor in operation.outputs
    )


def weigh(weight: tf.Tensor | None, reduction: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a micro-batch's weight, and the factor of its loss and gradients.

    Args:
        weight: Scalar, as the caller gave it; None if not given.
        reduction: "mean" or "sum".
    """
    if weight is not None:
        weight = check_weight(weight)
    batch = current_batch()
    if batch is not None:
        return batch.weigh(weight, reduction)
    weight = tf.constant(1.0) if weight is None else weight
    return weight, weight


def micro_batch_of(
    options: Options,
    gradients: list[Gradient],
    variables: list[tf.Variable],
    loss: tf.Tensor | None,
    weight: tf.Tensor,
    scale: tf.Tensor,
    is_weighted: bool,
    change: Change | None = None,
) -> MicroBatch:
    """Returns what a replica adds to its sums.

    Args:
        options: The caller's options.
        gradients: The replica's gradients.
        variables: Their variables.
        loss: Scalar mean over the micro-batch; None if unknown.
        weight: Scalar, the micro-batch's weight.
        scale: Scalar by which loss and gradients are multiplied: `weight`, or 1 if the
            micro-batch is the whole window and so its own mean.
        is_weighted: Whether `gradients` are already those of scale * loss.
        change: Code between these gradients and the optimizer; None if there is none.
    """
    divisor = loss_divisor_of(gradients)
    is_wide = any(gradient.dtype == tf.float64 for gradient in gradients)
    dtype = tf.float64 if is_wide else tf.float32  # norms need float32 or wider
    sums = {"weight": tf.cast(weight, dtype)}
    factor = sums["weight"] if scale is weight else tf.cast(scale, dtype)
    if scale is not weight:
        sums["scale"] = factor
    if loss is not None:
        sums["loss"] = factor * tf.cast(loss, dtype)
    if options.noise_scale:
        sums |= _squares(gradients, sums["weight"], is_weighted, divisor)
    square = tf.constant(1.0, dtype) if is_weighted else tf.square(factor)
    if options.sparse_norm == "slices":
        sparse = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
        sums["slices"] = tf.reduce_sum(_of_slices(sparse, square))
    if change is not None and change.with_norm:
        halves = tf.unstack(_of_slices(change.with_norm, square))
        sums |= {f"slices_{i}": half for i, half in enumerate(halves)}
    return MicroBatch(
        gradients=gradients,
        variables=variables,
        loss=loss,
        scale=None if is_weighted else scale,
        sums=sums,
        divisor=divisor,
        change=change,
    )


def _squares(
    gradients: list[Gradient], weight: tf.Tensor, is_weighted: bool, divisor: float
) -> dict[str, tf.Tensor]:
    """Returns the sums of the noise scale: w * |g|^2, and a count."""
    halves = tf.reduce_sum(half_squared_norms(gradients, weight.dtype))
    squares = 2.0 * halves * tf.constant(divisor**2, weight.dtype)
    weigh = tf.math.divide_no_nan if is_weighted else tf.multiply
    # A micro-batch of weight 0, where all is masked, is not a sample of the noise.
    count = tf.cast(weight > 0, weight.dtype)
    return {"squares": weigh(squares, weight), "count": count}


def _of_slices(gradients: list[tf.IndexedSlices], square: tf.Tensor) -> tf.Tensor:
    """Returns `square` * half the squared norm of each one's slices, [gradients].

    Sums in rows lose these norms.
    """
    if not gradients:
        return tf.zeros([0], square.dtype)
    return square * half_squared_norms(gradients, square.dtype, has_unique_rows=True)


def check_replica_context(optimizer) -> None:
    """Raises ValueError if no micro-step can be made here with this optimizer."""
    if tf.distribute.get_replica_context() is None:
        raise ValueError(
            "An accumulating train op must be made in replica context. Received: "
            "cross-replica context. Call it inside a model_fn or inside strategy.run."
        )
    if not tf.distribute.has_strategy():
        return
    if always_reduces(optimizer):
        _check_no_collectives(tf.distribute.get_strategy())
        return
    parameters = inspect.signature(optimizer.apply_gradients).parameters
    if "skip_gradients_aggregation" not in parameters:
        raise ValueError(
            "Under a tf.distribute strategy `optimizer.apply_gradients` must take "
            "`skip_gradients_aggregation`, so that gradients are reduced once. "
            f"Received: {type(optimizer).__name__}, which overrides it without. "
            "Implement _resource_apply_dense and _resource_apply_sparse instead."
        )


def _check_no_collectives(strategy) -> None:
    """Raises ValueError if an optimizer that reduces gradients itself may hang."""
    reduces_by = type(getattr(strategy.extended, "_cross_device_ops", None)).__name__
    if are_cpus_of_one_process(strategy) and reduces_by == "CollectiveAllReduce":
        raise ValueError(
            "On several CPUs of one process a loss-scaling optimizer, and before "
            "TensorFlow 2.13 any, must not reduce by collectives, which wait for ever in a "
            "Session with one CPU device. "
            f"Received: {type(strategy).__name__} with {reduces_by}. Pass it "
            "cross_device_ops=tf.distribute.ReductionToOneDevice()."
        )


def _checked_var_list(var_list) -> list[tf.Variable]:
    """Returns the variables in any structure; raises TypeError for anything else."""
    variables = tf.nest.flatten(var_list)
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise TypeError(
                "`var_list` must hold variables. Received: "
                f"{variable!r}. Pass those to train, or None for all trainable ones."
            )
    return variables


def check_trained(
    pairs, loss: tf.Tensor | None
) -> tuple[list[Gradient], list[tf.Variable]]:
    """Returns (gradients, their variables), without variables that have no gradient.

    Raises:
        ValueError: If no variable has a gradient, or one cannot be updated in a
            `tf.cond`, is shared by replicas or workers, or has no static shape.
    """
    pairs = [
        (gradient, variable) for gradient, variable in pairs if gradient is not None
    ]
    if not pairs:
        raise ValueError(_no_gradient(loss))
    gradients, variables = map(list, zip(*pairs, strict=True))
    _check_resource_variables(variables)
    check_own_copies(variables)
    check_own_job(variables)
    for variable in variables:
        if not variable.shape.is_fully_defined():
            raise ValueError(
                "Trained variables must have a static shape. Received: "
                f"{variable.name} of shape {variable.shape}. Make it with its shape."
            )
    return gradients, variables


def _no_gradient(loss: tf.Tensor | None) -> str:
    """Returns the error message for a loss without trained variables."""
    return (
        "`loss` must depend on a trained variable. Received: "
        f"{'gradients' if loss is None else loss.name}, of which no variable has a "
        "gradient. Check `var_list` and that nothing between the variables and the "
        "loss stops gradients."
    )


def _check_resource_variables(variables: list[tf.Variable]) -> None:
    if not tf.compat.v1.control_flow_v2_enabled():
        return
    for variable in variables:
        if not hasattr(variable, "handle"):
            raise ValueError(
                "Trained variables must be resource variables. Received: reference "
                f"variable {variable.name}. Make it with use_resource=True, or call "
                "tf.compat.v1.disable_v2_behavior() first."
            )
