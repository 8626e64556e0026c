"""The accumulation rule: `accumulate` for a micro-step, `close_window` at a boundary.

    update = optimizer( clip_by_global_norm( sum_i w_i * g_i / sum_i w_i , clip_norm) )

over all micro-batches i of the window and all replicas; what code does to gradients
before `apply_gradients`, it does to the mean, before it is clipped. `make_accumulating_train_op`,
`AccumulatingOptimizer`, `microbatch_model_fn` and `keras.accumulate` all train by these
two functions; they differ in how and when the mean is applied. Order inside one
micro-step, every arrow a control or data dependency:

    gradients -> accumulate -> (boundary only: reduce over replicas once, normalize,
    change, clip, check, apply, clear) -> counters
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum._accumulators import (
    Accumulator,
    add,
    commit,
    take_window,
)
from estimator_accum._change import Change
from estimator_accum._gradients import (
    Gradient,
    cast,
    global_norm,
    half_squared_norms,
    scale_and_clip,
    scaled,
    sum_over_replicas,
    values_of,
)
from estimator_accum._graph import first_of, flatten, nan, read
from estimator_accum._nonfinite import check_micro_batch, check_window


class Terms(NamedTuple):
    """The rule's parameters for one train op, the same in every replica.

    Attributes:
        names: Names of the trained variables, for errors.
        dtypes: Dtypes of these variables and of the mean gradients.
        accumulators: Sums of the variables' gradients, then of weight, loss and further
            scalars; empty if every micro-batch is a window.
        num_replicas: Number of replicas that train in sync.
        gradient_divisor: Number by which the gradients were divided, so that their sum
            over replicas is a mean.
        on_nonfinite: Policy of estimator_accum/_nonfinite.py; None leaves NaN and
            infinity to the optimizer.
        has_loss: Whether the window's loss is known, and so must be finite.
        is_reported: Whether norm and finiteness are computed even without a policy.
        reduction: "mean" or "sum".
        clip_norm: Largest global norm of the mean; None does not clip.
        sparse_norm: "rows" or "slices".
        is_mean: Scalar bool, whether the sums are already means; None means False.
        clock: Number of micro-steps before this one, for errors; None if unknown.
        requests: Scalars that are summed over replicas together with the window.
    """

    names: list[str]
    dtypes: list[tf.DType]
    accumulators: list[Accumulator]
    num_replicas: int
    gradient_divisor: float = 1
    on_nonfinite: str | None = "raise"
    has_loss: bool = True
    is_reported: bool = True
    reduction: str = "mean"
    clip_norm: float | None = None
    sparse_norm: str = "rows"
    is_mean: tf.Tensor | None = None
    clock: tf.Variable | None = None
    requests: tuple[tf.Tensor, ...] = ()


class MicroBatch(NamedTuple):
    """The terms that one replica adds to its sums.

    Attributes:
        gradients: One for each trained variable.
        scale: Scalar by which the gradients must still be multiplied; None means 1.
        scalars: Weight, weighted loss and further scalars to sum.
        loss: Scalar mean over the micro-batch; None if unknown.
        has_weight: Scalar bool, whether the weight is not 0; None means always.
    """

    gradients: list[Gradient]
    scale: tf.Tensor | None
    scalars: list[tf.Tensor]
    loss: tf.Tensor | None
    has_weight: tf.Tensor | None


class Closed(NamedTuple):
    """Results of a closed window; scalars, the same in every replica.

    Attributes:
        is_good: Whether the window is applied.
        loss: Mean loss, or the sum with `reduction="sum"`.
        gradient_norm: Global norm of what the optimizer gets, before `clip_norm`; NaN if
            not computed.
        weight: Sum of the weights.
        more: Sums of the further scalars, and the norm of the mean.
        requests: Sum of `Terms.requests`; NaN if there are none.
    """

    is_good: tf.Tensor
    loss: tf.Tensor
    gradient_norm: tf.Tensor
    weight: tf.Tensor
    more: list[tf.Tensor]
    requests: tf.Tensor


def accumulate(
    terms: Terms,
    micro_batch: MicroBatch,
    is_first: Callable[[], tf.Tensor],
    has_same_shapes: bool = False,
) -> tf.Tensor:
    """Adds one micro-batch to this replica's sums.

    Args:
        terms: The rule's parameters.
        micro_batch: The terms to add.
        is_first: Returns whether this is the window's first micro-step, scalar bool.
        has_same_shapes: As for `_accumulators.add`.

    Returns:
        int64 scalar, 1 if the window counts the micro-batch, else 0; available after
        the micro-batch is added.
    """
    gradients, scalars = micro_batch.gradients, micro_batch.scalars
    if micro_batch.scale is not None:  # in the accumulators' dtype: it may be wider
        gradients = [
            scaled(cast(gradient, accumulator.total.dtype), micro_batch.scale)
            for gradient, accumulator in zip(gradients, terms.accumulators)
        ]
    with tf.control_dependencies([scalars[1]]):  # a failed loss writes nothing
        first = is_first()
        sums = add(terms.accumulators, [*gradients, *scalars], first, has_same_shapes)
    is_good, checked = check_micro_batch(terms, sums[: len(gradients)], micro_batch)
    is_added = is_good
    if micro_batch.has_weight is not None:  # a mean over no tokens is 0 / 0
        is_added = micro_batch.has_weight
        if is_good is not None:
            is_added = tf.logical_and(is_good, is_added)
    with tf.control_dependencies(checked):
        written = commit(terms.accumulators, sums, first, is_added)
    with tf.control_dependencies(written):
        if is_good is None or terms.num_replicas > 1:
            return tf.constant(1, tf.int64)
        return tf.cast(is_good, tf.int64)  # another one takes its place in the window


def mean_loss(terms: Terms) -> tf.Tensor:
    """Returns the mean loss of this replica's micro-batches so far; NaN if unknown."""
    if not terms.has_loss:
        with tf.control_dependencies(None):
            return nan(terms.accumulators[-1].total.dtype)
    weight, loss = terms.accumulators[len(terms.names) :][:2]
    return _reduced(terms, read(loss.total), read(weight.total))


def close_window(
    strategy,
    terms: Terms,
    apply: Callable[[list[Gradient], Closed], tf.Tensor],
    gradients: list[Gradient] | None = None,
    change: Change | None = None,
) -> tuple[Closed, tf.Tensor]:
    """Takes the window's mean and applies it, in cross-replica context.

    Args:
        strategy: The current strategy, which may be TensorFlow's default one.
        terms: The rule's parameters.
        apply: Applies the replicas' gradients, which are already reduced; returns an
            observed value, a float32 scalar.
        gradients: The replicas' gradients and scalars, if nothing is accumulated.
        change: The replicas' code that changes gradients; None if it changes nothing.

    Returns:
        (the window's results, the value from `apply`: NaN if it was not called). Both
        are available after the window is applied and cleared.
    """
    mean, closed = strategy.extended.call_for_each_replica(
        _take_mean, args=(terms, gradients, change)
    )
    everywhere = flatten(strategy, closed)
    closed = tf.nest.map_structure(lambda value: first_of(strategy, value), closed)
    if terms.on_nonfinite in (None, "raise"):
        observed = apply(mean, closed)
    else:
        observed = tf.cond(closed.is_good, lambda: apply(mean, closed), nan)
    # The other replicas' too: their sparse accumulators are then clear.
    with tf.control_dependencies([observed, *everywhere]):
        return tf.nest.map_structure(tf.identity, (closed, observed))


def _take_mean(terms: Terms, gradients: list[Gradient] | None, change: Change | None):
    """Reduces, normalizes, changes, checks, clips, clears; in replica context.

    Returns:
        The gradients for the optimizer, and the window's results.
    """
    if terms.accumulators:
        sums, cleared = take_window(terms.accumulators, terms.requests)
    else:
        sums, cleared = sum_over_replicas([*gradients, *terms.requests]), []
    requests = sums.pop() if terms.requests else nan()
    sums, (weight, loss, *more) = sums[: len(terms.names)], sums[len(terms.names) :]
    norm, is_good, checked = nan(weight.dtype), tf.constant(True), []
    factor, changed = None, []  # one micro-batch alone is its own mean
    if terms.accumulators or terms.num_replicas > 1:
        divisor = tf.constant(terms.gradient_divisor, weight.dtype)
        factor = _reduced(terms, divisor, weight)
    if change is not None:
        terms, sums, more = _change_mean(terms, sums, factor, more, change)
        factor, changed = None, [values_of(value) for value in sums]
    if terms.is_reported or terms.on_nonfinite is not None:
        has_unique_rows = terms.sparse_norm == "slices" or bool(terms.accumulators)
        halves = half_squared_norms(sums, weight.dtype, has_unique_rows)
        of_slices = more.pop() if terms.sparse_norm == "slices" else None
        norm = global_norm(sums, halves, of_slices if terms.accumulators else None)
        scalars = [weight, loss] if terms.has_loss else [weight]
        is_good, checked = check_window(terms, sums, halves, scalars)
    mean, norm = scale_and_clip(sums, factor, terms.clip_norm, norm)
    if more and change is None:
        more.append(norm)
    mean = [cast(value, dtype) for value, dtype in zip(mean, terms.dtypes, strict=True)]
    # A change may read variables, which are written when the loss is there.
    with tf.control_dependencies([*cleared, *checked, *changed]):
        loss = _reduced(terms, loss, weight)
        closed = Closed(is_good, loss, norm, weight, more, requests)
        return mean, tf.nest.map_structure(tf.identity, closed)


def _change_mean(
    terms: Terms, sums: list[Gradient], factor, more: list, change: Change
):
    """Returns terms of the changed gradients, these, and `more` with the mean's norm."""
    kept = len(more) - len(change.with_norm)
    more, halves = more[:kept], more[kept:]
    if more:
        squares = half_squared_norms(sums, factor.dtype, bool(terms.accumulators))
        more.append(global_norm(sums, squares, None) * factor)
    changed = change(
        [
            cast(scaled(value, factor), gradient.dtype)
            for value, gradient in zip(sums, change.gradients, strict=True)
        ],
        [half * tf.square(factor) for half in halves],
    )
    names = [variable.op.name for variable in change.variables]
    dtypes = [variable.dtype for variable in change.variables]
    # The micro-steps have not checked what was changed: nothing is accumulated of it.
    return terms._replace(names=names, dtypes=dtypes, accumulators=[]), changed, more


def _reduced(terms: Terms, total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Returns the window's mean, or `total` itself for `reduction="sum"`."""
    if terms.reduction == "sum":
        return total
    mean = tf.math.divide_no_nan(total, weight)
    return mean if terms.is_mean is None else tf.where(terms.is_mean, total, mean)
