"""Parts of rows that depend on other examples, up to where they do no longer.

A reduction over segments has no row behind the last entry. `SequenceFeatures` adds zeros:

    lengths = tf.math.segment_max(columns + 1, numbers)
    tf.concat([lengths, tf.zeros(tf.shape(ids)[:1] - tf.shape(lengths)[:1])], 0)

A sparse matrix may be as wide as its longest row. `indicator_column` adds nothing for
the columns that are filled up:

    tf.reduce_sum(tf.one_hot(tf.sparse.to_dense(ids, -1), depth), 1)
"""

import numpy as np
import tensorflow as tf

from estimator_accum.rows.sizes import Size
from estimator_accum.rows.states import FIXED

# A row without entries is 0 after them, too, as a row that is added.
_KEEPING_ZERO = {"Cast", "Ceil", "Floor", "Identity", "Mul", "RealDiv"}
_SAME_VALUE = {"Cast", "Identity", "Reshape"}


def padding_of(
    analysis, operation: tf.Operation, number: Size
) -> list[tf.Operation] | None:
    """Returns the operations from a reduction to the one that adds missing rows.

    Args:
        analysis: The analysis.
        operation: The reduction.
        number: Number of all rows.

    Returns:
        The operations, the concatenation last; None if nothing adds missing rows.
    """
    (tensor,) = operation.outputs
    if operation.type.endswith("Prod"):  # of no entry it is 1
        return None
    between = []
    while True:
        users = {user for user in tensor.consumers()}
        joins = [user for user in users if user.type == "ConcatV2"]
        if joins:
            break
        if len(users) != 1 or not _keeps_zero(*users):
            return None
        (user,) = users
        between.append(user)
        (tensor,) = user.outputs
    lengths = _length_of_padding(analysis, joins[0], tensor, number)
    is_alone = users <= {joins[0], *(lengths or ())}
    return [*between, *lengths, joins[0]] if lengths and is_alone else None


def sum_of_columns(analysis, operation: tf.Operation) -> list[tf.Operation] | None:
    """Returns the operations from a dense matrix of integers to the sum of its columns.

    Args:
        analysis: The analysis.
        operation: The SparseToDense operation.

    Returns:
        The operations, the sum last; None if columns that are filled up may count.
    """
    default = tf.get_static_value(operation.inputs[3])
    hot = _only_user(operation)
    if default is None or hot is None or hot.type != "OneHot" or default >= 0:
        return None
    total, off = _only_user(hot), tf.get_static_value(hot.inputs[3])
    is_last = hot.get_attr("axis") in (-1, 2) and hot.inputs[0] is operation.outputs[0]
    are_fixed = all(analysis.state(tensor) == FIXED for tensor in [*hot.inputs][1:])
    if not (is_last and are_fixed and off == 0) or total is None:
        return None
    if total.type != "Sum" or total.get_attr("keep_dims"):
        return None
    axes = tf.get_static_value(total.inputs[1])
    is_over_columns = axes is not None and [*np.ravel(axes)] in ([1], [-2])
    return [hot, total] if is_over_columns else None


def _only_user(operation: tf.Operation) -> tf.Operation | None:
    users = {*operation.outputs[0].consumers()}
    return users.pop() if len(users) == 1 else None


def _keeps_zero(operation: tf.Operation) -> bool:
    if operation.type not in _KEEPING_ZERO:
        return False
    factors = [tf.get_static_value(tensor) for tensor in list(operation.inputs)[1:]]
    return all(f is not None and np.all(np.isfinite(f) & (f != 0)) for f in factors)


def _length_of_padding(
    analysis, join: tf.Operation, tensor: tf.Tensor, number: Size
) -> list[tf.Operation] | None:
    """Returns the operations of zeros that a tensor is padded with to a number of rows."""
    first, *others, axis = join.inputs
    if first is not tensor or len(others) != 1 or tf.get_static_value(axis) != 0:
        return None
    fill = others[0].op
    if fill.type != "Fill" or not _is_zero(fill.inputs[1]):
        return None
    length, between = fill.inputs[0].op, [fill]
    while length.type in _SAME_VALUE:
        between.append(length)
        length = length.inputs[0].op
    if length.type != "Sub":
        return None
    rows, received = length.inputs
    value, part = analysis.value(rows), received.op
    is_number = (
        value is not None and [*value.flat] == [number] and tensor.shape.rank == 1
    )
    if (
        not is_number
        or part.type != "StridedSlice"
        or part.inputs[0].op.type != "Shape"
    ):
        return None
    shape = part.inputs[0].op
    return (
        [shape, part, length, *reversed(between)] if shape.inputs[0] is tensor else None
    )


def _is_zero(tensor: tf.Tensor) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and not np.any(value)
