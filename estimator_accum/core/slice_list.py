"""A window's sparse gradient on a worker of parameter servers: a list of slices.

    every micro-step:   rows = rows + its rows,  values = values + its values
    at the boundary:    each row once, its values added up in their order

A table of the variable's size on each worker, as `Accumulator` keeps it, would take the
memory of the whole embedding there, and time to look for the touched rows in it. A list
takes that of the slices.
"""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum.graph.variables import create_variable, read


class SliceList(NamedTuple):
    """The slices of one variable's weighted gradients in the open window.

    Attributes:
        total: Values of the slices, [slices, ...].
        touched: Row of each slice, int64 [slices].
        shape: Static shape of the trained variable.
    """

    total: tf.Variable
    touched: tf.Variable
    shape: tf.TensorShape


def create_slice_list(name: str, shape, dtype: tf.DType, **options) -> SliceList:
    """Creates `<name>` and `<name>_rows`, empty.

    Args:
        name: Its name from the graph's root.
        shape: The trained variable's static shape.
        dtype: Dtype of the sum.
        **options: Further arguments of `create_variable`.
    """
    total = create_variable(name, [None, *shape[1:]], dtype, **options)
    rows = create_variable(f"{name}_rows", [None], tf.int64, **options)
    return SliceList(total, rows, shape)


def append(slices: SliceList, gradient: tf.IndexedSlices) -> list[tf.Operation]:
    """Adds a micro-batch's slices; returns the operations that write."""
    rows = tf.cast(gradient.indices, tf.int64)
    values = tf.concat([read(slices.total), gradient.values], 0)
    rows = tf.concat([read(slices.touched), rows], 0)
    with tf.control_dependencies([values, rows]):
        return _assign(slices, values, rows)


def take(slices: SliceList) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns (values of the sum, their rows), each row once and in order."""
    values, rows = read(slices.total), read(slices.touched)
    order = tf.argsort(rows, stable=True)
    rows, segments = tf.unique(tf.gather(rows, order))
    return tf.math.segment_sum(tf.gather(values, order), segments), rows


def clear(slices: SliceList) -> list[tf.Operation]:
    """Empties the list; returns the operations that write."""
    shape = [size or 0 for size in slices.total.shape.as_list()]
    values = tf.zeros(shape, slices.total.dtype)
    return _assign(slices, values, tf.zeros([0], tf.int64))


def _assign(slices: SliceList, values: tf.Tensor, rows: tf.Tensor):
    return [
        tf.raw_ops.AssignVariableOp(resource=slices.total.handle, value=values),
        tf.raw_ops.AssignVariableOp(resource=slices.touched.handle, value=rows),
    ]
