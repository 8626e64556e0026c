"""Options of one accumulating train op, checked once."""

import dataclasses
import math
import numbers
import re
from collections.abc import Callable

import tensorflow as tf

from estimator_accum._kinds import Kind, MicroSteps, Plain, current_batch
from estimator_accum._nonfinite import check_on_nonfinite
from estimator_accum._window import (
    AccumulationSteps,
    check_accumulation_steps,
    window_name,
)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Options of `make_accumulating_train_op` and `AccumulatingOptimizer`.

    Their docstrings explain the options.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option is out of range, or two options exclude each other.
    """

    optimizer: tf.compat.v1.train.Optimizer
    gradient_accumulation_steps: AccumulationSteps
    clip_norm: float | None = None
    weight: tf.Tensor | Callable | None = None
    name: str | None = None
    reduction: str = "mean"
    sparse_norm: str = "rows"
    on_nonfinite: str = "raise"
    accumulator_dtype: tf.DType | None = None
    accumulator_device: str | None = None
    noise_scale: bool = False
    update_ops: list[tf.Operation] | None = None
    after_update_ops: Callable[[], list[tf.Operation]] | None = None

    def __post_init__(self):
        check_accumulation_steps(self.gradient_accumulation_steps)
        _check_optimizer(self.optimizer)
        _check_clip_norm(self.clip_norm)
        _check_reduction(self.reduction, self.weight, self.noise_scale)
        _check_sparse_norm(self.sparse_norm, self.noise_scale)
        check_on_nonfinite(self.on_nonfinite, is_dynamic(self.optimizer))
        _check_accumulator_dtype(self.accumulator_dtype)
        _check_device(self.accumulator_device)
        _check_after_update_ops(self.after_update_ops)
        if self.noise_scale and self.gradient_accumulation_steps == 1:
            _check_window_for_noise_scale()
        window_name(self.name)

    def of_train_op(self) -> tuple["Rule", Kind]:
        """Returns the rule and the kind of window for a train op made here."""
        rule = dataclasses.replace(self, name=window_name(self.name))
        batch = current_batch()
        if batch is not None:
            _check_no_branch()
            if batch.reduction == "sum":
                rule = dataclasses.replace(rule, reduction="sum")
            return rule, batch
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        # Each of several replicas skips its own micro-batches: that takes accumulators.
        skips = replicas > 1 and self.on_nonfinite == "skip_micro_batch"
        if self.gradient_accumulation_steps == 1 and not skips:
            return rule, Plain(replicas)
        return rule, MicroSteps(self.gradient_accumulation_steps)


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


def update_ops_of(rule: Rule) -> list[tf.Operation]:
    """Returns the operations of every micro-step: batch normalization's averages."""
    if rule.update_ops is not None:
        return rule.update_ops
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
