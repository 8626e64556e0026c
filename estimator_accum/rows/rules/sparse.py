"""Rules of sparse tensors of which others are made.

Each example's entries stay together. A result is a list of its own, since an operation may
drop, join or sort the entries of an example.
"""

import tensorflow as tf

from estimator_accum.rows.rules.entries import (
    are_rows,
    are_values_of,
    check_sparse,
    new_sparse,
    set_entries,
    set_rows,
    shape_of_sparse,
)
from estimator_accum.rows.rules.refusals import ALONG, BY_VALUES, UNLIKE
from estimator_accum.rows.rules.table import RULES_OF_ENTRIES, rule
from estimator_accum.rows.sizes import ONE, Size, Unknown, count, sizes
from estimator_accum.rows.states import FIXED, MIXED, Mixed, State


def _check_fixed(states: list[State]) -> None:
    if any(state != FIXED for state in states):
        raise Mixed(BY_VALUES)


def _list(
    analysis, operation, numbers: State, tensors, shape: list, name: str = ""
) -> list[State]:
    """Returns the states of a new list's indices, and of its values."""
    name = f"{analysis.name_of_list(operation)}{name}"
    indices, values = tensors
    rank = Size(len(shape))
    return [
        set_entries(analysis, indices, numbers._replace(of=name), rank),
        set_entries(analysis, values, State("entries", 0, of=name)),
    ]


@rule("SparseReorder", table=RULES_OF_ENTRIES)
def _reorder(analysis, operation, states):
    indices, values, _ = states
    indices, values = check_sparse(analysis, indices, values)
    shape = shape_of_sparse(analysis, operation.inputs[2], indices.distance)
    if analysis.list_of(indices.of) in analysis.complete_lists:
        analysis.complete_lists.add(analysis.name_of_list(operation))
    return _list(analysis, operation, indices, operation.outputs, shape)


@rule("SparseConcat", table=RULES_OF_ENTRIES)
def _concat(analysis, operation, states):
    number, inputs = operation.get_attr("N"), operation.inputs
    shapes, entries = [], None
    for i in range(number):
        indices, values = states[i], states[number + i]
        indices, values = check_sparse(analysis, indices, values)
        entries = entries or indices
        if indices.distance != entries.distance:
            raise Mixed(UNLIKE)
        shape = inputs[2 * number + i]
        shapes.append(shape_of_sparse(analysis, shape, indices.distance))
    axis = operation.get_attr("concat_dim") % len(shapes[0])
    if axis == 0:
        raise Mixed("it joins examples with examples")
    shape, lengths = shapes[0], [shape[axis] for shape in shapes]
    shape[axis] = _sum(lengths, f"{analysis.name_of_list(operation)}:axis{axis}")
    *results, output = operation.outputs
    return [
        *_list(analysis, operation, entries, results, shape),
        analysis.set_value(output, sizes(shape)),
    ]


def _sum(lengths: list[Size], name: str) -> Size:
    total = Size(0)
    try:
        for length in lengths:
            total = total + length
    except Unknown:
        return count(name)
    return total


@rule("SparseAdd", "SparseSparseMaximum", "SparseSparseMinimum", table=RULES_OF_ENTRIES)
def _pair(analysis, operation, states):
    one, other = states[:3], states[3:6]
    indices, _ = check_sparse(analysis, *one[:2])
    others, _ = check_sparse(analysis, *other[:2])
    _check_fixed(states[6:])
    distance = indices.distance
    if distance != others.distance:
        raise Mixed(UNLIKE)
    shape = shape_of_sparse(analysis, operation.inputs[2], distance)
    shape_of_sparse(analysis, operation.inputs[5], distance)
    results = _list(analysis, operation, indices, operation.outputs[:2], shape)
    shapes = operation.outputs[2:]
    return [*results, *(analysis.set_value(output, sizes(shape)) for output in shapes)]


@rule("SparseSoftmax", table=RULES_OF_ENTRIES)
def _softmax(analysis, operation, states):
    indices, values, _ = states
    indices, values = check_sparse(analysis, indices, values)
    shape = shape_of_sparse(analysis, operation.inputs[2], indices.distance)
    if len(shape) < 2:
        raise Mixed(ALONG)
    return set_entries(analysis, operation.outputs[0], values)


@rule("SparseSplit", table=RULES_OF_ENTRIES)
def _split(analysis, operation, states):
    axis, indices, values, _ = states
    indices, values = check_sparse(analysis, indices, values)
    _check_fixed([axis])
    shape = shape_of_sparse(analysis, operation.inputs[3], indices.distance)
    place, number = analysis.value(operation.inputs[0]), operation.get_attr("num_split")
    if place is None or int(place.flat[0]) % len(shape) == 0:
        raise Mixed("it takes examples apart")
    place = int(place.flat[0]) % len(shape)
    length, longer = divmod(int(shape[place]), number)
    lists, shapes = [], []
    for i in range(number):
        tensors = operation.outputs[i], operation.outputs[number + i]
        lists.append(_list(analysis, operation, indices, tensors, shape, f":{i}"))
        shape[place] = Size(length + (i < longer))
        output = operation.outputs[2 * number + i]
        shapes.append(analysis.set_value(output, sizes(shape)))
    return [*(pair[0] for pair in lists), *(pair[1] for pair in lists), *shapes]


@rule("SparseSlice", table=RULES_OF_ENTRIES)
def _slice(analysis, operation, states):
    indices, values, *_ = states
    indices, values = check_sparse(analysis, indices, values)
    shape = shape_of_sparse(analysis, operation.inputs[2], indices.distance)
    start, size = map(analysis.value, operation.inputs[3:])
    if start is None or size is None or start[0] != Size(0) or size[0] != shape[0]:
        raise Mixed("it may choose examples")
    for axis in range(1, len(shape)):
        if (start[axis], size[axis]) != (Size(0), shape[axis]):
            rest = int(shape[axis]) - int(start[axis])
            shape[axis] = Size(max(min(int(size[axis]), rest), 0))
    *results, output = operation.outputs
    return [
        *_list(analysis, operation, indices, results, shape),
        analysis.set_value(output, sizes(shape)),
    ]


@rule(
    *("SparseDenseCwiseAdd", "SparseDenseCwiseMul", "SparseDenseCwiseDiv"),
    "SparseTensorDenseAdd",
    table=RULES_OF_ENTRIES,
)
def _beside_dense(analysis, operation, states):
    indices, values, _, dense = states
    indices, values = check_sparse(analysis, indices, values)
    shape = shape_of_sparse(analysis, operation.inputs[2], indices.distance)
    tensor = operation.inputs[3]
    is_aligned = analysis.rank(tensor) == len(shape)
    is_own = are_rows(dense) and is_aligned and dense.span == indices.distance
    if operation.type == "SparseTensorDenseAdd":
        if not is_own:
            raise Mixed(UNLIKE)
        tail = analysis.dims(tensor)[1:]
        return set_rows(analysis, operation.outputs[0], indices.distance, tail)
    is_for_all = dense == FIXED and analysis.rank(tensor) <= len(shape)
    if is_for_all and is_aligned:
        is_for_all = analysis.dims(tensor)[0] == ONE
    if not (is_own or is_for_all):
        raise Mixed(UNLIKE)
    return set_entries(analysis, operation.outputs[0], values)


@rule("SparseBincount", table=RULES_OF_ENTRIES)
def _counts(analysis, operation, states):
    indices, values, _, size, weights = states
    indices, values = check_sparse(analysis, indices, values)
    _check_fixed([size])
    shape = shape_of_sparse(analysis, operation.inputs[2], indices.distance)
    has_weights = operation.inputs[4].shape.num_elements() != 0
    are_own = are_values_of(weights, indices.of) if has_weights else weights == FIXED
    if len(shape) != 2 or not are_own:
        raise Mixed(ALONG)
    return set_rows(analysis, operation.outputs[0], indices.distance, [None])


@rule("CTCGreedyDecoder", "CTCBeamSearchDecoder", table=RULES_OF_ENTRIES)
def _decode(analysis, operation, states):
    signals, lengths = states
    if signals.kind != "rows" or signals.axis != 1 or signals.is_place:
        raise Mixed(ALONG)
    if not are_rows(lengths) or lengths.span != signals.span:
        raise Mixed(UNLIKE)
    *tensors, scores = operation.outputs
    number = len(tensors) // 3
    paths = [
        new_sparse(analysis, operation, tensors[i::number], signals.span, f":{i}")
        for i in range(number)
    ]
    parts = [path[place] for place in range(3) for path in paths]
    return [*parts, set_rows(analysis, scores, signals.span, [None])]


@rule("CTCLoss", table=RULES_OF_ENTRIES)
def _ctc_loss(analysis, operation, states):
    signals, indices, values, lengths = states
    indices, values = check_sparse(analysis, indices, values)
    if signals != State("rows", 1, indices.distance):
        raise Mixed(ALONG)
    if not are_rows(lengths) or lengths.span != signals.span:
        raise Mixed(UNLIKE)
    loss, gradient = operation.outputs
    dims = analysis.dims(operation.inputs[0])
    return [
        set_rows(analysis, loss, signals.span, []),
        analysis.set_dims(gradient, signals, dims),
    ]


@rule("ParseExampleV2", table=RULES_OF_ENTRIES)
def _parse(analysis, operation, states):
    texts, names, *others = states
    if not are_rows(texts) or analysis.rank(operation.inputs[0]) != 1:
        raise Mixed(ALONG)
    is_named = operation.inputs[1].shape.num_elements() != 0
    if is_named and names != texts:
        raise Mixed(UNLIKE)
    _check_fixed(others)
    number = operation.get_attr("num_sparse")
    outputs, shapes = operation.outputs, operation.get_attr("dense_shapes")
    sparse = [
        new_sparse(
            analysis, operation, outputs[i : 3 * number : number], texts.span, f":{i}"
        )
        for i in range(number)
    ]
    dense = [
        set_rows(analysis, output, texts.span, [Size(d.size) for d in shape.dim])
        if tf.TensorShape(shape).is_fully_defined()
        else MIXED  # as long as the longest
        for output, shape in zip(outputs[3 * number :], shapes, strict=False)
    ]
    ragged = [MIXED] * (len(outputs) - 3 * number - len(dense))
    return [*(parts[i] for i in range(3) for parts in sparse), *dense, *ragged]
