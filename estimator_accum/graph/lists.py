"""Shapes of copies of lists, which loops of TensorFlow 2 fill.

A copy of a list has the shape of its items joined; while none is set, their number.
"""

import tensorflow as tf

OF_LISTS = {f"TensorList{kind}" for kind in ("GetItem", "Reserve", "SetItem", "Stack")}
OF_LISTS |= {"TensorListFromTensor"}


def list_shape(
    operation: tf.Operation, inputs: list[tf.Tensor], number, claimed: tf.TensorShape
) -> tf.TensorShape:
    """Returns the shape of a list, of an item, or of all items joined.

    Args:
        operation: An operation of `OF_LISTS`, or a sum of lists.
        inputs: Copies of its inputs.
        number: The number of items of a list that it makes; None if unknown.
        claimed: The shape of its output, as far as it is that of the copy.
    """
    (output,), (first, *others) = operation.outputs, inputs
    kind, shape = operation.type, first.shape
    if kind == "TensorListReserve":
        shape = tf.TensorShape([None if number is None else int(number)])
    elif kind == "AddN":
        for copy in others:
            shape = shape.most_specific_common_supertype([copy.shape])
    elif kind == "TensorListSetItem" and shape.rank:
        grows = operation.node_def.attr["resize_if_index_out_of_bounds"].b
        length = tf.TensorShape([None]) if grows else shape[:1]
        shape = common_shape(first, length.concatenate(others[1].shape))
    elif output.dtype != tf.variant:  # the item, or all
        joined = shape if shape.rank and shape.rank > 1 else tf.TensorShape(None)
        if kind == "TensorListGetItem":
            joined = joined[1:]
        if kind == "TensorListStack" and claimed.rank:
            claimed = tf.TensorShape([None, *claimed[1:]])
        shape = claimed.merge_with(joined)
    return shape


def common_shape(tensor: tf.Tensor, shape: tf.TensorShape) -> tf.TensorShape:
    """Returns the sizes that a tensor's shape and another one have in common.

    Args:
        tensor: The tensor; a list without items takes the shape of the first.
        shape: The other one.
    """
    before = tensor.shape
    if tensor.dtype == tf.variant and before.rank == 1:
        before = before.concatenate(shape[1:])
    return before.most_specific_common_supertype([shape])


def is_same_shape(one: tf.TensorShape, other: tf.TensorShape) -> bool:
    """Returns whether shapes are the same, unknown sizes included."""
    return str(one) == str(other)
