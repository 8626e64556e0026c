"""The window of Keras optimizers: when it closes, and what it hands on.

    mean = replicas * sum_i w_i * g_i / sum_i w_i

over all micro-batches i of the window and all replicas: Keras divides the loss by the
number of replicas and sums gradients. One implementation for every Keras, in eager
execution, in tf.function and in graphs; what is summed, and how, is in
estimator_accum/accumulators.py.
"""

import zlib
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.accumulators import (
    Accumulator,
    add,
    commit,
    create_accumulator,
    take_window,
    variables_of,
)
from estimator_accum.clipping import half_squared_norms
from estimator_accum.gradients import Gradient, cast, scaled, values_of
from estimator_accum.nonfinite import all_finite, assert_finite
from estimator_accum.window import create_shared_scalar


class Rule(NamedTuple):
    """How a window closes.

    Attributes:
        on_nonfinite: A policy of estimator_accum/nonfinite.py; None is no check.
        is_reduced: Whether every replica's gradients are the sum over all of them.
        apply: Replica context: applies (gradients, indices of variables) without a
            reduction, and returns what has to run.
    """

    on_nonfinite: str | None
    is_reduced: bool
    apply: Callable


class Window(tf.Module):
    """The variables of a window.

    Args:
        names: Of the trained variables.
        variables: The trained `tf.Variable`s.

    Creates:
        `accumulation/micro_steps` (int64 scalar), `accumulation/window_loss`,
        `accumulation/weight`, `accumulation/loss` (scalars), and for each variable
        `<variable>/accumulator` of its shape and, unless it is a scalar,
        `<variable>/accumulator_rows` (float32 [rows]): a checkpoint is read before
        anybody knows which gradients are sparse.
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
        # Whose gradients the open window holds; of no checkpoint, and so not tracked.
        owner = create_shared_scalar("accumulation/owner") if _is_eager() else None
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "_sets", {})  # of indices, by the owner's number
        self.trained = None  # indices of the variables that get gradients
        self.sparse = set()  # of those, the ones with `IndexedSlices`

    def find_trained(self) -> None:
        """Makes `trained` that of the open window; in eager execution."""
        if self.owner is not None:
            self.trained = self._sets.get(int(self.owner.numpy()), self.trained)

    @property
    def state(self) -> list[tf.Variable]:
        """All its variables, in an order that only depends on the trained ones."""
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
        window: Its variables.
        gradients: By index of the variable.
        weight: Scalar, what the micro-batch counts for; None is 1.
        loss: Scalar, of this replica, as its gradients are scaled; None is unknown.
        steps: K, int64 scalar [micro-steps per update].
        rule: How the window closes.

    Returns:
        Scalar bool, whether the window has closed.
    """
    gradients = _of_known_kinds(window, gradients)
    dtype = window.weight.total.dtype
    values = list(gradients.values())
    unknown = tf.constant(float("nan"), dtype)
    loss = None if loss is None else tf.cast(loss, dtype)
    scalars = [tf.ones([], dtype), unknown if loss is None else loss]
    accumulators = _open(window)
    if weight is not None:
        weight = tf.cast(weight, dtype)
        scalars = [weight, weight * scalars[1]]
        values = [
            scaled(cast(value, accumulator.total.dtype), weight)
            for value, accumulator in zip(values, accumulators)
        ]
    is_first = tf.equal(window.micro_steps.read_value(), 0)
    with tf.control_dependencies(_check_owner(window, is_first)):
        is_first = tf.identity(is_first)
    if rule.on_nonfinite == "skip_window" and loss is not None:
        # The boundary looks at the weight; the losses before may be unknown.
        scalars[0] = tf.where(tf.math.is_finite(loss), scalars[0], unknown)
    sums = add(accumulators, [*values, *scalars], is_first, has_same_shapes=True)
    checked, is_good = [values_of(value) for value in sums], None
    if rule.on_nonfinite in ("raise", "skip_micro_batch"):
        trained, names = sums[: len(values)], _names(window)
        halves = half_squared_norms(trained, dtype, has_unique_rows=True)
        if loss is not None:
            trained, names = [*trained, loss], [*names, "the loss"]
            halves = tf.concat([halves, [loss]], 0)
        if weight is not None:
            halves = tf.where(tf.not_equal(weight, 0.0), halves, tf.zeros_like(halves))
        if rule.on_nonfinite == "raise":
            checked = [assert_finite(trained, halves, names, None)]
        else:
            is_good = all_finite(trained, halves)
    is_added = is_good
    if weight is not None:  # what weighs nothing adds nothing, not even 0 / 0
        has_weight = tf.not_equal(weight, 0.0)
        is_added = has_weight if is_good is None else is_good & has_weight
    with tf.control_dependencies([c for c in checked if c is not None]):
        written = commit(accumulators, sums, is_first, is_added)
    replica = tf.distribute.get_replica_context()
    with tf.control_dependencies([w for w in written if w is not None]):
        if is_good is None or replica.num_replicas_in_sync > 1:
            counted = tf.constant(1, tf.int64)
        else:  # the window then takes another micro-batch instead
            counted = tf.cast(is_good, tf.int64)
        counted, steps = tf.identity(counted), tf.identity(steps)
    return _close_if_done(window, rule, counted, steps)


def close_partial_window(window: Window, rule: Rule) -> tf.Tensor:
    """Updates by what the window holds so far; in replica context."""
    nothing = tf.constant(0, tf.int64)
    return _close_if_done(window, rule, nothing, nothing)


def _close_if_done(window: Window, rule: Rule, counted, steps) -> tf.Tensor:
    return tf.distribute.get_replica_context().merge_call(
        lambda strategy, *args: _finish(strategy, window, rule, *args),
        args=(counted, steps),
    )


def _of_known_kinds(window: Window, gradients: dict[int, Gradient]):
    """Gradients, each dense or sparse as in the micro-steps before."""
    indices = tuple(gradients)
    if window.trained is None:
        window.trained = indices
        window.sparse.update(
            i for i, g in gradients.items() if isinstance(g, tf.IndexedSlices)
        )
    if indices != tuple(window.trained) and _is_empty(window):
        window.trained = indices  # some layers were frozen, or thawed, between windows
        window.sparse.update(
            i for i, g in gradients.items() if isinstance(g, tf.IndexedSlices)
        )
    if indices != tuple(window.trained):
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
    """Whether it holds nothing now, where anybody can tell."""
    if window.owner is None:
        return False
    with tf.init_scope():
        return int(window.micro_steps.numpy()) == 0


def _owner_of(window: Window) -> tf.Tensor:
    """A number for the set of variables that this micro-step trains, > 0."""
    indices = tuple(window.trained)
    number = 1 + zlib.crc32(repr(indices).encode())
    window._sets[number] = indices
    return tf.constant(number, tf.int64)


def _check_owner(window: Window, is_first: tf.Tensor) -> list:
    """Fails where the open window holds the gradients of other variables."""
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
    """The accumulators in use, the scalars' last; rows for sparse gradients only."""
    made = [
        Accumulator(a.total, a.touched if i in window.sparse else None)
        for i, a in enumerate(window.accumulators)
    ]
    return [*(made[i] for i in window.trained), window.weight, window.loss]


def _finish(strategy, window: Window, rule: Rule, counted, steps) -> tf.Tensor:
    """Cross-replica: the tf.cond on the boundary."""
    counted = strategy.experimental_local_results(counted)
    with tf.control_dependencies(counted):
        done = _set(tf.compat.v1.assign_add, window.micro_steps, counted[0])
        owned = []
        if window.owner is not None and window.trained is not None:
            owned = [_set(tf.compat.v1.assign, window.owner, _owner_of(window))]
    with tf.control_dependencies(owned):
        steps = tf.identity(strategy.experimental_local_results(steps)[0])
    return tf.cond(
        done >= steps,
        lambda: _update(strategy, window, rule),
        lambda: tf.constant(False),
    )


def _update(strategy, window: Window, rule: Rule) -> tf.Tensor:
    """Cross-replica, at a boundary: the window's mean, then the optimizer."""
    extended = strategy.extended
    mean, loss, is_good = extended.call_for_each_replica(
        _take_mean, args=(window, rule)
    )
    is_good = strategy.experimental_local_results(is_good)

    def apply() -> tf.Tensor:
        applied = extended.call_for_each_replica(
            lambda gradients: _run(rule.apply(gradients, window.trained)), args=(mean,)
        )
        with tf.control_dependencies(strategy.experimental_local_results(applied)):
            return tf.constant(True)

    if rule.on_nonfinite in (None, "raise"):
        has_updated = apply()
    else:
        has_updated = tf.cond(is_good[0], apply, lambda: tf.constant(False))
    loss = strategy.experimental_local_results(loss)
    with tf.control_dependencies([has_updated, *is_good, *loss]):
        kept = _set(tf.compat.v1.assign, window.window_loss, loss[0])
        reset = _set(tf.compat.v1.assign, window.micro_steps, tf.constant(0, tf.int64))
    with tf.control_dependencies([kept, reset]):
        return tf.constant(True)


def _take_mean(window: Window, rule: Rule):
    """Replica context: returns the window's (mean, loss, whether to apply it)."""
    sums, cleared = take_window(_open(window))
    *sums, weight, loss = sums
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    total = tf.constant(1 if rule.is_reduced else replicas, weight.dtype)
    factor = tf.math.divide_no_nan(total, weight)
    loss = loss * tf.math.divide_no_nan(tf.cast(replicas, weight.dtype), weight)
    done, is_good = cleared, weight > 0  # every micro-batch left out
    if rule.on_nonfinite is not None:
        halves = half_squared_norms(sums, weight.dtype, has_unique_rows=True)
        halves, values = tf.concat([halves, [weight]], 0), [*sums, weight]
        if rule.on_nonfinite == "raise":
            names = [*_names(window), "the weight"]
            done = [*cleared, assert_finite(values, halves, names, None)]
        else:
            is_good = tf.logical_and(is_good, all_finite(values, halves))
    with tf.control_dependencies([d for d in done if d is not None]):
        return (
            [scaled(value, factor) for value in sums],
            tf.identity(loss),
            tf.identity(is_good),
        )


def _run(operations) -> tf.Tensor:
    """A tensor that needs them; in eager execution they have run."""
    with tf.control_dependencies([o for o in operations if o is not None]):
        return tf.constant(True)


def _set(assign, variable: tf.Variable, value) -> tf.Tensor:
    """Returns the variable's value after it."""
    with tf.control_dependencies([assign(variable, value)]):
        return tf.identity(variable.read_value())
