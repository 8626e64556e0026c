"""Slices of sparse gradients: the number of them in a row, from the lookup's places."""

import numpy as np
import tensorflow as tf

from estimator_accum.graph.functions import functions_of, library_of_functions, nodes_of
from estimator_accum.graph.names import CALLERS
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.graph.writers import varying

_PASSING = ("Cast", "Identity", "Reshape")
_UNIQUE = ("Unique", "UniqueV2")


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
    return places.op.type in _UNIQUE and places.value_index == 0


def has_one_slice_a_row(gradient: tf.IndexedSlices) -> bool | None:
    """Returns whether a batch at once has one slice for each row that it looks up.

    Returns:
        True as for `tf.nn.embedding_lookup_sparse`; False if there is one for each
        look-up, as for `tf.gather`; None if it is unknown, or true of a part.
    """
    pieces = [source_of_places(i) for i in joined_tensors(gradient.indices)]
    are_single = {_is_single(places) for places in pieces}
    if are_single == {False}:
        return False
    return True if are_single == {True} and len(pieces) == 1 else None


def _is_single(places: tf.Tensor) -> bool | None:
    if are_distinct(places) or places.op.type == "Range":
        return True
    value = tf.get_static_value(places)
    if value is not None and len(np.unique(value)) == value.size:
        return True
    needed = data_ancestors([places.op])
    if not varying(needed):  # places of no example, perhaps several times the same
        return None
    if places.op.type in CALLERS:
        functions = [f for op in needed if op.type in CALLERS for f in functions_of(op)]
        kinds = {node.op for node in nodes_of(functions, library_of_functions())}
        return None if kinds & {*_UNIQUE} else False
    return False
