"""Places of sparse gradients' slices, which lookups decide."""

import tensorflow as tf

_PASSING = ("Cast", "Identity", "Reshape")
UNIQUE = ("Unique", "UniqueV2")


def source_of_places(indices: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose values are places, in other types or shapes."""
    while indices.op.type in _PASSING:
        indices = indices.op.inputs[0]
    return indices


def joined_tensors(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors that are joined along the first axis; one that is not, alone."""
    operation = tensor.op
    if operation.type == "Identity":
        return joined_tensors(operation.inputs[0])
    if operation.type == "ConcatV2":
        *parts, axis = operation.inputs
        if tf.get_static_value(axis) == 0:
            return [joined for part in parts for joined in joined_tensors(part)]
    return [tensor]


def are_distinct(places: tf.Tensor) -> bool:
    """Returns whether `tf.unique` has returned places, from `source_of_places`."""
    return places.op.type in UNIQUE and places.value_index == 0
