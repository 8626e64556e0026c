"""Window of Keras optimizers: its variables, accumulation, and closing.

    mean = sum_i w_i * g_i / sum_i (w_i / replicas)

over all micro-batches i of the window and all replicas: Keras divides the loss by the
number of replicas and sums gradients. Both sums are those of one replica with the
joined batch, so that any number of replicas may resume a saved window. One
implementation for every Keras, for eager execution, tf.function and graphs, by the rule
of estimator_accum/_micro_step.py.
"""

import zlib
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum._accumulators import (
    Accumulator,
    create_accumulator,
    variables_of,
)
from estimator_accum._gradients import Gradient
from estimator_accum._graph import create_shared_scalar, first_of, nan, set_to
from estimator_accum._kinds import MicroSteps
from estimator_accum._micro_step import (
    Closed,
    MicroBatch,
    Terms,
    accumulate,
    close_window,
)

_KIND = MicroSteps(None)  # K is a tensor here


class Rule(NamedTuple):
    """Options for closing a window.

    Attributes:
        on_nonfinite: A policy of estimator_accum/_nonfinite.py; None does not check.
        is_reduced: Whether every replica's gradients are already the sum over replicas.
        apply: Function of (gradients, indices of variables) that applies them in
            replica context, without a reduction, and returns the operations to run.
    """

    on_nonfinite: str | None
    is_reduced: bool
    apply: Callable


class Window(tf.Module):
    """Variables of a window.

    Args:
        names: Names of the trained variables.
        variables: The trained `tf.Variable`s.

    Creates:
        `accumulation/micro_steps` (int64 scalar), `accumulation/window_loss`,
        `accumulation/weight`, `accumulation/loss` (scalars), and for each variable
        `<variable>/accumulator` of its shape and, unless it is a scalar,
        `<variable>/accumulator_rows` (float32 [rows]): a checkpoint may be read before
        it is known which gradients are sparse.
    """

    def __init__(self, names: list[str], variables: list[tf.Variable]):
        super().__init__("accumulation")
        self.names = names
        dtypes = {variable.dtype.base_dtype for variable in variables}
        dtype = tf.float64 if tf.float64 in dtypes else tf.float32
        self.accumulators = [
            create_accumulator(
                f"{name}/accumulator", v.shape, v.dtype.base_dtype, v.shape.rank > 0
            )
            for name, v in zip(names, variables, strict=True)
        ]
        shape = tf.TensorShape([])
        self.weight = create_accumulator("accumulation/weight", shape, dtype)
        self.loss = create_accumulator("accumulation/loss", shape, dtype)
        self.window_loss = create_shared_scalar("accumulation/window_loss", dtype)
        self.micro_steps = create_shared_scalar("accumulation/micro_steps")
        # Number of the set of variables that the open window has gradients of; it is in
        # no checkpoint, and so not tracked.
        owner = create_shared_scalar("accumulation/owner") if _is_eager() else None
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "_sets", {})  # sets of indices by the owner's number
        self.trained = None  # indices of the variables that get gradients
        self.sparse = set()  # of those, the ones with `IndexedSlices`

    def find_trained(self) -> None:
        """Sets `trained` to that of the open window, in eager execution."""
        if self.owner is not None:
            self.trained = self._sets.get(int(self.owner.numpy()), self.trained)

    @property
    def state(self) -> list[tf.Variable]:
        """All variables, in an order that depends only on the trained ones."""
        summed = variables_of([*self.accumulators, self.weight, self.loss])
        return [self.micro_steps, self.window_loss, *summed]


def run_micro_step(
    window: Window,
    gradients: dict[int, Gradient],
    weight: tf.Tensor | None,
    loss: tf.Tensor | None,
    steps: tf.Tensor,
    rule: Rule,
) -> tf.Tensor:
    """Accumulates one micro-batch and, at the boundary, updates; in replica context.

    Args:
        window: The window's variables.
        gradients: Gradients by index of the variable.
        weight: Scalar, the micro-batch's weight; None means 1.
        loss: Scalar, this replica's loss with the scale of its gradients; None if
            unknown.
        steps: K, int64 scalar [micro-steps per update].
        rule: Options for closing the window.

    Returns:
        Scalar bool, whether the window closed.
    """
    gradients = _of_known_kinds(window, gradients)
    dtype = window.weight.total.dtype
    loss = None if loss is None else tf.cast(loss, dtype)
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    counts_for, has_weight = tf.constant(1 / replicas, dtype), None
    term = nan(dtype) if loss is None else loss
    if weight is not None:
        weight = tf.cast(weight, dtype)
        counts_for, term = weight / replicas, weight * term
        has_weight = tf.not_equal(weight, 0.0)
    if rule.on_nonfinite == "skip_window" and loss is not None:
        # The boundary checks the weight, because some losses may be unknown.
        counts_for = tf.where(tf.math.is_finite(loss), counts_for, nan(dtype))
    micro_batch = MicroBatch(
        gradients=list(gradients.values()),
        scale=weight,
        scalars=[counts_for, term],
        loss=loss,
        has_weight=has_weight,
    )
    counted = accumulate(
        _terms(window, rule),
        micro_batch,
        lambda: _is_first(window),
        has_same_shapes=True,  # as XLA requires
    )
    return _close_if_done(window, rule, counted, tf.identity(steps))


def close_partial_window(window: Window, rule: Rule) -> tf.Tensor:
    """Applies the micro-batches in the window so far, in replica context."""
    nothing = tf.constant(0, tf.int64)
    return _close_if_done(window, rule, nothing, nothing)


def _close_if_done(window: Window, rule: Rule, counted, steps) -> tf.Tensor:
    return tf.distribute.get_replica_context().merge_call(
        lambda strategy, *args: _finish(strategy, window, rule, *args),
        args=(counted, steps),
    )


def _terms(window: Window, rule: Rule) -> Terms:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    *sums, _, _ = accumulators = _open(window)
    return Terms(
        names=_names(window),
        dtypes=[accumulator.total.dtype for accumulator in sums],
        accumulators=accumulators,
        num_replicas=replicas,
        # Each replica has added the same sum.
        gradient_divisor=1 / replicas if rule.is_reduced else 1,
        on_nonfinite=rule.on_nonfinite,
        has_loss=False,  # some micro-steps may have none
        is_reported=False,
    )


def _finish(strategy, window: Window, rule: Rule, counted, steps) -> tf.Tensor:
    """Closes the window at a boundary, in cross-replica context."""
    counted = strategy.experimental_local_results(counted)
    is_boundary, _ = _KIND.count(window.micro_steps, counted, first_of(strategy, steps))
    with tf.control_dependencies(counted):  # a failed step owns nothing
        owned = []
        if window.owner is not None and window.trained is not None:
            owned = [set_to(window.owner, _owner_of(window))]

    def apply(mean, closed: Closed) -> tf.Tensor:
        del closed
        applied = strategy.extended.call_for_each_replica(
            lambda gradients: _run(rule.apply(gradients, window.trained)), args=(mean,)
        )
        with tf.control_dependencies(strategy.experimental_local_results(applied)):
            return nan()

    def update() -> tf.Tensor:
        closed, _ = close_window(strategy, _terms(window, rule), apply)
        with tf.control_dependencies([set_to(window.window_loss, closed.loss)]):
            return tf.constant(True)

    with tf.control_dependencies(owned):
        is_boundary = tf.identity(is_boundary)
    return _KIND.close(
        window.micro_steps, is_boundary, update, lambda: tf.constant(False)
    )


def _is_first(window: Window) -> tf.Tensor:
    is_first = tf.equal(window.micro_steps.read_value(), 0)
    with tf.control_dependencies(_check_owner(window, is_first)):
        return tf.identity(is_first)


def _of_known_kinds(window: Window, gradients: dict[int, Gradient]):
    """Returns the gradients, each dense or sparse as in earlier micro-steps."""
    indices = tuple(gradients)
    is_new = window.trained is None or indices != tuple(window.trained)
    # Layers may be frozen or unfrozen between windows.
    if is_new and (window.trained is None or _is_empty(window)):
        window.trained = indices
        window.sparse.update(
            i for i, g in gradients.items() if isinstance(g, tf.IndexedSlices)
        )
    elif is_new:
        raise ValueError(
            "Every micro-step must have gradients of the same variables. Received: "
            f"{_names(window, indices)} after {_names(window)}. Make one optimizer "
            "for each set of variables, by accumulate()."
        )
    return {
        i: _as_slices(g) if i in window.sparse else tf.convert_to_tensor(g)
        for i, g in gradients.items()
    }


def _is_eager() -> bool:
    with tf.init_scope():
        return tf.executing_eagerly()


def _is_empty(window: Window) -> bool:
    """Returns whether the window is known to be empty now."""
    if window.owner is None:
        return False
    with tf.init_scope():
        return int(window.micro_steps.numpy()) == 0


def _owner_of(window: Window) -> tf.Tensor:
    """Returns a number > 0 for the set of variables that this micro-step trains."""
    indices = tuple(window.trained)
    number = 1 + zlib.crc32(repr(indices).encode())
    window._sets[number] = indices
    return tf.constant(number, tf.int64)


def _check_owner(window: Window, is_first: tf.Tensor) -> list:
    """Returns an assertion that the open window has gradients of the same variables."""
    if window.owner is None:
        return []
    owner = window.owner.read_value()
    is_known = tf.logical_or(tf.equal(owner, 0), tf.equal(owner, _owner_of(window)))
    words = (
        "Every micro-step must have gradients of the same variables. Received: others."
    )
    checked = tf.raw_ops.Assert(
        condition=tf.logical_or(is_first, is_known), data=[words]
    )
    return [] if checked is None else [checked]


def _as_slices(gradient: Gradient) -> tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = tf.shape(gradient, tf.int64)
    return tf.IndexedSlices(gradient, tf.range(shape[0]), shape)


def _names(window: Window, indices=None) -> list[str]:
    return [window.names[i] for i in (window.trained if indices is None else indices)]


def _open(window: Window) -> list[Accumulator]:
    """Returns the accumulators in use, scalars last; rows for sparse gradients only."""
    made = [
        Accumulator(a.total, a.touched if i in window.sparse else None)
        for i, a in enumerate(window.accumulators)
    ]
    return [*(made[i] for i in window.trained), window.weight, window.loss]


def _run(operations) -> tf.Tensor:
    """Returns a tensor that needs `operations`; in eager execution they have run."""
    with tf.control_dependencies([o for o in operations if o is not None]):
        return tf.constant(True)
