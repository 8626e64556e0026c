"""Options of an accumulating train op, checked once, and clocks: when a window closes.

One function per rule, one sentence per error: rule, received, remedy. Three clocks say
when a window closes:

    EveryRun      every run of the train op is a window
    EveryKRuns    K runs of the train op are one, counted by a variable
    WholeBatch    a batch of `microbatch_model_fn` is one: a hook runs its micro-batches
                  one after the other, then the train op; placeholders give the position

A clock counts, and knows neither a window's sums nor the options. `WholeBatch` is in
estimator_accum/microbatch/_batch.py.
"""

import contextlib
import dataclasses
import inspect
import math
import numbers
import re
import threading
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from estimator_accum._graph import add_to, is_in_branch, set_to

AccumulationSteps = int | Callable[[tf.Variable], tf.Tensor]

_SCOPE_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
_FOR_EACH_EXAMPLE = (
    "; an optimizer that takes one for each example, for privacy say, trains by "
    "AccumulatingOptimizer(optimizer, K).minimize(losses)"
)
_current = threading.local()  # replicas build their graphs in threads of their own


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

    def inside(self, batch: "Clock | None") -> "Options":
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
            f"{optimizer!r}. For Keras optimizers there is estimator_accum.keras.accumulate."
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


class Clock:
    """Defaults of all clocks."""

    keeps_sums = True  # a window may have several micro-batches
    has_counter = False  # a variable counts micro-steps

    def steps(self, update_step: tf.Variable) -> tf.Tensor:
        """Returns K of the open window, an int64 scalar [micro-steps per update]."""
        raise NotImplementedError

    def opens_window(self, counter: tf.Variable | None) -> tf.Tensor:
        """Returns whether this micro-step is the window's first, a scalar bool."""
        raise NotImplementedError

    def hand_over(self, counted: tf.Tensor, accumulators: list) -> tf.Tensor:
        """Returns what the boundary waits for, after a micro-batch was added.

        Args:
            counted: 1 if the window counts the micro-batch, else 0.
            accumulators: All accumulators of the window.
        """
        del accumulators
        return counted

    def at_the_boundary(self):
        """Returns the context for the operations that follow the micro-batch."""
        return contextlib.nullcontext()

    def count(self, counter, counted: list[tf.Tensor], steps: tf.Tensor):
        """Returns (whether the window closes, number of micro-steps in it now)."""
        del counter, counted
        return tf.constant(True), steps

    def branch(self, counter, is_boundary: tf.Tensor, update: Callable, skip: Callable):
        """Returns `update()` at the boundary, else `skip()`."""
        del counter, is_boundary, skip
        return update()


class EveryRun(Clock):
    """Every micro-batch is a window."""

    keeps_sums = False

    def steps(self, update_step: tf.Variable) -> tf.Tensor:
        """Returns K, which is 1 [micro-steps per update]."""
        del update_step
        return tf.constant(1, tf.int64)


class EveryKRuns(Clock):
    """K micro-steps make a window.

    Args:
        steps: K, or a callable of `update_step`.
    """

    has_counter = True

    def __init__(self, steps: AccumulationSteps):
        self._steps = steps

    def steps(self, update_step: tf.Variable) -> tf.Tensor:
        """Returns K of the open window [micro-steps per update]."""
        if callable(self._steps):
            return _scheduled(self._steps(update_step))
        return tf.constant(self._steps, tf.int64)

    def opens_window(self, counter: tf.Variable | None) -> tf.Tensor:
        """Returns whether the counter is 0."""
        return tf.equal(counter.read_value(), 0)

    def count(self, counter, counted: list[tf.Tensor], steps: tf.Tensor):
        """Increases the counter after every replica has added its micro-batch."""
        with tf.control_dependencies(counted):
            done = add_to(counter, counted[0])
        return done >= steps, done

    def branch(self, counter, is_boundary: tf.Tensor, update: Callable, skip: Callable):
        """Updates in a separate branch, and resets the counter there."""

        def update_and_begin_anew():
            result = update()
            with tf.control_dependencies(tf.nest.flatten(result)):
                reset = set_to(counter, 0)
            with tf.control_dependencies([reset]):
                return tf.nest.map_structure(tf.identity, result)

        return tf.cond(is_boundary, update_and_begin_anew, skip)


def _scheduled(steps) -> tf.Tensor:
    """Returns the K that a callable returned.

    Raises:
        ValueError: If it is anything but an integer scalar.
    """
    if steps is not None:
        steps = tf.convert_to_tensor(steps)
    if steps is None or not steps.dtype.is_integer or steps.shape.rank not in (0, None):
        received = None
        if steps is not None:
            received = f"{steps.dtype.name} of shape {steps.shape}"
        raise ValueError(
            "`gradient_accumulation_steps` must return an integer scalar. Received: "
            f"{received}. Cast it to tf.int64."
        )
    # A schedule below 1 is a mistake: each window would close after one micro-step.
    at_least_one = tf.debugging.assert_positive(
        steps, message="`gradient_accumulation_steps` must return an integer >= 1"
    )
    with tf.control_dependencies([at_least_one]):
        return tf.cast(tf.identity(steps), tf.int64)


def clock_of(options: Options) -> Clock:
    """Returns the clock of a train op that is made here."""
    batch = current_batch()
    if batch is not None:
        return batch
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    # Each of several replicas skips its own micro-batches: that takes accumulators.
    skips = replicas > 1 and options.on_nonfinite == "skip_micro_batch"
    if options.gradient_accumulation_steps == 1 and not skips:
        return EveryRun()
    return EveryKRuns(options.gradient_accumulation_steps)


def current_batch() -> Clock | None:
    """Returns the batch that is the window; None outside `microbatch_model_fn`."""
    return getattr(_current, "batch", None)


def set_current_batch(batch: Clock | None) -> None:
    """Makes a batch the window of the train ops that this thread makes."""
    _current.batch = batch
