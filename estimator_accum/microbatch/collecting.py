"""Values of the whole batch, collected from its micro-batches.

    pass      rows of each micro-batch -> slots
    after     values of all rows, computed once -> slots
    later     its results, and each micro-batch's rows of them

If one micro-batch is the whole batch, a later pass does the work of this one in its own
run: its reads of the slots then wait for the operations that write them.

N = number of examples in the batch, b = in the micro-batch.
"""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.arguments import check_scalar
from estimator_accum.core.current_batch import current_batch
from estimator_accum.graph.branches import run_either
from estimator_accum.graph.devices import of_strings
from estimator_accum.graph.walks import ancestors
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.staging import Slot
from estimator_accum.microbatch.work import OWN_CHECK, Turn

# Attribute of an operation that results in a whole_batch_loss.
WHOLE_BATCH_LOSS = "_estimator_accum_whole_batch_loss"
_ONE_ROW = (
    "A tensor that is collected for the whole batch must have one row for each "
    "example, of one shape."
)


def collect(
    batch: WholeBatch,
    turn: Turn,
    tensors: list[tf.Tensor],
    axes: list[int | None] | None = None,
) -> list[tf.Tensor]:
    """Returns rows of all micro-batches, which a pass stores, for a later run.

    Args:
        batch: The batch.
        turn: The pass.
        tensors: Tensors with as many rows for each example as for any other, or with
            any number of entries for each, in the order of the examples.
        axes: The axis of each tensor that has the rows, None for entries; without any
            it is the first, which must have one row for each example.
    """
    slots, writes, empty, is_one_row = [], [], [], axes is None
    axes = axes or [0] * len(tensors)
    with tf.device("/cpu:0"):
        for tensor, axis in zip(tensors, axes, strict=True):
            shape = tensor.shape
            if shape.rank is not None:
                dims, i = shape.as_list(), axis or 0
                shape = tf.TensorShape([*dims[:i], None, *dims[i + 1 :]])
            slot = batch.works.slot("outputs", tensor.dtype, shape)
            slots.append(slot)
            if axis is None:
                writes.append(_append(slot, tensor, batch))
            else:
                writes.append(_write_rows(slot, tensor, axis, batch, is_one_row))
            nothing = [n or 0 for n in shape.as_list()] if shape.rank else [0]
            empty.append(slot.write(tf.zeros(nothing, tensor.dtype)))
        rows, done = _read_later(batch, turn, slots, writes)
    batch.works.add(turn, micro_ops=writes, empty=empty, done=done)
    return rows


def running_sum(
    batch: WholeBatch, turn: Turn, name: str, value: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Adds up a scalar of micro-batches in a pass.

    Returns:
        (Sum over the micro-batches before this one, sum over all for a later run).
    """
    slot = batch.works.slot(name, value.dtype)
    before = tf.where(batch.is_first, tf.zeros_like(value), slot.read())
    write = slot.write(value + before)
    with tf.control_dependencies(None):
        zero = slot.write(tf.zeros([], value.dtype))
        (total,), done = _read_later(batch, turn, [slot], [write])
    zeros = {"empty": [zero], "initialize": [zero]}
    batch.works.add(turn, micro_ops=[write], done=done, **zeros)
    return before, total


def keep(
    batch: WholeBatch, turn: Turn, name: str, values: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns values, which are stored after a pass, for a later run."""
    with tf.device("/cpu:0"):
        slots = [batch.works.slot(name, value.dtype, value.shape) for value in values]
        writes = [s.write(v) for s, v in zip(slots, values, strict=True)]
        # An evaluation reads the loss also on a replica that has never had examples.
        zeros = [
            slot.write(tf.zeros([], value.dtype))
            for slot, value in zip(slots, values, strict=True)
            if value.shape.rank == 0
        ]
        kept, done = _read_later(batch, turn, slots, writes)
    for read, value in zip(kept, values, strict=True):
        read.set_shape(value.shape)
    batch.works.add(turn, once=writes, initialize=zeros, done=done)
    return kept


class Moments(NamedTuple):
    """Mean and variance of a tensor's channels over the examples of a micro-batch.

    Attributes:
        values: The tensor.
        mean: The mean.
        variance: The variance.
        is_corrected: Whether that is multiplied by n / (n - 1), of n values.
    """

    values: tf.Tensor
    mean: tf.Tensor
    variance: tf.Tensor
    is_corrected: bool


def collect_moments(
    batch: WholeBatch, turn: Turn, moments: Moments
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the batch's mean and variance, from those of a pass, for a later run.

    By the law of total variance, with a share s of micro-batch i in the values so far,
    and a change c = mean_i - mean:

        mean += s * c
        variance += s * (variance_i - variance) + s * (1 - s) * c ** 2

    In a step, both are NaN on a replica without examples, as those of none.
    """
    with tf.device("/cpu:0"):
        dtypes = [moments.mean.dtype, moments.variance.dtype, tf.int64]
        slots = [batch.works.slot("moments", dtype, None) for dtype in dtypes]
        number = tf.size(moments.values, tf.int64) // tf.size(moments.mean, tf.int64)
        of_part = [moments.mean, moments.variance, number]
        if moments.is_corrected:
            of_part[1] /= _correction(number, moments.variance.dtype)
        before = [
            tf.where(batch.is_first, value, slot.read())
            for value, slot in zip(of_part, slots, strict=True)
        ]
        total = number + tf.where(batch.is_first, tf.zeros_like(number), before[2])
        share = tf.cast(number / total, dtypes[0])
        mean, variance = (
            old + share * (new - old)
            for old, new in zip(before[:2], of_part[:2], strict=True)
        )
        variance += share * (1 - share) * tf.square(of_part[0] - before[0])
        values = mean, variance, total
        writes = [slot.write(v) for slot, v in zip(slots, values, strict=True)]
        with tf.control_dependencies(None):
            pairs = [*zip(slots, of_part, strict=True)]
            zeros = [slot.write(tf.zeros([], value.dtype)) for slot, value in pairs]
            nothing = [slot.write(_of_nothing(value)) for slot, value in pairs]
        (mean, variance, number), done = _read_later(batch, turn, slots, writes)
        if moments.is_corrected:
            variance *= _correction(number, variance.dtype)
    mean.set_shape(moments.mean.shape)
    variance.set_shape(moments.variance.shape)
    batch.works.add(turn, micro_ops=writes, empty=nothing, initialize=zeros, done=done)
    return mean, variance


def _of_nothing(value: tf.Tensor) -> tf.Tensor:
    """Returns NaN in place of each number of a mean or variance; 0 for an integer."""
    sizes = [n or 1 for n in value.shape.as_list()] if value.shape.rank else []
    number = float("nan") if value.dtype.is_floating else 0
    return tf.fill(sizes, tf.constant(number, value.dtype))


def _correction(number: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns Bessel's correction n / (n - 1); 1 of a single value."""
    return tf.cast(number / tf.maximum(number - 1, 1), dtype)


def keep_rows(
    batch: WholeBatch,
    turn: Turn,
    name: str,
    values: list[tf.Tensor],
    axes: list[int | None],
    spans: dict[int, tuple[tf.Tensor, tf.Tensor]] | None = None,
) -> list[tf.Tensor]:
    """Returns the micro-batch's rows of values, as `keep` returns all.

    Args:
        batch: The batch.
        turn: The pass after which they are stored.
        name: Name of the variables.
        values: Values of the whole batch.
        axes: The axis of each value that has the rows; None for no rows, the value itself.
        spans: (Begin, end) of the micro-batch's entries in values of entries, by their
            places among all values.
    """
    kept = keep(batch, turn, name, values)
    for i, axis in enumerate(axes):
        if spans and i in spans:
            begin, end = spans[i]
            with tf.control_dependencies([_check_number(batch, end, kept[i])]):
                kept[i] = kept[i][begin:end]
        elif axis is not None:
            length = tf.shape(kept[i], out_type=tf.int64)[axis]
            span = length // batch.divisor(batch.rows)
            begin, end = batch.begin * span, (batch.begin + batch.size) * span
            kept[i] = kept[i][(*[slice(None)] * axis, slice(begin, end))]
    return kept


def batch_mean(
    tensor: tf.Tensor, weight: tf.Tensor | None = None, reduction: str = "mean"
) -> tf.Tensor:
    """Returns the mean over the batch's micro-batches, for summaries and hooks.

        sum_i w_i * tensor_i / sum_i w_i

    Returns `tensor` itself outside `microbatch_model_fn`, in evaluation and prediction
    with a fixed number, and if `tensor` does not depend on the micro-batch.

    Args:
        tensor: Floating-point scalar, the mean over the micro-batch.
        weight: Scalar, the micro-batch's weight; None is its number of examples.
        reduction: "mean", or "sum" to add up without weights.

    Raises:
        TypeError: If `tensor` or `weight` is not a number.
        ValueError: If `tensor` or `weight` is not a scalar.
    """
    batch = current_batch()
    if batch is None:
        return tensor
    tensor = check_scalar("tensor", tensor)
    weight = (
        batch.default_weight(reduction)
        if weight is None
        else check_scalar("weight", weight)
    )
    return mean_over_batch(batch, tensor, weight, reduction)


def mean_over_batch(batch: WholeBatch, tensor, weight, reduction: str) -> tf.Tensor:
    """Returns `batch_mean`, of checked arguments."""
    if reduction == "mean" and batch.begin.op not in ancestors([tensor.op]):
        return tensor  # e.g. a window's loss: the same for every micro-batch
    scale = batch.scale(weight) if reduction == "mean" else tf.ones_like(weight)
    sums = []
    for value in (tf.cast(scale, tensor.dtype) * tensor, weight):
        sums.append(running_sum(batch, Turn.LAST, "batch_mean", value)[1])
    with tf.control_dependencies(None):
        total, weight = sums
        if reduction == "sum":
            return total
        mean = tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))
        return tf.where(batch.is_whole, total, mean)


def _check_number(
    batch: WholeBatch, end: tf.Tensor, entries: tf.Tensor
) -> tf.Operation:
    """Returns a check that two passes over a batch have the same entries."""
    number = tf.shape(entries, out_type=tf.int64)[0]
    is_last = tf.equal(batch.begin + batch.size, batch.rows)
    with tf.device("/cpu:0"), of_strings():
        check = tf.raw_ops.Assert(
            condition=tf.logical_or(tf.logical_not(is_last), tf.equal(end, number)),
            data=[
                "Each pass over a batch must choose the same entries of its examples.",
                f"Received: for {entries.name}, which is computed from entries,",
                end,
                "in place of",
                number,
                "Choose them by values of the data set.",
            ],
        )
    setattr(check, OWN_CHECK, True)
    return check


def _append(slot: Slot, entries: tf.Tensor, batch: WholeBatch) -> tf.Operation:
    """Stores a micro-batch's entries behind those of the micro-batches before."""

    def add() -> list[tf.Operation]:
        return [slot.write(tf.concat([slot.read(), entries], 0))]

    return run_either(batch.is_first, lambda: [slot.write(entries)], add)


def _write_rows(
    slot: Slot, tensor: tf.Tensor, axis: int, batch: WholeBatch, is_one_row: bool
) -> tf.Operation:
    """Stores a micro-batch's rows at their place in the batch."""
    shape = tf.shape(tensor, out_type=tf.int64)
    span = tf.constant(1, tf.int64) if is_one_row else shape[axis] // batch.size
    whole = tf.concat([shape[:axis], [batch.rows * span], shape[axis + 1 :]], 0)
    begun = run_either(
        batch.is_first, lambda: [slot.write(tf.zeros(whole, tensor.dtype))], list
    )
    with tf.control_dependencies([begun]):
        # The first micro-batch decides: a row of another shape would be broadcast.
        first = tf.raw_ops.VariableShape(input=slot.handle, out_type=tf.int64)
        span = first[axis] // batch.divisor(batch.rows)
        expected = tf.concat([first[:axis], [batch.size * span], first[axis + 1 :]], 0)
        is_equal = tf.reduce_all(tf.equal(shape, expected))
        with of_strings():
            fits = tf.raw_ops.Assert(
                condition=is_equal,
                data=[
                    f"{_ONE_ROW} Received: {tensor.name} of shape",
                    shape,
                    "in place of",
                    expected,
                    "Reshape it, or pad all micro-batches alike.",
                ],
                summarize=10,
            )
        setattr(fits, OWN_CHECK, True)
    before = [tf.constant(0, tf.int64)] * axis
    with tf.control_dependencies([fits]):
        return tf.raw_ops.ResourceStridedSliceAssign(
            ref=slot.handle,
            begin=[*before, batch.begin * span],
            end=[*before, (batch.begin + batch.size) * span],
            strides=[tf.constant(1, tf.int64)] * (axis + 1),
            begin_mask=2**axis - 1,
            end_mask=2**axis - 1,
            value=tensor,
        )


def _read_later(
    batch: WholeBatch, turn: Turn, slots: list[Slot], writes: list[tf.Operation]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the values of slots, in a later run or after `writes`, and `Work.done`."""
    done, waits = [], []
    if turn is Turn.COLLECT:
        with tf.control_dependencies(writes):
            default = tf.constant(True)
        done.append(tf.compat.v1.placeholder_with_default(default, [], "done"))
        # A feed takes the place of a tensor, not of its operation: to wait for that, or
        # for what the graph's optimizer makes a part of it, would run `writes` again.
        with tf.device("/cpu:0"):
            waits.append(batch.works.slot("done", tf.bool).write(*done))
    with tf.control_dependencies(waits):
        return [slot.read() for slot in slots], done
