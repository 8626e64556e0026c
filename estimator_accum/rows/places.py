"""Places of a variable's lookups: other ones in each micro-batch, or always the same."""

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from estimator_accum.graph.functions import kinds_in, library_of_functions
from estimator_accum.graph.internals import captures_of
from estimator_accum.graph.lookups import (
    UNIQUE,
    are_distinct,
    joined_tensors,
    moved_places,
    source_of_places,
)
from estimator_accum.graph.names import BATCHES, CALLERS, FED, SHAPES, TAKING_A_BATCH
from estimator_accum.graph.walks import data_ancestors, walk
from estimator_accum.graph.writers import varying
from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.states import NO_RULE

# Operations whose values are no values of an example, whatever they read.
_OF_NO_EXAMPLE = {*SHAPES, "Range"}
# Operations whose results are elements of their first input, each at most once.
_CHOOSING = {
    *("Cast", "ExpandDims", "Identity", "Reshape", "Slice", "Squeeze", "StridedSlice"),
    "Transpose",
}
_TAKING_PARTS = {"GatherV2", "Slice", "Split", "SplitV", "StridedSlice", "Unpack"}


def has_one_slice_a_row(
    gradient: tf.IndexedSlices, parts: Iterable[tf.Tensor] = ()
) -> bool | None:
    """Returns whether an unsplit batch has one slice for each row that it looks up.

    Args:
        gradient: The gradient of a micro-batch.
        parts: Tensors of the micro-batch, beside those that a session.run brings.

    Returns:
        True as for `tf.nn.embedding_lookup_sparse`; False if there is one for each
        lookup, as for `tf.gather`; None if it is unknown, or true of a part.
    """
    pieces = joined_tensors(gradient.indices)
    are_single = {_is_single(source_of_places(piece), parts) for piece in pieces}
    if are_single == {False}:
        return False
    return True if are_single == {True} and len(pieces) == 1 else None


def _is_single(places: tf.Tensor, parts: Iterable[tf.Tensor]) -> bool | None:
    if are_distinct(places) or _is_range(places):
        return True
    value = tf.get_static_value(places)
    if value is not None and len(np.unique(value)) == value.size:
        return True
    return False if _are_of_examples(places, parts) else None


def _are_of_examples(places: tf.Tensor, parts: Iterable[tf.Tensor]) -> bool:
    """Returns whether a batch's places are its micro-batches', one after the other.

    The alternative is places of no example, perhaps several times the same.
    """
    analysis = _analysis_of(places, parts)
    kind = analysis.state(places).kind
    behind = _tensors_behind(analysis, places)
    # Another micro-batch may have the same places as one that looks each up once.
    kinds = map(_kinds_in, {tensor.op for tensor in behind})
    if kind == "fixed" or any(UNIQUE.keys() & k for k in kinds):
        return False
    if kind in ("rows", "entries"):
        return True
    if any(origin.reason != NO_RULE for origin in analysis.origins):
        return False  # it provably combines examples
    return any(analysis.is_given(t) and t.shape.rank != 0 for t in behind)


def _is_range(places: tf.Tensor) -> bool:
    """Returns whether places are those of a `tf.range`, or some, perhaps moved."""
    while places is not None and places.op.type != "Range":
        operation = places.op
        is_chosen = operation.type in _CHOOSING
        places = operation.inputs[0] if is_chosen else moved_places(operation)
    return places is not None


def _analysis_of(places: tf.Tensor, parts: Iterable[tf.Tensor]) -> Analysis:
    """Returns an analysis of the graph of a micro-batch, up to places."""
    captured = {inner.op for _, inner in captures_of(places.graph)}
    batch, others = [*parts], []
    for operation in varying(data_ancestors([places.op])):
        kinds = _kinds_in(operation)
        if operation.type in CALLERS and not any(map(TAKING_A_BATCH.fullmatch, kinds)):
            continue
        is_batch = operation.type in {*BATCHES, *FED} and operation not in captured
        (batch if is_batch else others).extend(operation.outputs)
    # Each replica may take its part of a batch that all are fed with.
    users = [user for tensor in batch for user in tensor.consumers()]
    if users and _reads_parts(places.graph):
        batch += [
            part
            for user in users
            if user.type in _TAKING_PARTS
            for part in user.outputs
        ]
    rows = [t for t in batch if t.shape.rank and t.shape.as_list()[0] is None]
    analysis = Analysis(rows, [*batch, *others])
    analysis.analyze([places])
    return analysis


def _reads_parts(graph: tf.Graph) -> bool:
    """Returns whether all that a graph reads of batches are parts, such as replicas'."""
    sources = [op for op in graph.get_operations() if op.type in {*BATCHES, *FED}]
    tensors = [t for op in sources for t in op.outputs if t.shape.rank != 0]
    types = {user.type for tensor in tensors for user in tensor.consumers()}
    return types <= {*_TAKING_PARTS, *SHAPES}


def _kinds_in(operation: tf.Operation) -> set[str]:
    """Returns the types of an operation, and of those in the functions that it calls."""
    is_call = operation.type in CALLERS
    return kinds_in(operation, library_of_functions(operation.graph) if is_call else {})


def _tensors_behind(analysis: Analysis, places: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors whose values, by example, places may be computed from."""
    outer = {
        inner.ref(): tensor
        for tensor, inner in captures_of(places.graph)
        if hasattr(tensor, "op")  # an eager tensor has none
    }

    def inputs_of(reference) -> list:
        tensor = outer.get(reference, reference.deref())
        operation = tensor.op
        if analysis.is_given(tensor) or operation.type in _OF_NO_EXAMPLE:
            return []
        inputs = list(operation.inputs)[: 1 if operation.type in _CHOOSING else None]
        if inputs and _is_first_row(operation):
            return []
        return [t.ref() for t in inputs if t.shape.rank != 0 or not _is_number(t)]

    starts = [places.ref()] if places.shape.rank != 0 else []
    return [outer.get(key, key.deref()) for key in walk(starts, inputs_of)]


def _is_first_row(operation: tf.Operation) -> bool:
    """Returns whether an operation takes some of the rows of a micro-batch."""
    if operation.type not in ("Slice", "StridedSlice"):
        return False
    shapes = [operation.inputs[0].shape, operation.outputs[0].shape]
    if operation.type == "StridedSlice":
        masks = ("shrink_axis_mask", "new_axis_mask")
        is_one, is_new = [operation.get_attr(mask) & 1 for mask in masks]
        if is_one or is_new:
            return bool(is_one)
    return all(shape.rank for shape in shapes) and shapes[0][0] != shapes[1][0]


def _is_number(tensor: tf.Tensor) -> bool:
    return tensor.dtype not in (tf.resource, tf.variant)
