"""Rules of rows that are sorted into lists, or stitched together again.

tf.dynamic_partition(x, experts, 2)    two lists, of each expert's examples
tf.dynamic_stitch(numbers, lists)      the rows at their places
"""

import re

import tensorflow as tf

from estimator_accum.graph.computations import computation_of
from estimator_accum.rows.rules.blocks import blocks_of
from estimator_accum.rows.rules.entries import (
    are_values_of,
    may_be_place,
    set_entries,
    set_rows,
)
from estimator_accum.rows.rules.refusals import ALONG, BY_VALUES, UNLIKE
from estimator_accum.rows.rules.table import RULES_OF_ENTRIES, rule
from estimator_accum.rows.sizes import ONE
from estimator_accum.rows.states import Mixed, State

_MISSING = "rows of some examples may be missing"
_NAME = re.compile(r"part (\d+) of (\d+) by (\S+)(?: in (.*))?")


def name_of_part(
    i: int, operation: tf.Operation, by: str, entries: str | None = None
) -> str:
    """Returns the name of the i-th list that an operation sorts by a tensor's name.

    Args:
        i: The list's number.
        operation: The operation.
        by: The tensor's name.
        entries: The name of the list that is sorted; None for rows.
    """
    name = f"part {i} of {len(operation.outputs)} by {by}"
    return name if entries is None else f"{name} in {entries}"


def part_of(name: str) -> tuple[int, int, str, str | None] | None:
    """Returns the arguments of a part's name, with the number of parts as the second."""
    match = _NAME.fullmatch(name)
    return match and (int(match[1]), int(match[2]), *match.groups()[2:])


@rule("DynamicPartition", table=RULES_OF_ENTRIES)
def _partition(analysis, operation, states):
    data, numbers = states
    tensor, rank = operation.inputs[0], analysis.rank(operation.inputs[1])
    if numbers.kind == "fixed" and data.kind == "rows" and data.axis >= rank:
        if data.is_place:
            raise Mixed(BY_VALUES)
        result = State("rows", data.axis - rank + 1, data.span)
        tail = analysis.dims(tensor)[rank:]
        for output in operation.outputs:
            analysis.set_dims(output, result, [None, *tail])
        return result
    part = _part_of_entries if numbers.kind == "entries" else _part_of_rows
    state = part(tensor, data, numbers) if rank == 1 else None
    if state is None:
        raise Mixed(ALONG)
    results, tail = [], analysis.dims(tensor)[1:]
    by = analysis.name_of_list(operation, computation_of(operation.inputs[1]))
    for i, output in enumerate(operation.outputs):
        name = name_of_part(i, operation, by, numbers.of)
        results.append(set_entries(analysis, output, state._replace(of=name), *tail))
    return results


def _part_of_rows(tensor: tf.Tensor, data: State, numbers: State) -> State | None:
    """Returns the state of some rows, which `numbers` choose; None if it is unknown."""
    is_own = data.kind == "rows" and (data.axis, data.span) == (0, numbers.span)
    if numbers != State("rows", 0, numbers.span) or not is_own:
        return None
    if not data.is_place:
        return State("entries", 0)
    # Each row is its own number.
    is_range = tensor.op.type == "Range" or data.is_number and data.span == ONE
    if not may_be_place(tensor, data) or data.is_first:
        return None
    is_number = is_range and data.distance == data.span
    return State("entries", 0, distance=data.distance, is_number=is_number)


def _part_of_entries(tensor: tf.Tensor, data: State, numbers: State) -> State | None:
    """Returns the state of some entries; None if they are not those of `numbers`."""
    if numbers.is_place or blocks_of(numbers.of) or data.of != numbers.of:
        return None
    if data.distance is not None or data.places not in (None, data.of):
        return None
    return State("entries", 0, places=data.places)


@rule("DynamicStitch", "ParallelDynamicStitch", table=RULES_OF_ENTRIES)
def _stitch(analysis, operation, states):
    half = len(states) // 2
    pairs = list(zip(states[:half], states[half:], strict=True))
    if all(numbers.kind == "fixed" for numbers, _ in pairs):
        return _stitch_columns(analysis, operation, states[half:])
    parts, targets = [], set()
    for numbers, data in pairs:
        if numbers.kind != "entries" or numbers.is_first:
            raise Mixed(BY_VALUES)
        if not numbers.is_number and numbers.places is None:
            raise Mixed(BY_VALUES)
        if not are_values_of(data, numbers.of):
            raise Mixed(UNLIKE)
        parts.append(part_of(numbers.of))
        targets.add((numbers.distance, numbers.places))
    if None in parts or len(targets) > 1:  # some numbers of a part
        raise Mixed(_MISSING)
    places = {part[0] for part in parts}
    if len({part[1:] for part in parts}) > 1 or places != {*range(parts[0][1])}:
        raise Mixed(_MISSING)
    tail = analysis.dims(operation.inputs[half])[1:]
    ((distance, name),) = targets
    entries = parts[0][-1]  # those that are sorted; the numbers may be in others
    if name != (entries and analysis.list_of(entries)):
        raise Mixed(_MISSING)
    if name is not None:
        return set_entries(
            analysis, operation.outputs[0], State("entries", 0, of=name), *tail
        )
    return set_rows(analysis, operation.outputs[0], distance, tail)


def _stitch_columns(analysis, operation, states: list[State]) -> State:
    results, half = set(), len(states)
    for tensor, state in zip(operation.inputs[:half], states, strict=True):
        rank = analysis.rank(tensor)
        if state.kind != "rows" or state.is_place or state.axis < rank:
            raise Mixed(BY_VALUES)
        results.add(State("rows", state.axis - rank + 1, state.span))
    if len(results) > 1:
        raise Mixed(UNLIKE)
    rank = analysis.rank(operation.inputs[0])
    tail = analysis.dims(operation.inputs[half])[rank:]
    return analysis.set_dims(operation.outputs[0], results.pop(), [None, *tail])
