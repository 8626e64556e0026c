"""Sparse gradients: their sum over the batch, or all their slices if those are looked at.

A sparse gradient is the sum over the rows that the batch touched. Code that looks at
the slices of one row separately gets them: `tf.global_norm` their norm, which is summed
as well, anything else the slices themselves, as they are from the unsplit batch:

    places computed from examples    the slices of all micro-batches, one after the other
    places that tf.unique returns    one slice a place, the sum of all
    places of no example             the sums of the slices at their places

as for `tf.gather`, for `tf.nn.embedding_lookup_sparse` and for positions.
"""

import re
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.gradients import cast
from estimator_accum.graph.copies import change_input, replace
from estimator_accum.graph.lookups import (
    SUMMING,
    UNIQUE,
    are_distinct,
    joined_tensors,
    moved_places,
    source_of_places,
)
from estimator_accum.graph.walks import data_ancestors, data_descendants
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.own_optimizer.gradient_sums import SliceSum, add_to_sums
from estimator_accum.microbatch.own_optimizer.head import View
from estimator_accum.microbatch.staging import Slot
from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.states import FIXED

# Operations whose result does not depend on the order of rows.
_UPDATING = re.compile(r"(Resource)?(Scatter|SparseApply)")
_IN_ANY_ORDER = {
    *("All", "Any", "L2Loss", "Max", "Mean", "Min", "Prod", "Sum"),
    "UnsortedSegmentSum",
}
_PASSING = {"Cast", "Identity", "Neg"}
_SCALING = {"Mul", "RealDiv"}


class Piece(NamedTuple):
    """Slices of one lookup of a variable, in a micro-batch.

    Attributes:
        values: The slices.
        indices: Their places.
        kind: "joined", "distinct" or "fixed", by the origin of the places.
    """

    values: tf.Tensor
    indices: tf.Tensor
    kind: str


def add_slices(batch: WholeBatch, slice_sum: SliceSum) -> list[tf.Operation]:
    """Adds a sparse gradient, when all that uses its sum is in the graph.

    Args:
        batch: The batch, whose micro-batches add it.
        slice_sum: Its sum.

    Returns:
        Operations that run after the sum is read.
    """
    norms, gradient = _norms(slice_sum.total), slice_sum.gradient
    # Only who looks at slices sees how many there are.
    pieces = [] if norms == [] else _pieces(batch, gradient)
    if norms is None or any(piece.kind != "joined" for piece in pieces):
        _keep_slices(batch, slice_sum.total, pieces)
        return []
    accumulator = slice_sum.accumulator
    gradient = cast(gradient, accumulator.total.dtype)
    add_to_sums(batch, [accumulator], [gradient])
    batch.works.add(roll_back=slice_sum.clear)
    if norms:
        _replace_norms(batch, slice_sum, norms)
    return slice_sum.clear


def _replace_norms(
    batch: WholeBatch, slice_sum: SliceSum, norms: list[tf.Operation]
) -> None:
    """Replaces L2Loss of the sum by the sum of L2Loss of the slices."""
    values = cast(slice_sum.gradient, slice_sum.total.values.dtype).values
    half = batch.works.slot("half_squared_slices", values.dtype)
    with tf.control_dependencies(None):
        zero = tf.zeros([], values.dtype)
        total = half.read()
    _add_zeros(batch, half, zero)
    before = tf.where(batch.is_first, zero, half.read())
    add = half.write(before + tf.nn.l2_loss(values))
    batch.works.add(micro_ops=[add])
    for norm in norms:
        replace(norm.outputs[0], total)


def _pieces(batch: WholeBatch, gradient: tf.IndexedSlices) -> list[Piece]:
    """Returns the slices of each lookup of a variable."""
    values, indices = [gradient.values], [gradient.indices]
    parts = [joined_tensors(tensor) for tensor in (values[0], indices[0])]
    if len(parts[0]) == len(parts[1]):
        values, indices = parts
    view = View(batch, indices)
    pairs = zip(values, indices, strict=True)
    return [Piece(*pair, _kind(view, pair[1])) for pair in pairs]


def _kind(view: View, indices: tf.Tensor) -> str:
    """Returns how slices of micro-batches become those of the batch."""
    if view.state(indices).kind == "fixed":
        return "fixed"
    places = source_of_places(indices)
    while (unmoved := moved_places(places.op)) is not None:
        places = source_of_places(unmoved)
    if are_distinct(places):
        return "distinct"
    if any(op.type in UNIQUE for op in data_ancestors([places.op])):
        raise ValueError(
            "Slices of a gradient that are looked at must be at places that the features "
            "have or tf.unique returns. Received: places that "
            f"{places.op.name} of type {places.op.type} computes from those of tf.unique. "
            "Look up the features, or make the gradient dense first, by "
            "tf.convert_to_tensor."
        )
    return "joined"


def _keep_slices(
    batch: WholeBatch, total: tf.IndexedSlices, pieces: list[Piece]
) -> None:
    """Makes the sum the slices that the unsplit batch has."""
    wholes, columns = (total.values, total.indices), []
    for piece in pieces:
        values = tf.cast(piece.values, total.values.dtype)
        indices = tf.cast(piece.indices, total.indices.dtype)
        is_fixed = piece.kind == "fixed"
        kept = [
            _kept(batch, values, total.values, is_fixed),
            _kept(batch, indices, total.indices, False),
        ]
        with tf.control_dependencies(None):
            if is_fixed:  # the same in each micro-batch
                kept[1] = kept[1][: tf.shape(kept[0])[0]]
            elif piece.kind == "distinct":
                rows, places = tf.unique(kept[1])
                number = tf.size(rows)
                sums = tf.math.unsorted_segment_sum(kept[0], places, number)
                kept = [sums, rows]
        columns.append(kept)
    for whole, parts in zip(wholes, zip(*columns, strict=True), strict=True):
        with tf.control_dependencies(None):
            joined = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
        change_input(whole.op, 0, joined)


def _kept(
    batch: WholeBatch, part: tf.Tensor, whole: tf.Tensor, is_sum: bool
) -> tf.Tensor:
    """Returns parts of all micro-batches for a later run, added up or joined."""
    slot = batch.works.slot("slices", whole.dtype, whole.shape)
    with tf.control_dependencies(None):
        zero = tf.zeros([0, *whole.shape[1:]], whole.dtype)
        _add_zeros(batch, slot, zero)
        kept = slot.read()
    before = slot.read()
    size = tf.where(batch.is_first, 0, tf.shape(before)[0])
    if is_sum:
        value = part + tf.concat([before[:size], tf.zeros_like(part)[size:]], 0)
    else:
        value = tf.concat([before[:size], part], 0)
    batch.works.add(micro_ops=[slot.write(value)])
    return kept


def _add_zeros(batch: WholeBatch, slot: Slot, zero: tf.Tensor) -> None:
    """Has `zero` written to a slot where there are no micro-batches."""
    with tf.control_dependencies(None):
        batch.works.add(initialize=[slot.write(zero)], empty=[slot.write(zero)])


@tf.autograph.experimental.do_not_convert  # see make_accumulating_train_op
def _norms(total: tf.IndexedSlices) -> list[tf.Operation] | None:
    """Returns the L2Loss operations of a sum's values; None if it has other users.

    Users that add up the slices of each row do not count.
    """
    norms, adding, waiting = [], set(), [total.values]
    while waiting:
        tensor = waiting.pop()
        for user in tensor.consumers():
            if user.type == "L2Loss" and tensor.name == total.values.name:
                norms.append(user)
            elif _is_passed_on(user) or _is_scaled(user, tensor):
                waiting += user.outputs
            elif _reads(user, tensor, 0):
                adding.add(user)
            else:
                return None
    adding_by_row, rows, waiting = set(), [], [total.indices]
    while waiting:
        tensor = waiting.pop()
        for user in tensor.consumers():
            if _is_passed_on(user):
                waiting += user.outputs
            elif user.type == "Unique" and tensor.op.type != "Unique":
                rows.append(user.outputs[0])
                waiting.append(user.outputs[1])
            elif _reads(user, tensor, 1):
                adding_by_row.add(user)
                rows += user.outputs if tensor.op.type == "Unique" else []
            else:
                return None
    return norms if adding == adding_by_row and _are_in_any_order(rows) else None


def _reads(user: tf.Operation, tensor: tf.Tensor, place: int) -> bool:
    """Returns whether `user` adds up slices, and reads `tensor` as these, or as rows."""
    if user.type not in SUMMING:
        return False
    places = [i for i, read in enumerate(user.inputs) if read.name == tensor.name]
    return places == [SUMMING[user.type][place]]


def _are_in_any_order(rows: list[tf.Tensor]) -> bool:
    """Returns whether all that is computed from rows is the same in another order.

    Rows that nothing reads may be results.

    Args:
        rows: Numbers of rows, each once, and their values.
    """
    users = data_descendants(rows, lambda user: not _UPDATING.match(user.type))
    states = {}
    while True:
        analysis = Analysis(rows, states=states)
        analysis.analyze([output for user in users for output in user.outputs])
        mixing = {origin.operation for origin in analysis.origins}
        sums = {op for op in mixing & users if op.type in _IN_ANY_ORDER}
        if not sums:
            shown = [t for op in users if not _is_read(op) for t in op.outputs]
            return not mixing and all(analysis.state(t) == FIXED for t in shown)
        states |= {output.ref(): FIXED for op in sums for output in op.outputs}


def _is_passed_on(user: tf.Operation) -> bool:
    """Returns whether `user` passes on a tensor, to another operation."""
    return user.type in _PASSING and _is_read(user)


def _is_read(operation: tf.Operation) -> bool:
    """Returns whether another operation reads an output; if not, it may be a result."""
    return any(output.consumers() for output in operation.outputs)


def _is_scaled(user: tf.Operation, tensor: tf.Tensor) -> bool:
    """Returns whether `user` multiplies `tensor` by a scalar."""
    if user.type not in _SCALING or user.inputs[0].name != tensor.name:
        others = list(user.inputs)[:1] if user.type == "Mul" else []
    else:
        others = list(user.inputs)[1:]
    return bool(others) and others[0].shape.rank == 0 and _is_read(user)
