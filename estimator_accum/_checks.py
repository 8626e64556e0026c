"""Checks of a train op's arguments: one function per rule, one sentence per error."""

import inspect

import tensorflow as tf

from estimator_accum._gradients import Gradient, are_cpus_of_one_process
from estimator_accum._graph import ancestors
from estimator_accum._rule import is_loss_scaling

_FOR_EACH_EXAMPLE = (
    "; an optimizer that takes one for each example, for privacy say, trains by "
    "AccumulatingOptimizer(optimizer, K).minimize(losses)"
)


def check_graph() -> None:
    """Raises RuntimeError in eager execution and in functions traced for it."""
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
    """Returns a micro-batch's weight as a Tensor that stops gradients.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is not a scalar, or a constant that is negative. Also if it is
            a constant 0 in a graph, where every micro-batch would have that weight.
        tf.errors.InvalidArgumentError: From the session, if it is negative.
    """
    weight = tf.stop_gradient(check_scalar("weight", weight))
    known = tf.get_static_value(weight)
    if known is None:
        is_allowed = weight >= tf.zeros([], weight.dtype)
        if weight.dtype.is_floating:
            # NaN is for `on_nonfinite`. TensorFlow's optimizer of graphs makes
            # `not (weight < 0)` to `weight >= 0`, which is False for it.
            is_allowed = tf.logical_or(is_allowed, tf.math.is_nan(weight))
        words = "`weight` must be >= 0, 0 for a micro-batch that does not count."
        refused = tf.raw_ops.Assert(
            condition=is_allowed, data=[f"{words} Received:", weight]
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


def check_replica_context(optimizer) -> None:
    """Raises ValueError if no micro-step can be made here with this optimizer."""
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
    """Raises ValueError if a loss-scaling optimizer, which reduces itself, may hang."""
    reduces_by = type(getattr(strategy.extended, "_cross_device_ops", None)).__name__
    if are_cpus_of_one_process(strategy) and reduces_by == "CollectiveAllReduce":
        raise ValueError(
            "On several CPUs of one process a loss-scaling optimizer must not reduce "
            "by collectives, which wait for ever in a Session with one CPU device. "
            f"Received: {type(strategy).__name__} with {reduces_by}. Pass it "
            "cross_device_ops=tf.distribute.ReductionToOneDevice()."
        )


def checked_var_list(var_list) -> list[tf.Variable]:
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
        raise ValueError(no_gradient(loss))
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


def no_gradient(loss: tf.Tensor | None) -> str:
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


def check_own_copies(variables: list[tf.Variable]) -> None:
    """Raises ValueError if several replicas would update the same variable."""
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


def check_own_job(variables: list[tf.Variable]) -> None:
    """Raises ValueError for variables on parameter servers, which workers share."""
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


def has_half_precision(loss: tf.Tensor, optimizer) -> bool:
    """Returns whether the loss or its ancestors are, or may become, half precision."""
    if is_loss_scaling(optimizer):  # TensorFlow may rewrite the graph when it runs
        return True
    halves = (tf.float16, tf.bfloat16)
    return any(
        tensor.dtype.base_dtype in halves
        for operation in ancestors([loss.op])
        for tensor in operation.outputs
    )
