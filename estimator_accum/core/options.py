"""Options of an accumulating train op, checked once.

One function per rule, one sentence per error: rule, received, remedy.
"""

import dataclasses
import math
import numbers
import re
from collections.abc import Callable

import tensorflow as tf

from estimator_accum.core.arguments import check_count
from estimator_accum.core.current_batch import current_batch
from estimator_accum.core.v1_optimizers import innermost, is_dynamic, overrides_minimize
from estimator_accum.graph.branches import is_in_branch

AccumulationSteps = int | Callable[[tf.Variable], tf.Tensor]
_SCOPE_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


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

    @classmethod
    def of(cls, arguments: dict) -> "Options":
        """Returns the options among a call's arguments, by name; see `checked`."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: arguments[name] for name in names}).checked()

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

    def inside(self, batch) -> "Options":
        """Returns the options of a train op that is made here.

        Args:
            batch: The `WholeBatch` that is the window; None outside
                `microbatch_model_fn`.
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
    remedy = "Use 1 to turn accumulation off."
    if not isinstance(steps, numbers.Number):  # such as global_step or an optimizer
        remedy = "Pass a number of Python here, and other arguments by their names."
    others = " or a callable of the update step"
    check_count("gradient_accumulation_steps", steps, remedy, others)


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
        remedy = "For Keras optimizers there is estimator_accum.keras.accumulate."
        if isinstance(optimizer, str | type):
            remedy = "Make one, such as tf.compat.v1.train.AdamOptimizer(1e-3)."
        elif tf.is_tensor(optimizer):
            remedy = "It is a Tensor: are the loss and the optimizer swapped?"
        raise TypeError(
            "`optimizer` must be a tf.compat.v1.train.Optimizer. Received: "
            f"{optimizer!r}. {remedy}"
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


def check_minimize(optimizer) -> None:
    """Raises TypeError if a train op would leave out changes that `minimize` makes."""
    if overrides_minimize(optimizer):
        raise TypeError(
            "`optimizer` must not override minimize(), which would not be called. "
            f"Received: {type(innermost(optimizer)).__name__}. Override "
            "compute_gradients() or apply_gradients(), or call these two of an "
            "AccumulatingOptimizer."
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


def check_batch_norm(batch_norm) -> None:
    """Raises ValueError unless `batch_norm` is one of the two."""
    if batch_norm not in ("batch", "micro_batch"):
        raise ValueError(
            "`batch_norm` must be one of 'batch' and 'micro_batch'. Received: "
            f"{batch_norm!r}. Use 'batch' for the numbers of the unsplit batch."
        )


def _check_reduction(reduction, weight, noise_scale) -> None:
    check_reduction(reduction)
    if reduction == "sum" and (weight is not None or noise_scale):
        raise ValueError(
            "`reduction='sum'` adds gradients as they are, so it takes neither `weight` "
            "nor `noise_scale`. Received: "
            f"{'`weight`' if weight is not None else '`noise_scale=True`'}. Make the loss a "
            "mean."
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
            "has to see NaN and infinity. Received: an optimizer with a "
            "DynamicLossScale. Leave `on_nonfinite` out: it skips the window itself."
        )


def _check_accumulator_dtype(dtype) -> None:
    if dtype is None:
        return
    try:
        kind = tf.as_dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or not kind.is_floating:
        raise ValueError(
            "`accumulator_dtype` must be a floating-point dtype or None. "
            f"Received: {dtype!r}. Use None to sum in float32 or more."
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
