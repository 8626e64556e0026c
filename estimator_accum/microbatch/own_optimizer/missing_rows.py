"""Rows of examples without entries, at the end of a micro-batch.

A reduction of a sparse tensor by segments has as many rows as its last entry says: none
for examples behind it. In a batch these are an error, in the middle of it they are rows
of zeros. So each micro-batch gets the rows that it is without:

    tf.concat([rows, tf.zeros(...)], 0)[:number of examples]
"""

import tensorflow as tf

from estimator_accum.graph.copies import replace
from estimator_accum.graph.internals import context_of
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.own_optimizer.head import View, of_batch
from estimator_accum.rows.declaration import ADDED_ATTRIBUTE, ROWS_ATTRIBUTE
from estimator_accum.rows.guards import LastEntry
from estimator_accum.rows.sizes import Size

_REDUCTIONS = {
    *("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd"),
    *("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN"),
}


def add_missing_rows(batch: WholeBatch, seen: View | None = None) -> None:
    """Adds rows to the reductions of a micro-batch's graph that may be without some.

    Args:
        batch: The batch.
        seen: An analysis of the graph, perhaps of a part of it.
    """
    while True:  # one may read another
        of_micro_batch = of_batch(batch) if seen is None else seen.of_batch
        operations = [op for op in of_micro_batch if op.type in _REDUCTIONS]
        if not operations:
            return
        if seen is not None and all(map(seen.analysis.has_seen, operations)):
            view, seen = seen, None
        else:
            operations.sort(key=lambda operation: operation.name)
            view = View(batch, [operation.outputs[0] for operation in operations])
        short = {op: n for op, n in view.analysis.short.items() if _can_add(op, n)}
        if not short:
            return
        for operation, span in short.items():
            with tf.control_dependencies(None):
                _add(batch, operation, int(span))


def _can_add(operation: tf.Operation, span: Size) -> bool:
    shape = operation.outputs[0].shape
    has_sizes = shape.rank is not None and shape[1:].is_fully_defined()
    return has_sizes and not span.symbols and context_of(operation) is None


def _add(batch: WholeBatch, operation: tf.Operation, span: int) -> None:
    (tensor,) = operation.outputs
    readers = tensor.consumers()
    number = batch.size * span
    # As TensorFlow computes them for examples before others.
    fill = tf.ones if operation.type.endswith("Prod") else tf.zeros
    joined = tf.concat([tensor, fill([number, *tensor.shape[1:]], tensor.dtype)], 0)
    rows = joined[:number]
    numbers = operation.inputs[2 if operation.type.startswith("Sparse") else 1]
    is_last = tf.equal(batch.begin + batch.size, batch.rows)
    setattr(joined.op, ADDED_ATTRIBUTE, LastEntry(numbers, number, is_last))
    setattr(rows.op, ROWS_ATTRIBUTE, Size(span))
    replace(tensor, rows, readers)
