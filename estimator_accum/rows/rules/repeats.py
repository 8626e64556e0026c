"""Rules of rows that are repeated, each as often as its own number says.

    tf.repeat(x, lengths, axis=0)

TensorFlow repeats all rows as often as the largest number says, and keeps those that are
needed, row by row:

    most = tf.maximum(0, tf.reduce_max(lengths))
    tf.boolean_mask(tf.tile(x[:, None], [1, most]), tf.range(most) < lengths[:, None])
"""

import numpy as np
import tensorflow as tf

from estimator_accum.graph.computations import computation_of
from estimator_accum.rows.rules.blocks import blocks_of
from estimator_accum.rows.rules.entries import are_rows, may_be_place, set_entries
from estimator_accum.rows.rules.row_splits import list_of_lengths, without_copies
from estimator_accum.rows.rules.table import RULES_OF_MIXED, rule
from estimator_accum.rows.states import State


@rule("GatherV2", table=RULES_OF_MIXED)
def _repeat(analysis, operation, states) -> State | None:
    """Returns the state of repeated rows; None of another lookup."""
    parts = _parts_of_repeat(operation)
    if parts is None:
        return None
    rows, lengths = parts
    state, numbers = map(analysis.state, parts)
    lengths = without_copies(analysis, lengths)
    name = list_of_lengths(analysis, lengths)
    is_own = (state.axis, state.span) == (numbers.axis, numbers.span)
    if state.kind == "rows" and are_rows(numbers) and is_own and not state.is_first:
        if not may_be_place(rows, state):
            return None
        result = State("entries", 0, distance=state.distance)
    elif state.kind == numbers.kind == "entries" and not numbers.is_place:
        if state.of != numbers.of or state.distance is not None or state.is_first:
            return None
        if blocks_of(state.of) is not None:  # not in the order of the examples
            return None
        result = State("entries", 0, places=state.places)
    else:
        return None
    if name is None:
        name = analysis.name_of_list(operation, computation_of(lengths))
    tail = analysis.dims(rows)[1:]
    return set_entries(analysis, operation.outputs[0], result._replace(of=name), *tail)


def _parts_of_repeat(operation: tf.Operation) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Returns the rows that are repeated, and how often; None of another lookup."""
    flat, places, axis = operation.inputs
    if operation.get_attr("batch_dims") or tf.get_static_value(axis) != 0:
        return None
    where = _source(places, "Squeeze", "Where")
    wide, mask = _source(flat, "Reshape"), where and _source(where.inputs[0], "Reshape")
    if wide is None or mask is None:
        return None
    tile, less = wide.inputs[0].op, mask.inputs[0].op
    if tile.type != "Tile" or less.type != "Less" or mask.outputs[0].shape.rank != 1:
        return None
    if not _joins_two_axes(tile.outputs[0], flat):
        return None
    one_row, columns = tile.inputs[0].op, less.inputs[0].op
    lengths = _without_casts(less.inputs[1]).op
    if {one_row.type, lengths.type} != {"ExpandDims"} or columns.type != "Range":
        return None
    if tf.get_static_value(one_row.inputs[1]) != 1 or not _adds_last(lengths):
        return None
    rows, numbers = one_row.inputs[0], lengths.inputs[0]
    start, most, step = columns.inputs
    if (tf.get_static_value(start), tf.get_static_value(step)) != (0, 1):
        return None
    is_most = _is_largest(most, numbers) and numbers.shape.rank == 1
    return (rows, numbers) if is_most and _times(tile.inputs[1], most) else None


def _source(tensor: tf.Tensor, *kinds: str) -> tf.Operation | None:
    """Returns the last of some operations, each of which the one before reads first."""
    for i, kind in enumerate(kinds):
        tensor = tensor.op.inputs[0] if i else tensor
        if tensor.op.type != kind:
            return None
    return tensor.op


def _without_casts(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Cast" and tensor.dtype in (tf.int32, tf.int64):
        (tensor,) = tensor.op.inputs
    return tensor


def _joins_two_axes(tensor: tf.Tensor, flat: tf.Tensor) -> bool:
    """Returns whether `flat` is a tensor whose first two axes are one."""
    if tensor.shape.rank is None or flat.shape.rank != tensor.shape.rank - 1:
        return False
    tail = tensor.shape[2:]
    return tail.is_fully_defined() and tail == flat.shape[1:]


def _adds_last(operation: tf.Operation) -> bool:
    axis = tf.get_static_value(operation.inputs[1])
    return axis is not None and int(np.ravel(axis)[0]) in (1, -1)


def _is_largest(most: tf.Tensor, numbers: tf.Tensor) -> bool:
    """Returns whether a number is the largest one, or 0 if that is negative."""
    operation = _without_casts(most).op
    if operation.type != "Maximum":
        return False
    zero, largest = operation.inputs
    if tf.get_static_value(zero) != 0 or largest.op.type != "Max":
        return False
    values, axes = largest.op.inputs
    axes = tf.get_static_value(axes)
    is_of_all = axes is not None and [*np.ravel(axes)] in ([0], [-1])
    return is_of_all and _without_casts(values) is _without_casts(numbers)


def _times(multiples: tf.Tensor, most: tf.Tensor) -> bool:
    """Returns whether the second axis is repeated as often as a number says."""
    operation = multiples.op
    if operation.type != "Pack":
        return False
    first, second, *others = operation.inputs
    ones = [tf.get_static_value(tensor) for tensor in (first, *others)]
    are_ones = all(one is not None and one == 1 for one in ones)
    return are_ones and _without_casts(second) is _without_casts(most)
