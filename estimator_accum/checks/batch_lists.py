"""Sparse or ragged tensors of a batch, as tables with a row for each example.

    table[n, length], is_there[n, length]    ->    the entries that are there, in order

An element of a data set has such a tensor in one piece, which tells no number of
examples. So an analysis gets tables in its place, which have a row for each example.
"""

import tensorflow as tf

from estimator_accum.graph.names import BATCHES

_RAGGED = "RaggedTensorFromVariant"


def is_list_of_batch(operation: tf.Operation) -> bool:
    """Returns whether an operation results in a sparse or ragged tensor of a batch.

    Each example has one list, and no lists in it.
    """
    first, kind = operation.outputs[:1], operation.type
    is_ragged = kind == _RAGGED and len(operation.outputs) == 2
    is_sparse = kind == "DeserializeSparse" and first[0].shape[-1:] == [2]
    return (is_ragged or is_sparse) and operation.inputs[0].op.type in BATCHES


def list_from_tables(
    operation: tf.Operation,
) -> tuple[list[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Computes the results of an operation from tables.

    Args:
        operation: An operation of another graph, for which `is_list_of_batch` holds.

    Returns:
        Results; the placeholders of the table and of which entries are there.
    """
    values = operation.outputs[1]
    with tf.name_scope("tables_of_batch"):
        shape = [None, None, *values.shape[1:]]
        table = tf.compat.v1.placeholder(values.dtype, shape)
        is_there = tf.compat.v1.placeholder(tf.bool, [None, None])
        places = tf.where(is_there)
        entries = tf.gather_nd(table, places)
        lengths = tf.reduce_sum(tf.cast(is_there, operation.outputs[0].dtype), 1)
        begins = tf.concat([tf.zeros_like(lengths[:1]), tf.cumsum(lengths)], 0)
    # Under the same name, since a sentence may tell it.
    _, entries = tf.raw_ops.IdentityN(input=[entries] * 2, name=operation.name)
    if operation.type == _RAGGED:
        return [begins, entries], (table, is_there)
    return [places, entries, tf.shape(is_there, tf.int64)], (table, is_there)
