"""Options of an accumulating train op, and all that its caller gives, checked once.

One function per rule, one sentence per error: rule, received, remedy.
"""

import dataclasses
import inspect
import math
import numbers
import re
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from estimator_accum._clock import AccumulationSteps, Clock, current_batch
from estimator_accum._gradients import Gradient, are_cpus_of_one_process
from estimator_accum._graph import ancestors, is_in_branch

_SCOPE_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
_FOR_EACH_EXAMPLE = (
    "; an optimizer that takes one for each example, for privacy say, trains by "
    "AccumulatingOptimizer(optimizer, K).minimize(losses)"
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `make_accumulating_train_op` and `AccumulatingOptimizer`.

    Their docstrings explain the options.
    """

    optimizer: tf.compat.v1.train.Optimizer
    gradient_accumulation_steps: AccumulationSteps
    clip_norm: float | None = None
    weight: tf.Tensor | Callable | None = None
    name: str | None = None
    reduction: str = "mean"
    sparse_norm: str = "rows"
    on_nonfinite: str | None = "raise"
    accumulator_dtype: tf.DType | None = None
    noise_scale: bool = False
    update_ops: list[tf.Operation] | None = None
    after_update_ops: Callable[[], list[tf.Operation]] | None = None

    def checked(self) -> "Options":
        """Returns these options.

        Raises:
            TypeError: If an option has the wrong type.
            ValueError: If an option is out of range, or two options exclude each other.
        """
        check_accumulation_steps(self.gradient_accumulation_steps)
        _check_optimizer(self.optimizer)
        _check_clip_norm(self.clip_norm)
        _check_reduction(self.reduction, self.weight, self.noise_scale)
        _check_sparse_norm(self.sparse_norm, self.noise_scale)
        check_on_nonfinite(self.on_nonfinite, is_dynamic(self.optimizer))
        _check_accumulator_dtype(self.accumulator_dtype)
        _check_after_update_ops(self.after_update_ops)
        if self.noise_scale and self.gradient_accumulation_steps == 1:
            _check_window_for_noise_scale()
        _check_name(self.name)
        return self

    def named(self, name: str) -> "Options":
        """Returns the options of the train op whose variables have the scope `name`."""
        return dataclasses.replace(self, name=name)

    def inside(self, batch: Clock | None) -> "Options":
        """Returns the options of a train op that is made here.

        Args:
            batch: The batch that is the window; None outside `microbatch_model_fn`.
        """
        if batch is None:
            return self
        _check_no_branch()
        if batch.reduction != "sum":
            return self
        return dataclasses.replace(self, reduction="sum").checked()

    @property
    def policy(self) -> str | None:
        """`on_nonfinite`; None leaves NaN and infinity to the optimizer."""
        return None if is_dynamic(self.optimizer) else self.on_nonfinite


def check_accumulation_steps(steps: AccumulationSteps) -> None:
    """Raises TypeError or ValueError unless `steps` is an int >= 1 or a callable."""
    if callable(steps):
        return
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer):
        raise TypeError(
            "`gradient_accumulation_steps` must be an integer >= 1 or a callable of "
            f"the update step. Received: {steps!r}. Use 1 to turn accumulation off."
        )
    if steps < 1:
        raise ValueError(
            "`gradient_accumulation_steps` must be an integer >= 1. "
            f"Received: {steps}. Use 1 to turn accumulation off."
        )


def _check_name(name) -> None:
    if name is None or (isinstance(name, str) and _SCOPE_NAME.fullmatch(name)):
        return
    raise ValueError(
        "`name` must be a TensorFlow scope: letters, digits and any of ._-/\\>, the "
        f"first a letter, a digit or a dot. Received: {name!r}. Pass another `name`."
    )


def _check_no_branch() -> None:
    if is_in_branch():
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


def check_reduction(reduction) -> None:
    """Raises ValueError unless `reduction` is one of the two."""
    if reduction not in ("mean", "sum"):
        raise ValueError(
            "`reduction` must be one of 'mean' and 'sum'. "
            f"Received: {reduction!r}. Use 'mean' unless the loss sums over examples."
        )


def _check_reduction(reduction, weight, noise_scale) -> None:
    check_reduction(reduction)
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


def check_on_nonfinite(on_nonfinite: str, is_loss_scale_dynamic: bool) -> None:
    """Raises ValueError unless `on_nonfinite` is a policy that the optimizer allows."""
    if on_nonfinite not in ("raise", "skip_micro_batch", "skip_window"):
        raise ValueError(
            "`on_nonfinite` must be one of 'raise', 'skip_micro_batch' and "
            f"'skip_window'. Received: {on_nonfinite!r}. Use 'raise' to find the cause."
        )
    if on_nonfinite == "skip_micro_batch" and is_loss_scale_dynamic:
        raise ValueError(
            "`on_nonfinite` cannot be 'skip_micro_batch' where dynamic loss scaling "
            "has to see what is not finite. Received: an optimizer with a "
            "DynamicLossScale. Leave `on_nonfinite` out: it skips the window itself."
        )


def _check_accumulator_dtype(dtype) -> None:
    if dtype is None:
        return
    try:
        known = tf.as_dtype(dtype)
    except TypeError:
        known = None
    if known is None or not known.is_floating:
        raise ValueError(
            "`accumulator_dtype` must be a floating-point dtype or None. "
            f"Received: {dtype!r}. Use tf.float32 for float16 variables."
        )


def _check_after_update_ops(make) -> None:
    if make is not None and not callable(make):
        raise TypeError(
            "`after_update_ops` must be a function that makes operations, or None. "
            f"Received: {make!r}, which exists already and would run with every "
            "micro-step. Pass a function, e.g. lambda: [ema.apply(variables)]."
        )


def _check_window_for_noise_scale() -> None:
    if current_batch() is not None:
        return
    replica = tf.distribute.get_replica_context()
    if replica is not None and replica.num_replicas_in_sync == 1:
        raise ValueError(
            "`noise_scale` compares the micro-batches of a window, so there must be "
            "two. Received: gradient_accumulation_steps=1 on one replica. Accumulate, "
            "or leave `noise_scale` out."
        )


def is_loss_scaling(optimizer: tf.compat.v1.train.Optimizer) -> bool:
    """Returns whether `optimizer` scales the loss and unscales the gradients."""
    return isinstance(
        optimizer, tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer
    )


def always_reduces(optimizer: tf.compat.v1.train.Optimizer) -> bool:
    """Returns whether `apply_gradients` sums over replicas, whatever it is told."""
    usual = inspect.signature(tf.compat.v1.train.Optimizer.apply_gradients).parameters
    return is_loss_scaling(optimizer) or "skip_gradients_aggregation" not in usual


def is_dynamic(optimizer: tf.compat.v1.train.Optimizer) -> bool:
    """Returns whether `optimizer` handles gradients that are not finite by itself."""
    return is_loss_scaling(optimizer) and isinstance(
        optimizer._loss_scale, tf.compat.v1.mixed_precision.DynamicLossScale
    )


def innermost(
    optimizer: tf.compat.v1.train.Optimizer,
) -> tf.compat.v1.train.Optimizer:
    """Returns the optimizer that has the slots."""
    return innermost(optimizer._optimizer) if is_loss_scaling(optimizer) else optimizer


def update_ops_of(options: Options) -> list[tf.Operation]:
    """Returns the operations of every micro-step: batch normalization's averages."""
    if options.update_ops is not None:
        return options.update_ops
    graph = tf.compat.v1.get_default_graph()
    if graph.building_function:
        return []  # inside a caller's tf.cond; they belong outside
    updates = graph.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return updates
    # The replicas of a process share the collection, and each has its own micro-batch.
    own = _replica_of(f"{graph.get_name_scope()}/")
    return [update for update in updates if _replica_of(update.name) == own]


def _replica_of(name: str) -> str | None:
    """Returns the number of the replica that has made an operation; None: the first."""
    found = re.search(r"(?:^|/)replica_(\d+)/", name)
    return found and found[1]


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
