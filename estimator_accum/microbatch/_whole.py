"""Values of the whole batch: rows of all micro-batches, and what is computed from them.

    pass      rows of each micro-batch -> slots
    after     what is computed from all rows, once -> slots
    later     its results, and each micro-batch's rows of them

If one micro-batch is the whole batch, a later pass does the work of this one in its own
run: its reads of the slots then wait for the operations that write them.

N = number of examples in the batch, b = in the micro-batch.
"""

import tensorflow as tf

from estimator_accum._graph import run_either
from estimator_accum.microbatch._batch import Pass, WholeBatch
from estimator_accum.microbatch._gather import make_exchange
from estimator_accum.microbatch._staging import Slot

_ONE_ROW = (
    "What is collected for the whole batch must have one row for each example, of one "
    "shape."
)


def first_pass(batch: WholeBatch, is_joint: bool) -> Pass:
    """Returns the pass that collects rows; all that is collected shares it."""
    for each in batch.earlier_passes:
        if each.is_joint == is_joint:
            return each
    first = Pass(is_joint=is_joint)
    if is_joint:
        first.exchange = make_exchange(batch)
    batch.earlier_passes.append(first)
    return first


def collect(
    batch: WholeBatch,
    of: Pass,
    tensors: list[tf.Tensor],
    axes: list[int] | None = None,
) -> list[tf.Tensor]:
    """Stores rows of each micro-batch; returns those of all, in a later run.

    Args:
        batch: The batch.
        of: The pass.
        tensors: Tensors with as many rows for each example as for any other.
        axes: The axis of each tensor that has the rows; None is the first, which must
            have one row for each example.
    """
    slots, writes, is_one_row = [], [], axes is None
    axes = axes or [0] * len(tensors)
    with tf.device("/cpu:0"):
        for tensor, axis in zip(tensors, axes, strict=True):
            shape = tensor.shape
            if shape.rank is not None:
                dims = shape.as_list()
                shape = tf.TensorShape([*dims[:axis], None, *dims[axis + 1 :]])
            slot = Slot("outputs", tensor.dtype, shape)
            slots.append(slot)
            writes.append(_write_rows(slot, tensor, axis, batch, is_one_row))
            nothing = [n or 0 for n in shape.as_list()] if shape.rank else [0]
            of.empty.append(slot.write(tf.zeros(nothing, tensor.dtype)))
        of.each += writes
        batch.handles += [slot.handle for slot in slots]
        with _when_done(batch, of, writes):
            return [slot.read() for slot in slots]


def keep(
    batch: WholeBatch, of: Pass, name: str, values: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Stores values after a pass; returns them, for a later run."""
    with tf.device("/cpu:0"):
        slots = [Slot(name, value.dtype, value.shape) for value in values]
        writes = [s.write(v) for s, v in zip(slots, values, strict=True)]
        of.after += writes
        batch.handles += [slot.handle for slot in slots]
        # An evaluation reads the loss also on a replica that has never had examples.
        batch.initialize_ops += [
            slot.write(tf.zeros([], value.dtype))
            for slot, value in zip(slots, values, strict=True)
            if value.shape.rank == 0
        ]
        with _when_done(batch, of, writes):
            kept = [slot.read() for slot in slots]
    for read, value in zip(kept, values, strict=True):
        read.set_shape(value.shape)
    return kept


def rows_of_micro_batch(batch: WholeBatch, whole: tf.Tensor, axis: int) -> tf.Tensor:
    """Returns the micro-batch's rows of a tensor of the whole batch."""
    each = tf.shape(whole, out_type=tf.int64)[axis] // batch.rows
    begin, end = batch.begin * each, (batch.begin + batch.size) * each
    return whole[(*[slice(None)] * axis, slice(begin, end))]


def _write_rows(
    slot: Slot, tensor: tf.Tensor, axis: int, batch: WholeBatch, is_one_row: bool
) -> tf.Operation:
    """Stores a micro-batch's rows at their place in the batch."""
    shape = tf.shape(tensor, out_type=tf.int64)
    each = tf.constant(1, tf.int64) if is_one_row else shape[axis] // batch.size
    whole = tf.concat([shape[:axis], [batch.rows * each], shape[axis + 1 :]], 0)
    begun = run_either(
        batch.is_first, lambda: [slot.write(tf.zeros(whole, tensor.dtype))], list
    )
    with tf.control_dependencies([begun]):
        # The first micro-batch decides: a row of another shape would be broadcast.
        first = tf.raw_ops.VariableShape(input=slot.handle, out_type=tf.int64)
        each = first[axis] // batch.rows
        expected = tf.concat([first[:axis], [batch.size * each], first[axis + 1 :]], 0)
        fits = tf.raw_ops.Assert(
            condition=tf.reduce_all(tf.equal(shape, expected)),
            data=[
                f"{_ONE_ROW} Received: {tensor.name} of shape",
                shape,
                "in place of",
                expected,
                "Reshape it, or pad all micro-batches alike.",
            ],
            summarize=10,
        )
    before = [tf.constant(0, tf.int64)] * axis
    with tf.control_dependencies([fits]):
        return tf.raw_ops.ResourceStridedSliceAssign(
            ref=slot.handle,
            begin=[*before, batch.begin * each],
            end=[*before, (batch.begin + batch.size) * each],
            strides=[tf.constant(1, tf.int64)] * (axis + 1),
            begin_mask=2**axis - 1,
            end_mask=2**axis - 1,
            value=tensor,
        )


def _when_done(batch: WholeBatch, of: Pass, operations: list[tf.Operation]):
    """Returns the context for what follows `operations`, in a later run or in theirs."""
    if of.is_joint or of is batch.last_pass:
        return tf.control_dependencies([])
    with tf.control_dependencies(operations):
        default = tf.constant(True)
    done = tf.compat.v1.placeholder_with_default(default, [], "done")
    of.done[done] = True
    # A feed takes the place of a tensor, not of its operation: to wait for that, or for
    # what the graph's optimizer makes a part of it, would run `operations` again.
    with tf.device("/cpu:0"):
        waiting = Slot("done", tf.bool, tf.TensorShape([]))
        batch.handles.append(waiting.handle)
        return tf.control_dependencies([waiting.write(done)])
