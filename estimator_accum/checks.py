"""What the train op refuses: a function a rule, a sentence an error."""

import inspect
import math
import numbers

import tensorflow as tf

from estimator_accum.batch_window import current_batch
from estimator_accum.gradients import Gradient, are_cpus_of_one_process
from estimator_accum.loss_scaling import innermost, is_dynamic, is_loss_scaling
from estimator_accum.micro_step_plan import Rule
from estimator_accum.nonfinite import check_on_nonfinite
from estimator_accum.window import check_accumulation_steps, window_name

_FOR_EACH_EXAMPLE = (
    "; if the optimizer needs one for each example, for privacy say, call its "
    "compute_gradients, outside of this library, and give what that returns to "
    "AccumulatingOptimizer(optimizer, K).apply_gradients"
)


def checked_rule(
    *,
    optimizer,
    gradient_accumulation_steps,
    clip_norm,
    weight,
    reduction,
    sparse_norm,
    on_nonfinite,
    accumulator_dtype,
    accumulator_device,
    noise_scale,
    update_ops,
    after_update_ops,
    name,
) -> Rule:
    """Returns the arguments of `make_accumulating_train_op` as a rule, or raises."""
    check_accumulation_steps(gradient_accumulation_steps)
    _check_optimizer(optimizer)
    _check_clip_norm(clip_norm)
    if current_batch() is not None:
        _check_no_branch()
        taken = current_batch().take_over(reduction)
        gradient_accumulation_steps, reduction = taken
    _check_reduction(reduction, weight, noise_scale)
    _check_sparse_norm(sparse_norm, noise_scale)
    check_on_nonfinite(on_nonfinite, is_dynamic(optimizer))
    _check_device(accumulator_device)
    _check_after_update_ops(after_update_ops)
    if noise_scale and gradient_accumulation_steps == 1:
        _check_replicas_for_noise_scale()
    return Rule(
        optimizer=optimizer,
        gradient_accumulation_steps=gradient_accumulation_steps,
        clip_norm=clip_norm,
        reduction=reduction,
        sparse_norm=sparse_norm,
        on_nonfinite=on_nonfinite,
        accumulator_dtype=_checked_accumulator_dtype(accumulator_dtype),
        accumulator_device=accumulator_device,
        noise_scale=bool(noise_scale),
        update_ops=update_ops,
        after_update_ops=after_update_ops,
        name=window_name(name),
    )


def _check_no_branch() -> None:
    graph = tf.compat.v1.get_default_graph()
    if graph.building_function or graph._get_control_flow_context() is not None:
        raise ValueError(
            "Inside `microbatch_model_fn` a train op must not be made inside a tf.cond: "
            "its parts run at different times. Received: a branch, such as those of "
            "loss scaling. Put the loss-scaling optimizer inside AccumulatingOptimizer."
        )


def _check_optimizer(optimizer) -> None:
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise TypeError(
            "`optimizer` must be a tf.compat.v1.train.Optimizer. Received: "
            f"{optimizer!r}. Keras optimizers have no place in a v1 train op."
        )
    if isinstance(optimizer, tf.compat.v1.train.SyncReplicasOptimizer):
        raise TypeError(
            "`optimizer` must not be a SyncReplicasOptimizer, which accumulates over "
            f"workers by itself. Received: {optimizer!r}. Use a tf.distribute strategy."
        )
    if hasattr(innermost(optimizer), "gradient_accumulation_steps"):
        raise TypeError(
            "`optimizer` must not accumulate already. Received: "
            f"{type(innermost(optimizer)).__name__}. Pass the optimizer inside of it."
        )


def _check_clip_norm(clip_norm) -> None:
    if clip_norm is None:
        return
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, numbers.Real):
        raise TypeError(
            "`clip_norm` must be a number > 0 or None. "
            f"Received: {clip_norm!r}. Use None to turn clipping off."
        )
    if not 0 < clip_norm < math.inf:
        raise ValueError(
            "`clip_norm` must be a finite number > 0 or None. "
            f"Received: {clip_norm}. Use None to turn clipping off."
        )


def _check_reduction(reduction, weight, noise_scale) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(
            "`reduction` must be one of 'mean' and 'sum'. "
            f"Received: {reduction!r}. Use 'mean' unless the loss sums over examples."
        )
    if reduction == "sum" and (weight is not None or noise_scale):
        raise ValueError(
            "`reduction='sum'` adds gradients as they are, so it takes neither `weight` "
            "nor `noise_scale`. Received: one of them. Make the loss a mean."
        )


def _check_sparse_norm(sparse_norm, noise_scale) -> None:
    if sparse_norm not in ("rows", "slices"):
        raise ValueError(
            "`sparse_norm` must be one of 'rows' and 'slices'. "
            f"Received: {sparse_norm!r}. Use 'slices' to clip as "
            "tf.clip_by_global_norm does."
        )
    if sparse_norm == "slices" and noise_scale:
        raise ValueError(
            "`noise_scale` is made of true norms, so `sparse_norm` must be 'rows'. "
            "Received: 'slices'. Leave one of them out."
        )


def _checked_accumulator_dtype(dtype) -> tf.DType | None:
    if dtype is None:
        return None
    try:
        known = tf.as_dtype(dtype)
    except TypeError:
        known = None
    if known is None or not known.is_floating:
        raise ValueError(
            "`accumulator_dtype` must be a floating-point dtype or None. "
            f"Received: {dtype!r}. Use tf.float32 for float16 variables."
        )
    return known


def _check_device(device) -> None:
    try:
        tf.DeviceSpec.from_string("" if device is None else device)
    except (AttributeError, ValueError) as error:
        raise ValueError(
            "`accumulator_device` must be the name of a device or None. "
            f"Received: {device!r}. Use '/cpu:0' to spare the accelerator's memory."
        ) from error


def _check_after_update_ops(make) -> None:
    if make is not None and not callable(make):
        raise TypeError(
            "`after_update_ops` must be a function that makes operations, or None. "
            f"Received: {make!r}, which exists already and would run with every "
            "micro-step. Pass a function, e.g. lambda: [ema.apply(variables)]."
        )


def _check_replicas_for_noise_scale() -> None:
    replica = tf.distribute.get_replica_context()
    if replica is not None and replica.num_replicas_in_sync == 1:
        raise ValueError(
            "`noise_scale` compares the micro-batches of a window, so there must be "
            "two. Received: gradient_accumulation_steps=1 on one replica. Accumulate, "
            "or leave `noise_scale` out."
        )


def check_graph() -> None:
    """Raises under eager execution, and in what is traced for it."""
    with tf.init_scope():
        is_outside_eager = tf.executing_eagerly()
    if is_outside_eager:
        received = "eager execution" if tf.executing_eagerly() else "a tf.function"
        raise RuntimeError(
            f"An accumulating train op needs a graph. Received: {received}. Call it in a "
            "model_fn, or inside tf.Graph().as_default(); for Keras there is "
            "estimator_accum.keras.accumulate()."
        )


def check_loss(loss) -> tf.Tensor:
    """Returns the loss as a Tensor, or raises unless it is a floating-point scalar."""
    check_graph()
    loss = check_scalar("loss", loss, _FOR_EACH_EXAMPLE)
    if not loss.dtype.is_floating:
        raise TypeError(
            "`loss` must be a floating-point scalar. Received: dtype "
            f"{loss.dtype.name}. Cast what it is computed from."
        )
    return loss


def check_scalar(argument: str, value, more: str = "") -> tf.Tensor:
    """Returns `value` as a Tensor, or raises unless it is a scalar number."""
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{argument}` must be a scalar Tensor. Received: {value!r}. Pass one."
        ) from error
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        raise TypeError(
            f"`{argument}` must be a number. Received: {value!r}, of dtype "
            f"{tensor.dtype.name}. Pass a scalar Tensor of numbers."
        )
    if tensor.shape.rank != 0:
        raise ValueError(
            f"`{argument}` must be a scalar. Received: shape {tensor.shape} from "
            f"{tensor.name}. Reduce it, e.g. with tf.reduce_mean{more}."
        )
    return tensor


def check_weight(weight) -> tf.Tensor:
    """Returns a micro-batch's weight as a Tensor that no gradient goes through.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is no scalar; if its value is known, and negative, or in a
            graph, where every micro-batch would have it, 0.
        tf.errors.InvalidArgumentError: From the session, if it is negative.
    """
    weight = tf.stop_gradient(check_scalar("weight", weight))
    known = tf.get_static_value(weight)
    if known is None:
        is_negative = weight < tf.zeros([], weight.dtype)  # NaN is for `on_nonfinite`
        words = "`weight` must be >= 0, 0 for a micro-batch that does not count."
        refused = tf.raw_ops.Assert(
            condition=tf.logical_not(is_negative), data=[f"{words} Received:", weight]
        )
        with tf.control_dependencies([refused]):
            return tf.identity(weight)
    if known > 0 or (known == 0 and tf.executing_eagerly()):
        return weight
    raise ValueError(
        "`weight` must be > 0; 0 is for a single micro-batch that is not to count. "
        f"Received: {known} for every micro-batch. Pass the number of its examples or "
        "tokens, or leave `weight` out."
    )


def weight_and_scale(weight, rule: Rule) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns what a micro-batch counts for, and the factor of its loss and gradients.

    Args:
        weight: As the caller gave it; None where nobody says.
        rule: What the micro-batch is for.
    """
    batch = current_batch()
    if weight is not None:
        weight = check_weight(weight)
    elif batch is None:
        weight = tf.constant(1.0)
    else:
        weight = batch.default_weight(rule.reduction)
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    return weight, weight if batch is None or replicas > 1 else batch.scale(weight)


def check_replica_context(optimizer) -> None:
    """Raises where no micro-step can be made, for this optimizer or at all."""
    if tf.distribute.get_replica_context() is None:
        raise ValueError(
            "An accumulating train op must be made in replica context. Received: "
            "cross-replica context. Call it inside a model_fn or inside strategy.run."
        )
    if not tf.distribute.has_strategy():
        return
    if is_loss_scaling(optimizer):
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
    """Raises where a loss-scaling optimizer, which reduces by itself, may hang."""
    reduces_by = type(getattr(strategy.extended, "_cross_device_ops", None)).__name__
    if are_cpus_of_one_process(strategy) and reduces_by == "CollectiveAllReduce":
        raise ValueError(
            "On several CPUs of one process a loss-scaling optimizer must not reduce "
            "by collectives, which wait for ever in a Session with one CPU device. "
            f"Received: {type(strategy).__name__} with {reduces_by}. Pass it "
            "cross_device_ops=tf.distribute.ReductionToOneDevice()."
        )


def checked_var_list(var_list) -> list[tf.Variable]:
    """Returns the variables of any structure, or raises unless all are variables."""
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
    """Returns (gradients, their variables) without those that have no gradient.

    Raises:
        ValueError: If none has, or a variable is one that no `tf.cond` can hold, or one
            that replicas or workers share.
    """
    pairs = [
        (gradient, variable) for gradient, variable in pairs if gradient is not None
    ]
    if not pairs:
        raise ValueError(no_gradient(loss))
    gradients, variables = map(list, zip(*pairs, strict=True))
    _check_resource_variables(variables)
    check_own_copies(variables)
    _check_own_job(variables)
    for variable in variables:
        if not variable.shape.is_fully_defined():
            raise ValueError(
                "Trained variables must have a static shape. Received: "
                f"{variable.name} of shape {variable.shape}. Make it with its shape."
            )
    return gradients, variables


def no_gradient(loss: tf.Tensor | None) -> str:
    """What is wrong where there is nothing to train."""
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


def check_own_copies(variables: list[tf.Variable]) -> None:
    """Raises where each of several replicas would apply the window to one variable."""
    if not tf.distribute.has_strategy():
        return
    strategy = tf.distribute.get_strategy()
    replicas = len(strategy.extended.worker_devices)
    for variable in variables:
        copies = len(strategy.experimental_local_results(variable))
        if copies != replicas:
            raise ValueError(
                "Every replica must have a copy of its own of each trained variable. "
                f"Received: {variable.name} with {copies} for {replicas} replicas of a "
                f"{type(strategy).__name__}. Create it in the strategy's scope, and use "
                "a MirroredStrategy or one replica."
            )


def _check_own_job(variables: list[tf.Variable]) -> None:
    """Raises where variables are on parameter servers, which all workers write to."""
    with tf.control_dependencies(None):
        here = tf.DeviceSpec.from_string(tf.no_op("where_gradients_are").device)
    for variable in variables:
        there = tf.DeviceSpec.from_string(variable.device)
        if there.job and here.job and there.job != here.job:
            raise ValueError(
                "Trained variables must be of the task that trains: workers would add "
                f"to the same accumulators. Received: {variable.name} on "
                f"/job:{there.job}, gradients on /job:{here.job}. Train on one worker "
                "without parameter servers, or under a MultiWorkerMirroredStrategy."
            )
