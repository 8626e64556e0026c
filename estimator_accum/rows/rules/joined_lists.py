"""Rules of ragged tensors whose rows are joined, one beside the other.

    tf.concat([a, b], 1)    tf.stack([a, b], 1)

TensorFlow joins the lists, one behind the other, and reads their rows in turns:

    values = tf.concat([a.values, b.values], 0)
    splits = tf.concat([a.row_splits, b.row_splits[1:] + a.row_splits[-1]], 0)
    rows = tf.reshape(tf.transpose(tf.reshape(tf.range(2 * n), [2, -1])), [-1])
"""

import tensorflow as tf

from estimator_accum.rows.rules.entries import are_values_of, as_entries, set_entries
from estimator_accum.rows.rules.row_splits import splits_of
from estimator_accum.rows.rules.table import RULES_OF_MIXED, rule
from estimator_accum.rows.sizes import N, Size, count
from estimator_accum.rows.states import State


@rule("RaggedGather", table=RULES_OF_MIXED)
def _in_turns(analysis, operation, states) -> list[State] | None:
    """Returns the states of row splits and values; None of another lookup."""
    if len(operation.inputs) != 3:
        return None
    joined_splits, joined_values, rows = operation.inputs
    splits, values = map(_joined, (joined_splits, joined_values))
    if not splits or not values or len(splits) != len(values):
        return None
    span, number = analysis.state(splits[0]).span, len(splits)
    lists, before = [], None
    for i, (tensor, entries) in enumerate(zip(splits, values, strict=True)):
        name = (
            _list_of_moved(analysis, tensor, before, lists, span)
            if i
            else _list_of_splits(analysis, tensor, "splits", span)
        )
        state = as_entries(analysis.state(entries))
        if name is None or not are_values_of(state, name):
            return None
        before = tensor.op.inputs[1] if i else None
        lists.append(name)
    if not _are_in_turns(analysis, rows, number, N * span):
        return None
    name, (inner, output) = analysis.name_of_list(operation), operation.outputs
    tail = {tuple(analysis.dims(tensor)[1:]) for tensor in values}
    if len(tail) != 1:
        return None
    return [
        splits_of(analysis, inner, name, span * Size(number)),
        set_entries(analysis, output, State("entries", 0, of=name), *tail.pop()),
    ]


def _joined(tensor: tf.Tensor) -> list[tf.Tensor] | None:
    """Returns the tensors that are joined along the first axis."""
    operation = tensor.op
    if operation.type != "ConcatV2":
        return None
    *tensors, axis = operation.inputs
    return tensors if tf.get_static_value(axis) == 0 else None


def _list_of_splits(analysis, tensor: tf.Tensor, kind: str, span: Size) -> str | None:
    """Returns the list that row splits, or ends, of examples are of."""
    state = analysis.state(tensor)
    is_own = state.kind == kind and state.places is None and state.span == span
    return state.of if is_own else None


def _list_of_moved(analysis, tensor, before, lists: list[str], span: Size):
    """Returns the list of ends that are behind all entries of the lists before.

    Args:
        analysis: The analysis.
        tensor: The ends in the joined list.
        before: Number of entries in all lists but the last one; None if there is one.
        lists: Names of the lists before.
        span: Number of rows for each example.
    """
    if tensor.op.type not in ("Add", "AddV2"):
        return None
    ends, number = tensor.op.inputs
    if before is not None:
        if number.op.type not in ("Add", "AddV2") or number.op.inputs[0] is not before:
            return None
        number = number.op.inputs[1]
    value = analysis.value(number)
    if value is None or value.ndim or value[()] != count(lists[-1]):
        return None
    return _list_of_splits(analysis, ends, "ends", span)


def _are_in_turns(analysis, rows: tf.Tensor, number: int, length: Size) -> bool:
    """Returns whether rows of several lists are read in turns, the first of each first.

    Args:
        analysis: The analysis.
        rows: Numbers of the rows.
        number: Number of lists.
        length: Number of rows of each list.
    """
    operations = [rows.op]
    for _ in range(3):
        if operations[-1].type not in ("Reshape", "Transpose"):
            return False
        operations.append(operations[-1].inputs[0].op)
    kinds = [operation.type for operation in operations]
    if kinds != ["Reshape", "Transpose", "Reshape", "Range"]:
        return False
    constants = [
        tf.get_static_value(operation.inputs[1]) for operation in operations[:3]
    ]
    if any(constant is None for constant in constants):
        return False
    shapes = [constant.tolist() for constant in constants]
    if shapes != [[-1], [1, 0], [number, -1]]:
        return False
    start, limit, step = map(analysis.value, operations[-1].inputs)
    is_known = not any(value is None for value in (start, limit, step))
    return is_known and [start[()], limit[()], step[()]] == [
        Size(0),
        length * Size(number),
        Size(1),
    ]
