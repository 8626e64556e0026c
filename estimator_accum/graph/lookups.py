"""Places of sparse gradients' slices, which lookups decide."""

import tensorflow as tf

from estimator_accum.graph.walks import origin_of

_PASSING = ("Cast", "Identity", "Reshape")
_MOVING = ("Add", "AddV2", "Sub")
# Operations one of whose results has each place once, and the number of that result.
UNIQUE = {
    **dict.fromkeys(
        ("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"), 0
    ),
    **{f"SparseSegment{way}GradV2": 1 for way in ("Mean", "SqrtN", "Sum")},
}
# Operations with the same result for slices of one row and for their sum: the places of
# slices and of the numbers of their rows.
SUMMING = {
    "UnsortedSegmentSum": (0, 1),
    **dict.fromkeys(
        ("ResourceScatterAdd", "ResourceScatterSub", "ScatterAdd", "ScatterSub"), (2, 1)
    ),
}


def source_of_places(indices: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose values are places, in other types or shapes."""
    return origin_of(indices, _PASSING)


def moved_places(operation: tf.Operation) -> tf.Tensor | None:
    """Returns the places of which an operation takes the sum or difference with a number."""
    for i in range(2) if operation.type in _MOVING else ():
        added = operation.inputs[1 - i]
        if added.shape.rank == 0 and tf.get_static_value(added) is not None:
            return operation.inputs[i]
    return None


def joined_tensors(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors that are joined along the first axis; one that is not, alone."""
    joined, waiting = [], [tensor]
    while waiting:
        tensor = waiting.pop()
        inputs = list(tensor.op.inputs)
        if tensor.op.type == "Identity":
            waiting += inputs
        elif tensor.op.type == "ConcatV2" and tf.get_static_value(inputs[-1]) == 0:
            waiting += inputs[-2::-1]
        else:
            joined.append(tensor)
    return joined


def are_distinct(places: tf.Tensor) -> bool:
    """Returns whether places, from `source_of_places`, are each there once."""
    return UNIQUE.get(places.op.type) == places.value_index
