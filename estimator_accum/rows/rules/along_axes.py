"""Rules of operations that combine elements along some axes."""

from estimator_accum.rows.declaration import MOMENTS_ATTRIBUTE
from estimator_accum.rows.rules.dims import axes_of, keep_dims, without_axes
from estimator_accum.rows.rules.from_sizes import check_seed
from estimator_accum.rows.rules.refusals import (
    ALONG,
    FIXED_BESIDE,
    UNLIKE,
    only_first,
    without_places,
)
from estimator_accum.rows.rules.table import rule
from estimator_accum.rows.sizes import ONE
from estimator_accum.rows.states import FIXED, MIXED, Mixed, State


@rule("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm", "ReduceJoin")
def _reduce(analysis, operation, states):
    state, tensor = only_first(states), operation.inputs[0]
    axes = axes_of(analysis, operation.inputs[1], analysis.rank(tensor))
    joins_all = operation.type == "ReduceJoin" and not axes
    if state.axis in axes and hasattr(operation, MOMENTS_ATTRIBUTE):
        return FIXED
    if state.axis in axes or joins_all:
        raise Mixed(ALONG)
    if not operation.get_attr("keep_dims"):
        return without_axes(analysis, operation, state, axes)
    dims = analysis.dims(tensor)
    sizes = [ONE if axis in axes else size for axis, size in enumerate(dims)]
    return analysis.set_dims(operation.outputs[0], state, sizes)


@rule("ArgMax", "ArgMin")
def _reduce_one(analysis, operation, states):
    state, rank = only_first(states), analysis.rank(operation.inputs[0])
    axes = axes_of(analysis, operation.inputs[1], rank)
    return without_axes(analysis, operation, state, axes)


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll")
def _scan(analysis, operation, states):
    state, axis = only_first(states), operation.inputs[-1]
    if state.axis in axes_of(analysis, axis, analysis.rank(operation.inputs[0])):
        raise Mixed(ALONG)
    return keep_dims(analysis, operation, state, set())


@rule("Softmax", "LogSoftmax", "TopKV2", "MatrixDiag")
def _along_the_last(analysis, operation, states):
    state = only_first(states)
    if state.axis >= analysis.rank(operation.inputs[0]) - 1:
        raise Mixed(ALONG)
    if operation.type != "MatrixDiag":  # which has an axis more
        keep_dims(analysis, operation, state, {-1})
    return state


@rule("MatrixDiagV2", "MatrixDiagV3")
@rule("MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3")
def _diagonals(analysis, operation, states):
    state, output = only_first(states), operation.outputs[0]
    ranks = {analysis.rank(operation.inputs[0]), analysis.rank(output)}
    if state.axis >= min(ranks) - 1 or max(ranks) - min(ranks) != 1:
        raise Mixed(ALONG)
    return state


# Number of axes that an operation combines, the last ones.
_LAST_AXES = {
    **dict.fromkeys(("FFT", "IFFT", "RFFT", "IRFFT"), 1),
    **dict.fromkeys(("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D"), 2),
    **dict.fromkeys(("FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D"), 3),
    **dict.fromkeys(("MatrixBandPart", "Cholesky", "MatrixInverse", "Svd", "Qr"), 2),
    **dict.fromkeys(("MatrixDeterminant", "LogMatrixDeterminant"), 2),
    "SelfAdjointEigV2": 2,
    # Images: a pixel's channels, or height, width and channels.
    **dict.fromkeys(("AdjustHue", "AdjustSaturation", "HSVToRGB", "RGBToHSV"), 1),
    "AdjustContrastv2": 3,
}


@rule(*_LAST_AXES)
def _along_last_axes(analysis, operation, states):
    state = only_first(states)
    number = _LAST_AXES[operation.type]
    if state.axis >= analysis.rank(operation.inputs[0]) - number:
        raise Mixed(ALONG)
    return state


@rule("ApproxTopK")
def _largest(analysis, operation, states):
    state, rank = only_first(states), analysis.rank(operation.inputs[0])
    if operation.get_attr("reduction_dimension") % rank == state.axis:
        raise Mixed(ALONG)
    return state


@rule("Cross")
def _cross(analysis, operation, states):
    without_places(states)
    first, second = states
    if first != second:
        raise Mixed(UNLIKE)
    if first.axis >= analysis.rank(operation.inputs[0]) - 1:
        raise Mixed(ALONG)
    return keep_dims(analysis, operation, first, set())


@rule("LowerBound", "UpperBound")
def _search(analysis, operation, states):
    without_places(states)
    table, values = states
    if table.kind == "fixed" and values.axis == 1:  # of one list, or of several
        return values
    if table != values or values.axis:
        raise Mixed(UNLIKE)
    return values


@rule("DenseBincount")
def _counts(analysis, operation, states):
    values, size, weights = states
    without_places(states)
    if values.kind != "rows" or values.axis or analysis.rank(operation.inputs[0]) != 2:
        raise Mixed(ALONG)
    has_weights = operation.inputs[2].shape.num_elements() != 0
    if size != FIXED or weights != (values if has_weights else FIXED):
        raise Mixed(FIXED_BESIDE)
    return values


@rule("MatrixSolve", "MatrixTriangularSolve", "MatrixSetDiag", "MatrixSetDiagV3")
def _pairs_of_matrices(analysis, operation, states):
    without_places(states)
    rows = [state for state in states[:2] if state.kind == "rows"]
    ranks = [analysis.rank(tensor) for tensor in operation.inputs[:2]]
    is_solved = operation.type in ("MatrixSolve", "MatrixTriangularSolve")
    if is_solved and states[0] == FIXED and ranks[0] == ranks[1]:
        if rows[0].axis != ranks[1] - 1:  # else each column is solved by itself
            raise Mixed(FIXED_BESIDE)
        return rows[0]
    if len(rows) < 2 or rows[0] != rows[1] or len({*states[2:]} - {FIXED}):
        raise Mixed(UNLIKE)
    if operation.type == "MatrixTriangularSolve" and ranks[0] != ranks[1]:
        raise Mixed(UNLIKE)  # it broadcasts, from the right
    if rows[0].axis >= ranks[0] - 2:
        raise Mixed(ALONG)
    return rows[0]


@rule("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
@rule("InTopK", "InTopKV2")
def _cross_entropy(analysis, operation, states):
    without_places(states)
    states, others = states[:2], states[2:]
    if any(state.kind != "rows" for state in states) or {*others} - {FIXED}:
        raise Mixed(FIXED_BESIDE)
    if any(state.axis for state in states):
        raise Mixed(ALONG)
    spans = {state.span for state in states}
    if len(spans) > 1 and not all(size.symbols for size in spans):
        raise Mixed(UNLIKE)
    return states[0]


@rule("ReverseSequence")
def _reverse_sequence(analysis, operation, states):
    without_places(states)
    state, lengths = states
    if state.kind != "rows" or operation.get_attr("seq_dim") == state.axis:
        raise Mixed(ALONG)
    is_batch = operation.get_attr("batch_dim") == state.axis
    if lengths == FIXED and not is_batch:
        return state
    if lengths == FIXED or not is_batch:
        raise Mixed(UNLIKE)
    if lengths.axis or lengths.span != state.span:
        raise Mixed(UNLIKE)
    return state


@rule("CudnnRNNV3")
def _recurrent(analysis, operation, states):
    without_places(states)
    sequences, h, c, params, lengths = states
    rows = State("rows", int(operation.get_attr("time_major")), sequences.span)
    has_cell = operation.get_attr("rnn_mode") == b"lstm"
    if (sequences, h, c) != (rows, rows, rows if has_cell else FIXED):
        raise Mixed(UNLIKE)
    if params != FIXED or lengths != rows._replace(axis=0):
        raise Mixed(FIXED_BESIDE)
    if operation.get_attr("dropout"):
        raise Mixed("it draws random numbers for all examples")
    sizes = [*analysis.dims(operation.inputs[0])[:2], None]
    analysis.set_dims(operation.outputs[0], rows, sizes)
    return [rows, h, c, MIXED, MIXED]


@rule("Multinomial", "StatelessMultinomial")
def _multinomial(analysis, operation, states):
    state = only_first(states)
    check_seed(analysis, operation)
    if state.axis != 0:
        raise Mixed("it draws for each class")
    return state
