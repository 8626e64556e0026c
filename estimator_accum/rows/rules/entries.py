"""Rules of lists of entries: sparse tensors, chosen rows, lookups of each number once.

    rows       -> entries    Where, StringSplit, a lookup by the numbers of examples
    entries    -> entries    SparseReshape, SparseFillEmptyRows, those that are chosen
    entries    -> rows       SparseToDense, sums over segments, products

The numbers of examples in the indices of a sparse tensor, or in segments, are entries
with a distance. L, M = lists of entries.
"""

import re

import tensorflow as tf

from estimator_accum.rows.declaration import ADDED_ATTRIBUTE
from estimator_accum.rows.rules.blocks import (
    blocks_apart,
    blocks_of,
    flat_blocks,
    joined_rows,
    one_block,
)
from estimator_accum.rows.rules.dims import axes_of
from estimator_accum.rows.rules.padding import padding_of, sum_of_columns
from estimator_accum.rows.rules.refusals import (
    ALONG,
    BY_VALUES,
    NO_SHAPE,
    PLACE,
    SIZE,
    only_first,
)
from estimator_accum.rows.rules.table import RULES_OF_ENTRIES, rule
from estimator_accum.rows.sizes import ONE, N, Size, count, product, sizes
from estimator_accum.rows.states import FIXED, MIXED, UNPADDED, Mixed, State

_OTHER = "entries of several lists"
_OF_SHAPE = re.compile(r"[^#].*:\d+:\d+")  # the name of an axis's length
_FEW = "the last examples may have no entry"


def are_rows(state: State) -> bool:
    """Returns whether the first axis lists examples, and there are values of theirs."""
    return state.kind == "rows" and state.axis == 0 and not state.is_place


def _are_values(state: State) -> bool:
    """Returns whether entries hold values of their own."""
    return state.kind == "entries" and not state.is_place


def are_values_of(state: State, name: str | None) -> bool:
    """Returns whether entries of a list hold values of their own."""
    return _are_values(state) and state.of == name


def are_numbers(state: State, is_first: bool) -> bool:
    """Returns whether entries hold the number of their example, or only the first."""
    has_number = state.kind == "entries" and state.distance is not None
    return has_number and state.is_first == is_first


def may_be_place(tensor: tf.Tensor, state: State) -> bool:
    """Returns whether a row's number of its own is smaller than its place's distance.

    Others have a guard for that, which no entry has.
    """
    return state.distance is None or state.is_number or tensor.op.type == "Range"


def as_entries(state: State) -> State:
    """Returns the state of rows as entries: each example has as many."""
    if state.kind != "rows" or state.axis:
        return state
    return State(
        "entries",
        0,
        distance=state.distance,
        is_first=state.is_first,
        of=f"1 blocks of {int(state.span)}",
    )


def check_same(analysis, values: State, numbers: State) -> None:
    """Raises Mixed unless entries have values of their own, and are those of numbers."""
    if not _are_values(values):
        raise Mixed(_OTHER)
    analysis.take_for_same(numbers.of, values.of)


def check_sparse(analysis, indices: State, values: State) -> tuple[State, State]:
    """Returns the states of a sparse tensor with rows of examples, as entries.

    Raises:
        Mixed: If they are not those of one.
    """
    indices, values = as_entries(indices), as_entries(values)
    if not are_numbers(indices, True):
        raise Mixed(ALONG)
    analysis.sparse_lists.add(indices.of)
    check_same(analysis, values, indices)
    return indices, values


def _of(name: str, **options) -> State:
    return State("entries", 0, of=name, **options)


def set_entries(
    analysis, tensor: tf.Tensor, state: State, *sizes: Size | None
) -> State:
    """Takes down the axes of entries behind the first; returns their state."""
    return analysis.set_dims(tensor, state, [None, *sizes])


def shape_of_sparse(analysis, tensor: tf.Tensor, distance: Size) -> list[Size]:
    """Returns the shape of a sparse tensor, whose first size is n times a distance."""
    value = analysis.value(tensor)
    if value is None or value.ndim != 1:
        raise Mixed(NO_SHAPE)
    if value[0] != N * distance:
        raise Mixed("a sparse tensor has another number of examples")
    if any(size.power for size in value[1:]):
        raise Mixed(SIZE)
    return list(value)


def check_widths(widths: list[Size]) -> None:
    """Raises Mixed unless a ragged tensor gets widths that each micro-batch has.

    A number that is not known may be -1, the width of the longest row.
    """
    for size in widths:
        is_shape = all(_OF_SHAPE.fullmatch(symbol) for symbol in size.symbols)
        if size.factor < 0 or size.power or not is_shape:
            raise Mixed("it is as wide as the longest row")


def set_rows(analysis, output: tf.Tensor, distance: Size, tail: list) -> State:
    """Returns the state of a result with `distance` rows for each example."""
    result = State("rows", 0, distance)
    return analysis.set_dims(output, result, [None, *tail])


# Lists that are made.


@rule("Where", table=RULES_OF_ENTRIES)
def _where(analysis, operation, states):
    (state,), (tensor,), (output,) = states, operation.inputs, operation.outputs
    name = analysis.name_of_true(tensor)
    rank = analysis.rank(tensor)
    if are_rows(state):
        result = _of(name, distance=state.span, is_first=True)
        return set_entries(analysis, output, result, Size(rank))
    is_list = _are_values(state) and blocks_of(state.of) is None
    if is_list and rank == 1:  # places of the entries that are chosen
        return set_entries(analysis, output, _of(name, places=state.of), ONE)
    raise Mixed(ALONG)


@rule("StringSplit", "StringSplitV2", table=RULES_OF_ENTRIES)
def _split_texts(analysis, operation, states):
    texts, *others = states
    if not are_rows(texts) or analysis.rank(operation.inputs[0]) != 1:
        raise Mixed(ALONG)
    if any(state != FIXED for state in others):
        raise Mixed(BY_VALUES)
    return new_sparse(analysis, operation, operation.outputs, texts.span)


@rule("SparseCross", "SparseCrossV2", "SparseCrossHashed", table=RULES_OF_ENTRIES)
def _cross(analysis, operation, states):
    inputs = list(zip(operation.inputs, states, strict=True))
    number = operation.get_attr("N")
    parts = [inputs[i * number : (i + 1) * number] for i in range(3)]
    for (_, indices), (_, values), (shape, _) in zip(*parts, strict=True):
        indices, _ = check_sparse(analysis, indices, values)
        if indices.distance != ONE:
            raise Mixed(ALONG)
        shape_of_sparse(analysis, shape, ONE)
    rest = inputs[3 * number :]
    dense = rest[: len(operation.get_attr("dense_types"))]
    for tensor, state in dense:
        if not (are_rows(state) and state.span == ONE and analysis.rank(tensor) == 2):
            raise Mixed(ALONG)
    if any(state != FIXED for _, state in rest[len(dense) :]):
        raise Mixed(BY_VALUES)
    # Without sparse tensors each row has as many entries.
    width = None if number else product(analysis.dims(tensor)[1] for tensor, _ in dense)
    return new_sparse(analysis, operation, operation.outputs, ONE, "", width)


def new_sparse(
    analysis, operation, tensors, span: Size, name: str = "", width: Size | None = None
) -> list[State]:
    """Returns the states of a new sparse matrix: indices, values, shape.

    Without a `width` it is as wide as the longest row, which is another one in each
    micro-batch.
    """
    name = f"{analysis.name_of_list(operation)}{name}"
    indices, values, shape = tensors
    numbers = _of(name, distance=span, is_first=True)
    width = width or count(f"{name}:width")
    return [
        set_entries(analysis, indices, numbers, Size(2)),
        set_entries(analysis, values, _of(name)),
        analysis.set_value(shape, sizes([N * span, width])),
    ]


@rule("SparseFillEmptyRows", table=RULES_OF_ENTRIES)
def _fill_empty_rows(analysis, operation, states):
    indices, values, _, default = states
    indices, _ = check_sparse(analysis, indices, values)
    if default != FIXED:
        raise Mixed(ALONG)
    shape_of_sparse(analysis, operation.inputs[2], indices.distance)
    # The numbers of the examples say where an entry is added.
    key = [analysis.list_of(indices.of)] if indices.distance == ONE else []
    name = analysis.name_of_list(operation, *key)
    analysis.complete_lists.add(name)
    filled, numbers, is_empty, _ = operation.outputs
    rank = analysis.dims(operation.inputs[0])[1]
    return [
        set_entries(analysis, filled, indices._replace(of=name), rank),
        set_entries(analysis, numbers, _of(name)),
        set_rows(analysis, is_empty, indices.distance, []),
        MIXED,  # places of all entries, for the gradient
    ]


@rule("SparseReshape", table=RULES_OF_ENTRIES)
def _reshape_sparse(analysis, operation, states):
    indices, target = as_entries(states[0]), analysis.value(operation.inputs[2])
    if not are_numbers(indices, True):
        raise Mixed(ALONG)
    analysis.sparse_lists.add(indices.of)
    if target is None or target.ndim != 1:
        raise Mixed(NO_SHAPE)
    source, target = (
        shape_of_sparse(analysis, operation.inputs[1], indices.distance),
        [*target],
    )
    if Size(-1) in target:
        place = target.index(Size(-1))
        rest = product(size for size in target if size != Size(-1))
        target[place] = product(source) // rest
    first, *tail = target
    if first.power != 1 or first.counted or any(size.power for size in tail):
        raise Mixed("it reorders the examples")
    result = indices._replace(distance=first // N)
    state = set_entries(analysis, operation.outputs[0], result, Size(len(target)))
    return [state, analysis.set_value(operation.outputs[1], sizes(target))]


@rule("Unique", table=RULES_OF_ENTRIES)
def _unique(analysis, operation, states):
    (state,), (values, places) = states, operation.outputs
    if not _are_values(state) or analysis.rank(operation.inputs[0]) != 1:
        raise Mixed(ALONG)
    # Each value of the entries once is a list of its own, which no example has.
    name = analysis.name_of_list(operation)
    return [
        set_entries(analysis, values, _of(name)),
        set_entries(analysis, places, _of(state.of, places=name)),
    ]


# Entries that are read.


@rule("GatherV2", table=RULES_OF_ENTRIES)
def _gather(analysis, operation, states):
    table, places, axis = states
    if places.kind != "entries" or not places.is_place:
        return None
    number = analysis.value(operation.inputs[2])
    is_plain = axis == FIXED and number is not None and not int(number.flat[0])
    if operation.get_attr("batch_dims") or not is_plain or places.is_first:
        raise Mixed(BY_VALUES)
    if analysis.rank(operation.inputs[1]) != 1:
        raise Mixed(BY_VALUES)
    tail = analysis.dims(operation.inputs[0])[1:]
    if table.kind == "entries" and places.places == table.of:
        result = table._replace(of=places.of)
    elif are_rows(table) and places.distance == table.span:
        result = _of(places.of)
    elif table.of == f"1 blocks of {places.distance.factor if places.distance else 0}":
        result = table._replace(of=places.of)
    else:
        raise Mixed(BY_VALUES)
    return set_entries(analysis, operation.outputs[0], result, *tail)


@rule("GatherNd", table=RULES_OF_ENTRIES)
def _gather_nd(analysis, operation, states):
    table, places = states
    if places.kind != "entries" or not places.is_place:
        return None
    is_own = are_numbers(places, True) and places.distance == table.span
    if not (is_own and are_rows(table)) or analysis.rank(operation.inputs[1]) != 2:
        raise Mixed(BY_VALUES)
    length = int(analysis.dims(operation.inputs[1])[1])
    tail = analysis.dims(operation.inputs[0])[length:]
    return set_entries(analysis, operation.outputs[0], _of(places.of), *tail)


@rule("Identity", "StopGradient", "Cast", table=RULES_OF_ENTRIES)
def _pass(analysis, operation, states):
    (state,), (output,) = states, operation.outputs
    if state.kind != "entries" or not state.is_place:
        return None
    if output.dtype not in (tf.int32, tf.int64):  # others may overflow
        raise Mixed(PLACE)
    return set_entries(analysis, output, state, *analysis.dims(operation.inputs[0])[1:])


@rule("Slice", table=RULES_OF_ENTRIES)
def _columns(analysis, operation, states):
    state = states[0]
    if state.kind != "entries" or not state.is_place:
        return None
    begin, size = map(analysis.value, operation.inputs[1:])
    is_known = begin is not None and size is not None and len(begin) == 2
    if not is_known or (begin[0], size[0]) != (Size(0), Size(-1)):
        raise Mixed(PLACE)
    return _some_columns(analysis, operation, state, int(begin[1]), int(size[1]))


def _some_columns(analysis, operation, state: State, begin: int, number: int) -> State:
    """Returns the state of some columns of indices, of which the first has numbers."""
    rest = int(analysis.dims(operation.inputs[0])[1]) - begin
    number = rest if number == -1 else number
    if not state.is_first or not 0 < number <= rest:
        raise Mixed(PLACE)
    result = _of(state.of) if begin else state
    return set_entries(analysis, operation.outputs[0], result, Size(number))


@rule("ConcatV2", table=RULES_OF_ENTRIES)
def _join(analysis, operation, states):
    first, *others, axis = states
    if first.kind != "entries" or not first.is_place:
        return joined_rows(analysis, operation, states)
    axes = axes_of(analysis, operation.inputs[-1], 2) if axis == FIXED else {}
    are_own = all(are_values_of(state, first.of) for state in others)
    if not (are_numbers(first, True) and are_own and axes == {1}):
        raise Mixed(PLACE)
    widths = [int(analysis.dims(tensor)[1]) for tensor in operation.inputs[:-1]]
    return set_entries(analysis, operation.outputs[0], first, Size(sum(widths)))


@rule("StridedSlice", table=RULES_OF_ENTRIES)
def _column(analysis, operation, states):
    state = states[0]
    if state.kind != "entries":
        return None
    if not state.is_place:
        return one_block(analysis, operation, state)
    if not operation.get_attr("shrink_axis_mask"):
        return _columns_between(analysis, operation, state)
    masks = {
        "begin_mask": 1,
        "end_mask": 1,
        "shrink_axis_mask": 2,
        "ellipsis_mask": 0,
        "new_axis_mask": 0,
    }
    begin = analysis.value(operation.inputs[1])
    strides = analysis.value(operation.inputs[3])
    is_column = all(operation.get_attr(name) == bits for name, bits in masks.items())
    if not (is_column and state.is_first) or begin is None or len(begin) != 2:
        raise Mixed(PLACE)
    if strides is None or [*strides] != [ONE, ONE]:
        raise Mixed(PLACE)
    column = int(begin[1])
    is_number = column in (0, -int(analysis.dims(operation.inputs[0])[1]))
    result = state._replace(is_first=False) if is_number else _of(state.of)
    return set_entries(analysis, operation.outputs[0], result)


def _columns_between(analysis, operation, state: State) -> State:
    """Returns the state of `indices[:, begin:end]`."""
    names = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask")
    begin_mask, end_mask, *others = map(operation.get_attr, names)
    begin, end, strides = map(analysis.value, operation.inputs[1:])
    is_known = not any(value is None for value in (begin, end, strides))
    is_plain = is_known and [*strides] == [ONE, ONE] and not any(others)
    if not (is_plain and begin_mask & end_mask & 1):
        raise Mixed(PLACE)
    width = int(analysis.dims(operation.inputs[0])[1])
    first = None if begin_mask & 2 else int(begin[1])
    last = None if end_mask & 2 else int(end[1])
    columns = range(width)[first:last]
    if not columns:
        raise Mixed(PLACE)
    return _some_columns(analysis, operation, state, columns[0], len(columns))


@rule("Reshape", "Squeeze", table=RULES_OF_ENTRIES)
def _flatten(analysis, operation, states):
    state, tensor = states[0], operation.inputs[0]
    is_reshape = operation.type == "Reshape"
    if state.kind != "entries":
        return flat_blocks(analysis, operation, state) if is_reshape else None
    if not state.is_place:
        return blocks_apart(analysis, operation, state) if is_reshape else None
    if analysis.dims(tensor)[1:] not in ([], [ONE]):
        raise Mixed(PLACE)
    if operation.type == "Squeeze":
        axes = {
            axis % analysis.rank(tensor) for axis in operation.get_attr("squeeze_dims")
        }
        is_flat = axes == {1}
    else:
        target = analysis.value(operation.inputs[1])
        flat = ([Size(-1)], [count(state.of)])
        is_flat = target is not None and [*target] in flat
    if not is_flat:
        raise Mixed(PLACE)
    return set_entries(analysis, operation.outputs[0], state._replace(is_first=False))


# Rows of entries.


def mask_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the mask of which a vector of 0 and 1 is a copy; None of others."""
    is_number = tensor.op.type == "Cast" and tensor.dtype in (tf.int32, tf.int64)
    if not is_number or tensor.op.inputs[0].dtype != tf.bool:
        return None
    return tensor.op.inputs[0]


@rule("SparseToDense", "ScatterNd", table=RULES_OF_ENTRIES)
def _scatter(analysis, operation, states):
    if operation.type == "ScatterNd" and states[0].kind != "entries":
        return None
    if operation.type == "ScatterNd":
        (indices, values, _), place = states, 2
    else:
        (indices, _, values, default), place = states, 1
        indices = as_entries(indices)
        if default != FIXED:
            raise Mixed(ALONG)
    rank = analysis.rank(operation.inputs[0])
    is_proved = rank == 2 or may_be_place(operation.inputs[0], states[0])
    if not are_numbers(indices, rank == 2) or not is_proved:
        raise Mixed(ALONG)
    is_scalar = values == FIXED and operation.type == "SparseToDense"
    if not (is_scalar and analysis.rank(operation.inputs[2]) == 0):
        check_same(analysis, as_entries(values), indices)
    _, *tail = shape_of_sparse(analysis, operation.inputs[place], indices.distance)
    is_counted = len(tail) == 1 and tail[0].counted and place == 1
    if is_counted and (columns := sum_of_columns(analysis, operation)):
        result = State("rows", 0, indices.distance)
        analysis.padded |= {**dict.fromkeys(columns), columns[-1]: result}
        return UNPADDED
    return set_rows(analysis, operation.outputs[0], indices.distance, tail)


@rule(
    *("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd"),
    *("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin"),
    *("UnsortedSegmentProd", "UnsortedSegmentJoin"),
    table=RULES_OF_ENTRIES,
)
def _segments(analysis, operation, states):
    values, numbers, *_ = states
    if numbers.kind != "entries":
        return _fixed_segments(analysis, operation, states)
    check_same(analysis, as_entries(values), numbers)
    mask = mask_of(operation.inputs[0])
    is_sum = operation.type == "UnsortedSegmentSum" and mask is not None
    if is_sum and analysis.is_in_order(operation.inputs[1]):
        analysis.lengths[operation.outputs[0].ref()] = analysis.name_of_true(mask)
    return _by_example(analysis, operation, numbers, operation.inputs[2:])


@rule(
    *("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN"),
    "SparseSegmentSumWithNumSegments",
    "SparseSegmentMeanWithNumSegments",
    "SparseSegmentSqrtNWithNumSegments",
    table=RULES_OF_ENTRIES,
)
def _sparse_segments(analysis, operation, states):
    table, places, numbers, *_ = states
    if places.kind == numbers.kind == "fixed":
        return _fixed_segments(analysis, operation, states)
    if places.kind != "entries" or places.of != numbers.of:
        raise Mixed(_OTHER)
    is_fixed = table == FIXED and not places.is_place
    if not is_fixed and not are_values_of(table, places.places):
        raise Mixed(BY_VALUES)
    return _by_example(analysis, operation, numbers, operation.inputs[3:])


def _fixed_segments(analysis, operation, states: list[State]) -> State:
    """Returns the state of sums along an axis without examples."""
    state, rank = only_first(states), 1
    if operation.type.startswith("Unsorted"):
        rank = analysis.rank(operation.inputs[1])
    if state.axis < rank:
        raise Mixed(ALONG)
    result = state._replace(axis=state.axis - rank + 1, is_first=False)
    tail = analysis.dims(operation.inputs[0])[rank:]
    return analysis.set_dims(operation.outputs[0], result, [None, *tail])


def _by_example(analysis, operation, numbers: State, rows) -> State:
    """Returns the state of rows for the numbers of examples.

    Args:
        analysis: The analysis.
        operation: The operation.
        numbers: State of the numbers.
        rows: The input that says how many rows there are; without one there are as many
            as the last number says.
    """
    if not are_numbers(numbers, False):
        raise Mixed(ALONG)
    if rows:
        value = analysis.value(rows[0])
        if value is None or value[()] != N * numbers.distance:
            raise Mixed(ALONG)
    elif analysis.list_of(numbers.of) not in analysis.complete_lists:
        if padding := padding_of(analysis, operation, N * numbers.distance):
            result = State("rows", 0, numbers.distance)
            analysis.padded |= {**dict.fromkeys(padding), padding[-1]: result}
            return UNPADDED
        users = operation.outputs[0].consumers()
        joins = [user for user in users if hasattr(user, ADDED_ATTRIBUTE)]
        if not joins:
            analysis.short[operation] = numbers.distance
            raise Mixed(_FEW)
        analysis.guards.append(getattr(joins[0], ADDED_ATTRIBUTE))
        analysis.padded |= dict.fromkeys(joins)
        return UNPADDED
    tail = analysis.dims(operation.inputs[0])[1:]
    return set_rows(analysis, operation.outputs[0], numbers.distance, tail)


@rule("SparseTensorDenseMatMul", table=RULES_OF_ENTRIES)
def _sparse_product(analysis, operation, states):
    indices, values, _, matrix = states
    is_turned = operation.get_attr("adjoint_a")
    if is_turned or matrix != FIXED:
        raise Mixed(ALONG)
    indices, _ = check_sparse(analysis, indices, values)
    shape_of_sparse(analysis, operation.inputs[2], indices.distance)
    return set_rows(analysis, operation.outputs[0], indices.distance, [None])


@rule("SparseReduceSum", "SparseReduceMax", table=RULES_OF_ENTRIES)
def _sparse_sum(analysis, operation, states):
    indices, _ = check_sparse(analysis, *states[:2])
    shape = shape_of_sparse(analysis, operation.inputs[2], indices.distance)
    axes = axes_of(analysis, operation.inputs[3], len(shape))
    if 0 in axes or not axes:
        raise Mixed(ALONG)
    keeps = operation.get_attr("keep_dims")
    tail = [
        ONE if axis in axes else size
        for axis, size in enumerate(shape)
        if axis and (keeps or axis not in axes)
    ]
    return set_rows(analysis, operation.outputs[0], indices.distance, tail)
