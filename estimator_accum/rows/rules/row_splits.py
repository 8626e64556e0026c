"""Rules of row splits, which say where the entries of each row are in a list.

    splits             [0, 2, 2, 5]       of the rows [a, b], [] and [c, d, e]
    splits[:-1]        [0, 2, 2]          begins
    splits[1:]         [2, 2, 5]          ends, the running sums of the lengths
    ends - begins      [2, 0, 3]          lengths, which are rows

The rows are those of examples, or the entries of another list.
"""

import tensorflow as tf

from estimator_accum.rows.rules.blocks import blocks_of
from estimator_accum.rows.rules.dims import axes_of
from estimator_accum.rows.rules.entries import (
    are_numbers,
    are_rows,
    are_values_of,
    as_entries,
    check_sparse,
    check_widths,
    mask_of,
    set_entries,
    set_rows,
    shape_of_sparse,
)
from estimator_accum.rows.rules.refusals import ALONG, BY_VALUES, NO_SHAPE, UNLIKE
from estimator_accum.rows.rules.table import (
    RULES_OF_ENTRIES,
    RULES_OF_SPLITS,
    rule,
)
from estimator_accum.rows.sizes import ONE, N, Size, count, sizes
from estimator_accum.rows.states import FIXED, Mixed, State

_BEFORE = "row splits count the entries of the examples before"
_OTHER_NUMBER = "a ragged tensor has another number of examples"
_INTEGERS = (tf.int32, tf.int64)  # others may overflow
_COPIES = {"Identity", "Cast", "BroadcastTo", "Reshape"}
_BETWEEN = {"begins", "ends", "between"}


def splits_of(
    analysis, tensor: tf.Tensor, name: str, span: Size, outer: str | None = None
) -> State:
    """Returns the state of the row splits of a list.

    Args:
        analysis: The analysis.
        tensor: The row splits.
        name: Name of the list.
        span: Number of rows for each example.
        outer: Name of the list whose entries are the rows, in place of examples.
    """
    state = State("splits", 0, Size(int(span)), of=name, places=outer)
    return analysis.set_dims(tensor, state, [None])


def _as_rows(analysis, splits: State, output: tf.Tensor, tail: list) -> State:
    """Returns the state of a result with something for each row."""
    if splits.places is None:
        return set_rows(analysis, output, splits.span, tail)
    return set_entries(analysis, output, State("entries", 0, of=splits.places), *tail)


def _entries_of(analysis, state: State, splits: State) -> State:
    """Returns the state of values as entries of the list that `splits` are of."""
    state = as_entries(state)
    if splits.kind != "splits" or not are_values_of(state, splits.of):
        raise Mixed(UNLIKE)
    return state


def _rows_of(splits: State) -> set[str]:
    """Returns the names of the list whose entries are the rows."""
    if splits.places is not None:
        return {splits.places}
    return {f"1 blocks of {int(splits.span)}"}


def list_of_lengths(analysis, tensor: tf.Tensor) -> str | None:
    """Returns the name of the list of whose rows a vector is the lengths."""
    if tensor.shape.rank != 1:
        return None
    tensor = without_copies(analysis, tensor)
    name = analysis.lengths.get(tensor.ref()) or _list_of_masked(analysis, tensor)
    return name and analysis.list_of(name)


def _list_of_masked(analysis, lengths: tf.Tensor) -> str | None:
    """Returns the list of the first elements of each row, as many as lengths say.

    `lengths = tf.maximum(tf.minimum(numbers, most), 0)` are within a row's bounds, and a
    mask is `tf.range(most) < lengths[:, None]`, as of `tf.RaggedTensor.from_tensor`.
    """
    least, most = _bounds_of(analysis, lengths)
    if least != Size(0) or most is None or analysis.state(lengths).kind != "rows":
        return None
    users = [user for user in lengths.consumers() if user.type == "ExpandDims"]
    for user in users:
        if tf.get_static_value(user.inputs[1]) not in (1, -1):
            continue
        columns = [user, *user.outputs[0].consumers()]
        masks = {op for column in columns for op in column.outputs[0].consumers()}
        for mask in masks:
            if mask.type == "Less" and _counts_to(analysis, mask, columns, most):
                return analysis.name_of_true(mask.outputs[0])
    return None


def _bounds_of(analysis, numbers: tf.Tensor) -> tuple[Size | None, Size | None]:
    """Returns the sizes between which numbers are by their last two operations."""
    if numbers.op.type != "Maximum" or numbers.op.inputs[0].op.type != "Minimum":
        return None, None
    inner, least = numbers.op.inputs
    values = [analysis.value(tensor) for tensor in (least, inner.op.inputs[1])]
    if any(value is None or value.ndim for value in values):
        return None, None
    least, most = (value[()] for value in values)
    is_size = most.factor >= 0 and not most.power and not most.counted
    return (least, most) if is_size else (None, None)


def _counts_to(analysis, mask: tf.Operation, columns: list, most: Size) -> bool:
    """Returns whether a mask compares 0, 1, ... up to a size with lengths."""
    row, column = mask.inputs
    is_copy = column.op in columns and column.op.type in ("ExpandDims", "Cast")
    if not is_copy or column.dtype not in _INTEGERS or row.op.type != "Range":
        return False
    values = [analysis.value(tensor) for tensor in row.op.inputs]
    if any(value is None for value in values):
        return False
    return [value[()] for value in values] == [Size(0), most, ONE]


def without_copies(analysis, tensor: tf.Tensor) -> tf.Tensor:
    """Returns the vector of integers of which a vector is a copy, with its rows."""
    while tensor.op.type in _COPIES and tensor.dtype in _INTEGERS:
        source = tensor.op.inputs[0]
        if source.shape.rank != 1 or tensor.shape.rank != 1:
            break
        if analysis.state(source) != analysis.state(tensor):
            break
        tensor = source
    return tensor


# Row splits that are made.


@rule("UnicodeDecode", "UnicodeDecodeWithOffsets", table=RULES_OF_ENTRIES)
def _decode(analysis, operation, states):
    (texts,), (splits, *others) = states, operation.outputs
    if analysis.rank(operation.inputs[0]) != 1:
        raise Mixed(ALONG)
    name = analysis.name_of_list(operation)
    # Blocks are not in the order of the examples.
    if are_values_of(texts, texts.of) and blocks_of(texts.of) is None:
        first = splits_of(analysis, splits, name, ONE, texts.of)
    elif are_rows(texts):
        first = splits_of(analysis, splits, name, texts.span)
    else:
        raise Mixed(ALONG)
    entries = State("entries", 0, of=name)
    return [first, *(set_entries(analysis, output, entries) for output in others)]


@rule("Range", table=RULES_OF_ENTRIES)
def _range(analysis, operation, states):
    start, limit, delta = (analysis.value(tensor) for tensor in operation.inputs)
    rows = None if limit is None else limit[()].rows
    if rows is None:
        return None
    if start is None or delta is None or start[()] != Size(0):
        raise Mixed(_BEFORE)
    (output,), step = operation.outputs, int(delta[()])
    if rows.power:  # each row is as many entries as a step
        if step < 1 or rows.factor % step:
            raise Mixed(_BEFORE)
        span, name = Size(rows.factor // step), f"1 blocks of {rows.factor}"
        return splits_of(analysis, output, name, span)
    if step != 1:
        raise Mixed(_BEFORE)
    (name,) = rows.counted
    return splits_of(analysis, output, name, ONE, name)


@rule("DenseBincount", table=RULES_OF_ENTRIES)
def _lengths_of_rows(analysis, operation, states):
    numbers, _, weights = states
    if numbers.kind != "entries":
        return None
    tensor, (output,) = operation.inputs[0], operation.outputs
    value = analysis.value(operation.inputs[1])
    if not are_numbers(numbers, False) or analysis.rank(tensor) != 1:
        raise Mixed(ALONG)
    if value is None or value[()] != N * numbers.distance:
        raise Mixed(ALONG)
    if operation.inputs[2].shape.num_elements() != 0 or weights != FIXED:
        raise Mixed(ALONG)
    is_count = not operation.get_attr("binary_output") and output.dtype in _INTEGERS
    if is_count and analysis.is_in_order(tensor):
        analysis.lengths[output.ref()] = numbers.of
    return set_rows(analysis, output, numbers.distance, [])


@rule("Sum", table=RULES_OF_ENTRIES)
def _numbers_of_true(analysis, operation, states):
    """Takes down that they are lengths; the result has rows, as other sums."""
    mask, axes = mask_of(operation.inputs[0]), analysis.value(operation.inputs[1])
    if mask is not None and axes is not None and not operation.get_attr("keep_dims"):
        axes = {*axes_of(analysis, operation.inputs[1], analysis.rank(mask))}
        are_others = axes == {*range(1, analysis.rank(mask))}
        if are_others and are_rows(analysis.state(mask)):
            analysis.lengths[operation.outputs[0].ref()] = analysis.name_of_true(mask)


@rule("Cumsum", table=RULES_OF_ENTRIES)
def _running_sums(analysis, operation, states):
    state, axis = states
    name = list_of_lengths(analysis, operation.inputs[0])
    if name is None or axis != FIXED:
        return None
    if operation.get_attr("exclusive") or operation.get_attr("reverse"):
        return None
    kind, outer = "ends", None
    if state.kind == "entries":
        outer = state.of
    result = State(kind, 0, state.span, of=name, places=outer)
    return analysis.set_dims(operation.outputs[0], result, [None])


@rule("RaggedRange", table=RULES_OF_ENTRIES)
def _ranges(analysis, operation, states):
    spans = {state.span for state in states if state.kind == "rows"}
    are_known = all(are_rows(state) or state == FIXED for state in states)
    if not are_known or len(spans) != 1:
        raise Mixed(UNLIKE)
    for tensor, state in zip(operation.inputs, states, strict=True):
        if state == FIXED and analysis.rank(tensor):
            raise Mixed(UNLIKE)  # it may be of as many rows
    start, limits, delta = operation.inputs
    bounds = [tf.get_static_value(tensor) for tensor in (start, delta)]
    name = list_of_lengths(analysis, limits) if bounds == [0, 1] else None
    return _made_ranges(
        analysis, operation, name or analysis.name_of_list(operation), *spans
    )


def _made_ranges(
    analysis, operation, name: str, span: Size, outer=None, places=None
) -> list[State]:
    splits, values = operation.outputs
    entries = State("entries", 0, of=name, places=places)
    return [
        splits_of(analysis, splits, name, span, outer),
        set_entries(analysis, values, entries),
    ]


# Parts of row splits.


@rule("Identity", "StopGradient", "Cast", table=RULES_OF_SPLITS)
def _pass(analysis, operation, states):
    (state,), (output,) = states, operation.outputs
    if output.dtype not in _INTEGERS:
        raise Mixed(_BEFORE)
    return analysis.set_dims(output, state, [None])


@rule("StridedSlice", table=RULES_OF_SPLITS)
def _part(analysis, operation, states):
    state, (output,) = states[0], operation.outputs
    begin, end, strides = map(analysis.value, operation.inputs[1:])
    is_known = not any(value is None for value in (begin, end, strides))
    masks = ("ellipsis_mask", "new_axis_mask")
    if not is_known or any(map(operation.get_attr, masks)) or state.kind != "splits":
        raise Mixed(_BEFORE)
    if len(begin) != 1:
        raise Mixed(_BEFORE)
    if strides[0] != ONE:
        return _every_row(analysis, operation, state, int(strides[0]))
    if operation.get_attr("shrink_axis_mask"):
        if begin[0] == Size(0):
            return analysis.set_value(output, sizes(0))
        if begin[0] == Size(-1):
            return analysis.set_value(output, sizes(count(state.of)))
        raise Mixed(_BEFORE)
    has_first = bool(operation.get_attr("begin_mask")) or begin[0] == Size(0)
    has_last = bool(operation.get_attr("end_mask"))
    kinds = {(True, True): "splits"}
    if has_last and begin[0] == ONE:
        kinds[False, True] = "ends"
    if not has_last and end[0] == Size(-1):
        kinds[True, False] = "begins"
    if (has_first, has_last) not in kinds:
        raise Mixed(_BEFORE)
    result = state._replace(kind=kinds[has_first, has_last])
    return analysis.set_dims(output, result, [None])


def _every_row(analysis, operation, state: State, step: int) -> State:
    """Returns the state of `splits[::step]`, where rows are joined to longer ones."""
    masks = [operation.get_attr(name) & 1 for name in ("begin_mask", "end_mask")]
    begin = analysis.value(operation.inputs[1])
    is_whole = masks[1] and (masks[0] or begin[0] == Size(0))
    is_whole &= not operation.get_attr("shrink_axis_mask")
    if not is_whole or state.places is not None or step < 1:
        raise Mixed(_BEFORE)
    if int(state.span) % step:
        raise Mixed(_BEFORE)
    span = Size(int(state.span) // step)
    return splits_of(analysis, operation.outputs[0], state.of, span)


@rule("Sub", table=RULES_OF_SPLITS)
def _lengths(analysis, operation, states):
    ends, begins = states
    if ends.kind != "ends" or begins != ends._replace(kind="begins"):
        raise Mixed(_BEFORE)
    (output,) = operation.outputs
    analysis.lengths[output.ref()] = ends.of
    return _as_rows(analysis, ends, output, [])


@rule("ConcatV2", table=RULES_OF_SPLITS)
def _with_zero(analysis, operation, states):
    first, *others, axis = states
    zero = tf.get_static_value(operation.inputs[0])
    if len(others) != 1 or others[0].kind != "ends" or (first, axis) != (FIXED, FIXED):
        raise Mixed(_BEFORE)
    if zero is None or zero.tolist() != [0]:
        raise Mixed(_BEFORE)
    result = others[0]._replace(kind="splits")
    return analysis.set_dims(operation.outputs[0], result, [None])


@rule("Mul", table=RULES_OF_SPLITS)
def _times(analysis, operation, states):
    """Rows of a length: `tf.range(n + 1) * 3`."""
    pairs = dict(zip(states, operation.inputs, strict=True))
    number = tf.get_static_value(pairs.pop(FIXED)) if FIXED in pairs else None
    (state, *others) = pairs
    if others or number is None or number.ndim or number < 1:
        raise Mixed(_BEFORE)
    if state.kind != "splits":
        raise Mixed(_BEFORE)
    if state.of != f"1 blocks of {int(state.span)}" or state.places is not None:
        if number != 1:
            raise Mixed(_BEFORE)
        return analysis.set_dims(operation.outputs[0], state, [None])
    name = f"1 blocks of {int(state.span) * int(number)}"
    return splits_of(analysis, operation.outputs[0], name, state.span)


@rule("AddV2", "Add", table=RULES_OF_SPLITS)
def _moved(analysis, operation, states):
    state, other = states
    number = tf.get_static_value(operation.inputs[1])
    if other != FIXED or number is None or number.ndim:
        raise Mixed(_BEFORE)
    is_behind = state.kind in _BETWEEN | {"from_begin"} and number >= 0
    if not is_behind and not (state.kind in _BETWEEN | {"to_end"} and number <= 0):
        raise Mixed(_BEFORE)
    result = state._replace(kind="from_begin" if is_behind else "to_end")
    return analysis.set_dims(operation.outputs[0], result, [None])


@rule("Minimum", "Maximum", table=RULES_OF_SPLITS)
def _bounded(analysis, operation, states):
    half = "from_begin" if operation.type == "Minimum" else "to_end"
    kinds = {state.kind for state in states}
    if len({state._replace(kind="between") for state in states}) > 1:
        raise Mixed(_BEFORE)
    if not kinds <= _BETWEEN | {half} or not kinds & _BETWEEN:
        raise Mixed(_BEFORE)
    result = states[0]._replace(kind="between")
    return analysis.set_dims(operation.outputs[0], result, [None])


# Ragged tensors.


@rule("RaggedRange", table=RULES_OF_SPLITS)
def _ranges_within(analysis, operation, states):
    """Places of some entries of each row, as `ragged[:, :2]` reads them."""
    begins, ends, _ = states
    if not {begins.kind, ends.kind} <= _BETWEEN:
        raise Mixed(_BEFORE)
    if begins._replace(kind="between") != ends._replace(kind="between"):
        raise Mixed(UNLIKE)
    step = tf.get_static_value(operation.inputs[2])
    if step is None or step.ndim or step < 1:  # back, from the begin of the next row
        raise Mixed(_BEFORE)
    name = analysis.name_of_list(operation)
    of_rows = begins.span, begins.places
    return _made_ranges(analysis, operation, name, *of_rows, begins.of)


@rule("RaggedTensorToTensor", table=RULES_OF_ENTRIES)
@rule("RaggedTensorToTensor", table=RULES_OF_SPLITS)
def _pad_to_length(analysis, operation, states):
    _, values, default, *partitions = states
    kinds = operation.get_attr("row_partition_types")
    if kinds == [b"FIRST_DIM_SIZE", b"VALUE_ROWIDS"]:
        span, number = _rows_by_number(analysis, operation, values, partitions[1]), 1
    elif {*kinds} == {b"ROW_SPLITS"}:
        span, number = _rows_by_splits(analysis, values, partitions), len(partitions)
    else:
        raise Mixed("a ragged tensor whose rows are of several kinds")
    lengths = analysis.value(operation.inputs[0])
    if lengths is None or default != FIXED:
        raise Mixed(NO_SHAPE)
    widths = lengths[1 : 1 + number] if lengths.ndim else lengths
    check_widths([*widths.flat])
    if lengths[0] not in (Size(-1), N * span):
        raise Mixed(_OTHER_NUMBER)
    tail = analysis.dims(operation.inputs[1])[1:]
    return set_rows(analysis, operation.outputs[0], span, [*widths, *tail])


def _rows_by_number(analysis, operation, values: State, numbers: State) -> Size:
    """Returns the rows for each example where entries have the numbers of their rows."""
    if not are_numbers(numbers, False) or not are_values_of(values, numbers.of):
        raise Mixed(ALONG)
    rows = analysis.value(operation.inputs[3])
    if rows is None or rows[()] != N * numbers.distance:
        raise Mixed(_OTHER_NUMBER)
    return numbers.distance


def _rows_by_splits(analysis, values: State, partitions: list[State]) -> Size:
    """Returns the rows for each example where splits, of each axis, tell their ends."""
    first, *others = partitions
    for outer, inner in zip(partitions, others, strict=False):
        if inner.kind != "splits" or outer.of not in _rows_of(inner):
            raise Mixed(UNLIKE)
    _entries_of(analysis, values, partitions[-1])
    if first.kind != "splits" or first.places is not None:
        raise Mixed(_BEFORE)
    return first.span


@rule("RaggedTensorToSparse", table=RULES_OF_SPLITS)
def _to_sparse(analysis, operation, states):
    splits, *others = states
    (values,) = others if len(others) == 1 else (None,)
    if values is None or splits.kind != "splits" or splits.places is not None:
        raise Mixed("a ragged tensor with several ragged axes")
    values = _entries_of(analysis, values, splits)
    if analysis.rank(operation.inputs[1]) != 1:
        raise Mixed("a ragged tensor with several axes")
    indices, entries, shape = operation.outputs
    numbers = State("entries", 0, distance=splits.span, is_first=True, of=splits.of)
    width = count(f"{analysis.name_of_list(operation)}:width")
    return [
        set_entries(analysis, indices, numbers, Size(2)),
        set_entries(analysis, entries, values),
        analysis.set_value(shape, sizes([N * splits.span, width])),
    ]


@rule("RaggedBincount", table=RULES_OF_SPLITS)
def _counts(analysis, operation, states):
    splits, values, size, weights = states
    values = _entries_of(analysis, values, splits)
    if size != FIXED or analysis.rank(operation.inputs[1]) != 1:
        raise Mixed(BY_VALUES)
    has_weights = operation.inputs[3].shape.num_elements() != 0
    if as_entries(weights) != (values if has_weights else FIXED):
        raise Mixed(UNLIKE)
    return _as_rows(analysis, splits, operation.outputs[0], [None])


@rule("StringNGrams", table=RULES_OF_SPLITS)
def _join_words(analysis, operation, states):
    words, splits = states
    _entries_of(analysis, words, splits)
    if operation.get_attr("pad_width"):
        raise Mixed("empty rows are padded unless all rows are empty")
    texts, output = operation.outputs
    name = analysis.name_of_list(operation)
    return [
        set_entries(analysis, texts, State("entries", 0, of=name)),
        splits_of(analysis, output, name, splits.span, splits.places),
    ]


@rule("UnicodeEncode", table=RULES_OF_SPLITS)
def _encode(analysis, operation, states):
    letters, splits = states
    _entries_of(analysis, letters, splits)
    return _as_rows(analysis, splits, operation.outputs[0], [])


@rule("RaggedCross", table=RULES_OF_SPLITS)
def _cross(analysis, operation, states):
    inputs = list(zip(operation.inputs, states, strict=True))
    kinds = ("ragged_values_types", "ragged_splits_types", "Nsparse")
    lists, rows, number = map(operation.get_attr, kinds)
    lengths = (len(lists), len(rows), number, number, number)
    parts, place = [], 0
    for length in lengths:
        parts.append(inputs[place : place + length])
        place += length
    values, splits, *sparse = parts
    spans = set()
    for (_, entries), (_, state) in zip(values, splits, strict=True):
        _entries_of(analysis, entries, state)
        if state.places is not None:
            raise Mixed(ALONG)
        spans.add(state.span)
    for (_, indices), (_, entries), (shape, _) in zip(*sparse, strict=True):
        indices, _ = check_sparse(analysis, indices, entries)
        shape_of_sparse(analysis, shape, indices.distance)
        spans.add(indices.distance)
    for tensor, state in inputs[place:]:
        if not are_rows(state) or analysis.rank(tensor) != 2:
            raise Mixed(ALONG)
        spans.add(state.span)
    if len(spans) > 1:
        raise Mixed(UNLIKE)
    texts, output = operation.outputs
    name = analysis.name_of_list(operation)
    return [
        set_entries(analysis, texts, State("entries", 0, of=name)),
        splits_of(analysis, output, name, *spans),
    ]
