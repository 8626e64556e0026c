"""Rules of the analysis of rows: the states of an operation's outputs.

Each rule is a function of the analysis, the operation and the states of its inputs, of
which one has rows at least, and none is mixed. It raises Mixed where a result combines
examples, or may.

n = number of examples, T = another size, W = a width.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.graph.names import SHAPED_DRAWS
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.rows.sizes import (
    ONE,
    N,
    Size,
    Unknown,
    broadcast_gradient_axes,
    product,
    sizes,
)
from estimator_accum.rows.states import FIXED, SIZES, Mixed, State, join

RULES: dict[str, Callable] = {}

# Their values are known of a mixed tensor, too.
OF_SHAPE = {"Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs", "BroadcastArgs"}
LISTS_BEGIN = {"TensorListReserve", "EmptyTensorList", "TensorArrayV3"}
# A size says how many rows they make.
FROM_SIZES = {"Fill", "Tile", "BroadcastTo", "Range", "RngReadAndSkip", *SHAPED_DRAWS}

_ALONG = "it combines the examples"
_UNLIKE = "examples stand beside other examples"
_FIXED_BESIDE = "what is no example's stands beside examples"
_PLACE = "the place of an example as a value"
_SIZE = "the number of examples as a value"


class Guard(NamedTuple):
    """Rows that are looked up by number, of their own example unless a value is wrong.

    Attributes:
        places: The numbers.
        axis: Their axis of examples.
        table: The tensor in which they are looked up; its first axis has the examples.
    """

    places: tf.Tensor
    axis: int
    table: tf.Tensor


def rule(*types: str):
    """Makes a function the rule of operations."""

    def register(function):
        RULES.update(dict.fromkeys(types, function))
        return function

    return register


def broadcast_value(analysis, operation: tf.Operation, tensor: tf.Tensor):
    """Returns the value of an output of BroadcastGradientArgs or BroadcastArgs."""
    x, y = (analysis.value(each) for each in operation.inputs)
    if x is None or y is None:
        return None
    if operation.type == "BroadcastArgs":
        if len(x) != len(y) or list(x) != list(y):
            raise Unknown
        return x
    axes = broadcast_gradient_axes(x, y)
    return sizes(axes[operation.outputs.index(tensor)])


# Element by element.


def _without_places(states: list[State]) -> None:
    if any(state.distance is not None for state in states):
        raise Mixed(_PLACE)
    if any(state.kind == "sizes" for state in states):
        raise Mixed(_SIZE)
    if any(state.kind == "list" for state in states):
        raise Mixed("a list as a value")


def _aligned(
    analysis, tensors: list[tf.Tensor], states: list[State]
) -> tuple[int, Size]:
    """Returns the axis of the examples from the right, and the rows of each example."""
    ranks = [analysis.rank(tensor) for tensor in tensors]
    rows = [(rank - s.axis, s) for rank, s in zip(ranks, states) if s.kind == "rows"]
    (place, state), *others = rows
    each = state.each
    for other, state in others:
        if other != place:
            raise Mixed(_UNLIKE)
        if state.each != each:
            # Sizes that only numbers tell are equal, or the batch at once fails.
            if not (state.each.symbols or each.symbols):
                raise Mixed(_UNLIKE)
            each = max(each, state.each, key=lambda size: len(size.symbols))
    for tensor, rank, state in zip(tensors, ranks, states, strict=True):
        if state.kind == "fixed" and rank >= place:
            _check_length_1(analysis.dims(tensor)[rank - place])
    return place, each


def _check_length_1(size: Size) -> None:
    """Raises Mixed unless what is no example's is broadcast over the examples.

    A length that only numbers tell may be that of the batch.
    """
    if size != ONE:
        raise Mixed(_FIXED_BESIDE)


def _elementwise(analysis, tensors: list, states: list[State], output) -> State:
    place, each = _aligned(analysis, tensors, states)
    rank = max(analysis.rank(tensor) for tensor in tensors)
    found = State("rows", rank - place, each)
    analysis.set_dims(output, found, _broadcast_dims(analysis, tensors, rank))
    return found


def _broadcast_dims(analysis, tensors: list[tf.Tensor], rank: int) -> list:
    """Returns the shape of tensors that are broadcast, where it is known.

    Of two lengths that are not known one may be 1.
    """
    dims = []
    for axis in range(rank):
        found = set()
        for tensor in tensors:
            own = axis - rank + analysis.rank(tensor)
            if own >= 0:
                found.add(analysis.dims(tensor)[own])
        found = found - {ONE} or {ONE}
        dims.append(found.pop() if len(found) == 1 else None)
    return dims


# Each element of the result is computed from those at its place.
ELEMENTWISE = (
    *("Abs", "AccumulateNV2", "Acos", "Acosh", "AddN", "Angle", "ApproximateEqual"),
    *("AsString", "Asin", "Asinh", "Atan", "Atan2", "Atanh", "BesselI0e", "BesselI1e"),
    *("Betainc", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Bucketize", "Cast", "Ceil"),
    *("CheckNumerics", "CheckNumericsV2", "ClipByValue", "Complex", "ComplexAbs"),
    *("Conj", "Cos", "Cosh", "Digamma", "Div", "DivNoNan", "Elu", "EluGrad", "Equal"),
    *("Erf", "Erfc", "Erfinv", "Exp", "Expm1", "FakeQuantWithMinMaxArgs"),
    *("FakeQuantWithMinMaxVars", "Floor", "FloorDiv", "FloorMod", "Greater"),
    *("GreaterEqual", "Igamma", "Igammac", "Imag", "Inv", "InvGrad", "Invert"),
    *("IsFinite", "IsInf", "IsNan", "LeakyRelu", "LeakyReluGrad", "Less", "LessEqual"),
    *("Lgamma", "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum"),
    *("Minimum", "Mod", "MulNoNan", "Ndtri", "Neg", "NextAfter", "NotEqual"),
    *("OnesLike", "Polygamma", "Pow", "PreventGradient", "Real", "RealDiv"),
    *("Reciprocal", "ReciprocalGrad", "RegexFullMatch", "RegexReplace", "Relu"),
    *("Relu6", "Relu6Grad", "ReluGrad", "Rint", "Round", "Rsqrt", "RsqrtGrad"),
    *("SelectV2", "Selu", "SeluGrad", "Sigmoid", "SigmoidGrad", "Sign", "Sin", "Sinh"),
    *("Snapshot", "Softplus", "SoftplusGrad", "Softsign", "SoftsignGrad", "Sqrt"),
    *("SqrtGrad", "Square", "SquaredDifference", "StaticRegexFullMatch"),
    *("StaticRegexReplace", "StringJoin", "StringLength", "StringLower", "StringStrip"),
    *("StringToHashBucket", "StringToHashBucketFast", "StringToHashBucketStrong"),
    *("StringToNumber", "StringUpper", "Tan", "Tanh", "TanhGrad", "TruncateDiv"),
    *("TruncateMod", "Xdivy", "Xlog1py", "Xlogy", "ZerosLike", "Zeta"),
)


@rule(*ELEMENTWISE)
def _of_values(analysis, operation, states):
    _without_places(states)
    return _elementwise(analysis, list(operation.inputs), states, operation.outputs[0])


@rule("Print")
def _print(analysis, operation, states):
    _without_places(states)
    if states[0].kind != "rows":
        raise Mixed(_ALONG)
    return states[0]


@rule(
    *("Identity", "StopGradient", "PlaceholderWithDefault", "DebugIdentityV2"),
    *("Enter", "NextIteration", "RefEnter", "RefIdentity"),
)
def _passing(analysis, operation, states):
    state = states[0]
    if state.kind == "rows":
        analysis.set_dims(
            operation.outputs[0], state, analysis.dims(operation.inputs[0])
        )
    return state


@rule("EnsureShape")
def _ensure_shape(analysis, operation, states):
    shape = tf.TensorShape(operation.get_attr("shape"))
    if shape.rank is not None and shape.as_list()[states[0].axis] is not None:
        raise Mixed("it wants a number of examples")
    return _passing(analysis, operation, states)


@rule("IdentityN")
def _passing_each(analysis, operation, states):
    for tensor, output, state in zip(operation.inputs, operation.outputs, states):
        if state.kind == "rows":
            analysis.set_dims(output, state, analysis.dims(tensor))
    return states


@rule("Add", "AddV2", "Sub", "Mul")
def _arithmetic(analysis, operation, states):
    if not any(state.distance is not None for state in states):
        return _of_values(analysis, operation, states)
    first, second = states
    tensors = list(operation.inputs)
    if first.distance is None and operation.type in ("Add", "AddV2", "Mul"):
        first, second, tensors = second, first, tensors[::-1]
    if first.distance is None or second.distance is not None:
        raise Mixed(_PLACE)
    found = _elementwise(analysis, tensors, [first, second], operation.outputs[0])
    if operation.type != "Mul":
        return found._replace(distance=first.distance)
    factor = analysis.value(tensors[1])
    if factor is None or factor.size != 1 or second.kind != "fixed":
        raise Mixed(_PLACE)
    distance = first.distance * factor.flat[0]
    return found._replace(distance=distance, is_number=first.is_number)


RULES["Cast"] = lambda analysis, operation, states: (
    _passing(analysis, operation, states)
    if operation.outputs[0].dtype in (tf.int32, tf.int64)  # others may overflow
    else _of_values(analysis, operation, states)
)


@rule("Select")
def _select(analysis, operation, states):
    _without_places(states)
    condition, chosen, _ = operation.inputs
    if (
        analysis.rank(condition) == analysis.rank(chosen)
        or analysis.rank(condition) == 0
    ):
        return _elementwise(
            analysis, list(operation.inputs), states, operation.outputs[0]
        )
    if any(state.kind != "rows" or state.axis for state in states):  # a vector of rows
        raise Mixed(_UNLIKE)
    if len({state.each for state in states}) > 1:
        raise Mixed(_UNLIKE)
    return states[1]


@rule("LookupTableFindV2", "LookupTableFind")
def _look_up(analysis, operation, states):
    _without_places(states)
    if states[0].kind == states[2].kind == "fixed":
        return _elementwise(
            analysis, [operation.inputs[1]], states[1:2], operation.outputs[0]
        )
    raise Mixed(_ALONG)


# Along axes.


def _with_axis(
    analysis, operation, state: State, axis: int, size: Size | None
) -> State:
    """Returns the state of the output, which has one axis more than the first input.

    `state` is that of the first input; the `size` of the new axis is None if unknown.
    """
    found = state._replace(axis=state.axis + (axis <= state.axis), is_first=False)
    dims = list(analysis.dims(operation.inputs[0]))
    dims.insert(axis, size)
    analysis.set_dims(operation.outputs[0], found, dims)
    return found


def _without_axes(analysis, operation, state: State, axes: set[int]) -> State:
    """Returns the state of the outputs, which lack axes of the first input."""
    if state.axis in axes:
        raise Mixed(_ALONG)
    moved = sum(axis < state.axis for axis in axes)
    found = state._replace(axis=state.axis - moved, is_first=False)
    dims = analysis.dims(operation.inputs[0])
    known = [size for axis, size in enumerate(dims) if axis not in axes]
    for output in operation.outputs:
        analysis.set_dims(output, found, known)
    return found


def _axes(analysis, tensor: tf.Tensor, rank: int) -> set[int]:
    value = analysis.value(tensor)
    if value is None:
        raise Mixed("its axis is not known")
    return {int(axis) % rank for axis in value.flat}


def _one(states: list[State]) -> State:
    """Returns the state of the first input, beside which all others are fixed."""
    _without_places(states)
    first, *others = states
    if first.kind != "rows" or any(state.kind != "fixed" for state in others):
        raise Mixed(_UNLIKE)
    return first


@rule("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
def _reduce(analysis, operation, states):
    state, tensor = _one(states), operation.inputs[0]
    axes = _axes(analysis, operation.inputs[1], analysis.rank(tensor))
    if state.axis in axes:
        raise Mixed(_ALONG)
    if not operation.get_attr("keep_dims"):
        return _without_axes(analysis, operation, state, axes)
    dims = analysis.dims(tensor)
    known = [ONE if axis in axes else size for axis, size in enumerate(dims)]
    analysis.set_dims(operation.outputs[0], state, known)
    return state


@rule("ArgMax", "ArgMin")
def _reduce_one(analysis, operation, states):
    state, rank = _one(states), analysis.rank(operation.inputs[0])
    axes = _axes(analysis, operation.inputs[1], rank)
    return _without_axes(analysis, operation, state, axes)


def _keep_dims(analysis, operation, state: State, changed: set[int]) -> None:
    """Takes down that outputs have the shape of the first rows, but for some axes."""
    tensor = next(t for t in operation.inputs if analysis.state(t).kind == "rows")
    dims = list(analysis.dims(tensor))
    for axis in changed:
        dims[axis] = None
    for output in operation.outputs:
        analysis.set_dims(output, state, dims)


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll")
def _scan(analysis, operation, states):
    state, axis = _one(states), operation.inputs[-1]
    if state.axis in _axes(analysis, axis, analysis.rank(operation.inputs[0])):
        raise Mixed(_ALONG)
    _keep_dims(analysis, operation, state, set())
    return state


@rule("Softmax", "LogSoftmax", "TopKV2", "MatrixDiag")
def _along_the_last(analysis, operation, states):
    state = _one(states)
    if state.axis >= analysis.rank(operation.inputs[0]) - 1:
        raise Mixed(_ALONG)
    if operation.type != "MatrixDiag":  # which has an axis more
        _keep_dims(analysis, operation, state, {-1})
    return state


@rule("MatrixDiagV2", "MatrixDiagV3")
@rule("MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3")
def _diagonals(analysis, operation, states):
    state, output = _one(states), operation.outputs[0]
    ranks = {analysis.rank(operation.inputs[0]), analysis.rank(output)}
    if state.axis >= min(ranks) - 1 or max(ranks) - min(ranks) != 1:
        raise Mixed(_ALONG)
    return state


@rule(
    *("MatrixBandPart", "Cholesky", "MatrixInverse", "MatrixDeterminant", "Svd", "Qr"),
    *("LogMatrixDeterminant", "SelfAdjointEigV2", "FFT", "IFFT", "RFFT", "IRFFT"),
)
def _along_the_last_two(analysis, operation, states):
    state = _one(states)
    if state.axis >= analysis.rank(operation.inputs[0]) - 2:
        raise Mixed(_ALONG)
    return state


@rule("MatrixSolve", "MatrixTriangularSolve", "MatrixSetDiag", "MatrixSetDiagV3")
def _pairs_of_matrices(analysis, operation, states):
    _without_places(states)
    rows = [state for state in states[:2] if state.kind == "rows"]
    ranks = [analysis.rank(tensor) for tensor in operation.inputs[:2]]
    if len(rows) < 2 or rows[0] != rows[1] or len({*states[2:]} - {FIXED}):
        raise Mixed(_UNLIKE)
    if operation.type == "MatrixTriangularSolve" and ranks[0] != ranks[1]:
        raise Mixed(_UNLIKE)  # it broadcasts, from the right
    if rows[0].axis >= ranks[0] - 2:
        raise Mixed(_ALONG)
    return rows[0]


# Along the first axis, and in one direction: images and sequences.


@rule(
    *("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Dilation2D", "LRN"),
    *("MaxPool", "MaxPoolV2", "MaxPool3D", "AvgPool", "AvgPool3D"),
    *("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea"),
    *("SpaceToDepth", "DepthToSpace", "ExtractImagePatches", "AdjustContrastv2"),
)
def _images(analysis, operation, states):
    state = _one(states)
    # Images have a height, width and channels; AdjustContrastv2 takes a single one, too.
    if state.axis or analysis.rank(operation.inputs[0]) < 4:
        raise Mixed(_ALONG)
    return state


@rule("MaxPoolGrad", "AvgPoolGrad", "MaxPoolGradGrad", "ResizeBilinearGrad")
def _images_back(analysis, operation, states):
    rows = [state for state in states if state.kind == "rows"]
    if any(state.axis for state in rows) or len(set(rows)) > 1:
        raise Mixed(_ALONG)
    if operation.type == "AvgPoolGrad":
        return _first_size_is_n(analysis, operation.inputs[0], rows[0])
    if len(rows) < len(states):
        raise Mixed(_FIXED_BESIDE)
    return rows[0]


@rule(
    "Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"
)
def _transposed_convolution(analysis, operation, states):
    _, filters, state = states
    if filters.kind != "fixed" or state.kind != "rows" or state.axis:
        raise Mixed(_ALONG)
    return _first_size_is_n(analysis, operation.inputs[0], state)


def _first_size_is_n(analysis, shape: tf.Tensor, state: State) -> State:
    value = analysis.value(shape)
    if value is None or value[0] != N * state.each:
        raise Mixed(_SIZE)
    return state


@rule("BiasAdd", "BiasAddV1")
def _bias(analysis, operation, states):
    state, tensor = _one(states), operation.inputs[0]
    has_format = "data_format" in operation.node_def.attr
    is_first = has_format and operation.get_attr("data_format") == b"NCHW"
    channels = 1 if is_first else analysis.rank(tensor) - 1
    if state.axis == channels:
        raise Mixed(_FIXED_BESIDE)
    analysis.set_dims(operation.outputs[0], state, analysis.dims(tensor))
    return state


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def _normalization(analysis, operation, states):
    state, *others = states
    channels = 1 if operation.get_attr("data_format").startswith(b"NC") else -1
    if state.kind != "rows":
        raise Mixed(_ALONG)
    if state.axis == channels % analysis.rank(operation.inputs[0]):
        # Keras's layer normalization: every row is a channel.
        of_channel = State("rows", 0, state.each)
        if any(s not in (of_channel, FIXED) for s in others) or FIXED in others[:2]:
            raise Mixed(_UNLIKE)
        return [state, *[of_channel] * (len(operation.outputs) - 1)]
    if operation.get_attr("is_training") or any(s != FIXED for s in others):
        raise Mixed("batch normalization combines the examples")
    return [state, *[FIXED] * (len(operation.outputs) - 1)]


# Products.


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _matrix_product(analysis, operation, states):
    _without_places(states)
    prefix = "transpose" if operation.type == "MatMul" else "adj"
    names = ("_a", "_b") if prefix == "transpose" else ("_x", "_y")
    ranks = [analysis.rank(tensor) for tensor in operation.inputs]
    found = []
    for i, (state, rank) in enumerate(zip(states, ranks, strict=True)):
        if state.kind != "rows":
            continue
        place = rank - state.axis  # from the right
        if place <= 2:
            place = 3 - place if operation.get_attr(prefix + names[i]) else place
            if place != 2 - i:
                raise Mixed("it sums over the examples")
        found.append((place, state.each))
    if len(found) == 2 and (found[0][0] != found[1][0] or found[0][0] <= 2):
        raise Mixed("it multiplies examples by examples")
    place, each = max(found, key=lambda pair: len(pair[1].symbols))
    if len(found) == 1 and place > 2:
        i = [state.kind for state in states].index("fixed")
        if ranks[i] >= place:
            _check_length_1(analysis.dims(operation.inputs[i])[ranks[i] - place])
    state = State("rows", max(ranks) - place, each)
    dims = _broadcast_dims(analysis, list(operation.inputs), max(ranks))
    analysis.set_dims(operation.outputs[0], state, [*dims[:-2], None, None])
    return state


@rule("Einsum")
def _einsum(analysis, operation, states):
    _without_places(states)
    left, right = operation.get_attr("equation").decode().replace(" ", "").split("->")
    terms = left.split(",")
    if "." in left:
        return _einsum_with_dots(analysis, operation, states, terms, right)
    rows = [(t[s.axis], s.each) for t, s in zip(terms, states) if s.kind == "rows"]
    fixed = [term for term, s in zip(terms, states) if s.kind == "fixed"]
    label, each = rows[0]
    if len(set(rows)) > 1 or any(term.count(label) > 1 for term in terms):
        raise Mixed("it multiplies examples by examples")
    if label not in right or any(label in term for term in fixed):
        raise Mixed("it sums over the examples")
    return State("rows", right.index(label), each)


def _einsum_with_dots(
    analysis, operation, states, terms: list[str], right: str
) -> State:
    """The examples are among the axes of three dots in front."""
    found = set()
    for tensor, state, term in zip(operation.inputs, states, terms, strict=True):
        dots = analysis.rank(tensor) - len(term.replace("...", ""))
        if state.kind == "rows":
            if not term.startswith("...") or state.axis >= dots:
                raise Mixed("an equation with three dots")
            found.add((dots - state.axis, state.each))
        elif term.startswith("...") and dots:
            raise Mixed("an equation with three dots")
    ((place, each),) = found if len(found) == 1 else [(None, None)]
    if place is None or not right.startswith("..."):
        raise Mixed(_UNLIKE)
    dots = analysis.rank(operation.outputs[0]) - len(right) + 3
    return State("rows", dots - place, each)


# Shapes.


def _reshaped(analysis, tensor: tf.Tensor, state: State, target: np.ndarray):
    """Returns the state and shape of `tensor` in the shape `target`, of sizes.

    A size of -1 is what is left.
    """
    source, target = analysis.dims(tensor), list(target)
    if Size(-1) in target:
        place = target.index(Size(-1))
        rest = product(size for size in target if size != Size(-1))
        try:
            target[place] = product(source) // rest
        except Unknown:
            target[place] = None
            return _apart(state, target)
    places = [i for i, size in enumerate(target) if size.power]
    if len(places) != 1 or target[places[0]].power != 1:
        raise Mixed("it reorders the examples")
    (place,) = places
    if state.axis != 0 or place != 0:
        before = product(source[: state.axis]), product(target[:place])
        if before[0] != before[1]:
            raise Mixed("it reorders the examples")
    return _cut_to(state, place, target), target


def _apart(state: State, target: list):
    """`_reshaped` where the product of what is left is not known."""
    places = [i for i, size in enumerate(target) if size is not None and size.power]
    if places == [0] and state.axis == 0 and target[0].power == 1:
        # Equal parts of what follows one another: the examples stay apart.
        return _cut_to(state, 0, target), target
    if places:
        raise Mixed("it reorders the examples")
    raise Mixed("a shape that is not known before there are numbers")


def _cut_to(state: State, place: int, target: list) -> State:
    return state._replace(axis=place, each=target[place] // N, is_first=False)


@rule("Reshape")
def _reshape(analysis, operation, states):
    state, shape = states
    if state.kind != "rows":
        raise Mixed(_FIXED_BESIDE)
    target = analysis.value(operation.inputs[1])
    if shape.kind not in ("fixed", "sizes") or target is None:
        raise Mixed("a shape that is not known before there are numbers")
    found, dims = _reshaped(analysis, operation.inputs[0], state, target)
    analysis.set_dims(operation.outputs[0], found, dims)
    return found


@rule("Transpose")
def _transpose(analysis, operation, states):
    state, order = states[0], analysis.value(operation.inputs[1])
    if order is None:
        raise Mixed("its axes are not known")
    order = [int(axis) for axis in order]
    found = state._replace(axis=order.index(state.axis), is_first=False)
    dims = analysis.dims(operation.inputs[0])
    analysis.set_dims(operation.outputs[0], found, [dims[axis] for axis in order])
    return found


@rule("ExpandDims")
def _expand(analysis, operation, states):
    state, rank = states[0], analysis.rank(operation.inputs[0])
    (axis,) = _axes(analysis, operation.inputs[1], rank + 1)
    return _with_axis(analysis, operation, state, axis, ONE)


@rule("Squeeze")
def _squeeze(analysis, operation, states):
    (state,), rank = states, analysis.rank(operation.inputs[0])
    axes = {axis % rank for axis in operation.get_attr("squeeze_dims")}
    if not axes:
        raise Mixed("it drops every axis of length 1, the examples' too")
    return _without_axes(analysis, operation, state, axes)


def _all_alike(states: list[State]) -> State:
    """Returns the state that all inputs have, places and values aside."""
    if any(state.kind != "rows" for state in states):
        raise Mixed(_FIXED_BESIDE)
    if len({(state.axis, state.each) for state in states}) > 1:
        raise Mixed(_UNLIKE)
    return states[0]


def _with_places(states: list[State], is_last: bool) -> State:
    """Returns the first state; rows of (place, value, ...) are read by GatherNd."""
    first, *others = states
    if all(state.distance is None for state in states):
        return first
    are_values = all(state.distance is None for state in others)
    if not (is_last and first.is_number and are_values):
        raise Mixed(_PLACE)
    return first._replace(is_number=False, is_first=True)


@rule("ConcatV2")
def _concat(analysis, operation, states):
    *states, axis_state = states
    state, tensors = _all_alike(states), operation.inputs[:-1]
    rank = analysis.rank(tensors[0])
    (axis,) = _axes(analysis, operation.inputs[-1], rank)
    if axis_state.kind != "fixed" or axis == state.axis:
        raise Mixed("it joins examples with examples")
    dims = analysis.dims(tensors[0])
    found = _with_places(states, axis == rank - 1 and dims[axis] == ONE)
    dims = [None if i == axis else size for i, size in enumerate(dims)]
    analysis.set_dims(operation.outputs[0], found, dims)
    return found


@rule("Pack")
def _pack(analysis, operation, states):
    _all_alike(states)
    rank = analysis.rank(operation.inputs[0])
    axis = operation.get_attr("axis") % (rank + 1)
    state = _with_places(states, axis == rank)
    found = _with_axis(analysis, operation, state, axis, Size(len(states)))
    return found._replace(is_first=state.is_first)


@rule("Unpack")
def _unpack(analysis, operation, states):
    axis = operation.get_attr("axis") % analysis.rank(operation.inputs[0])
    return _without_axes(analysis, operation, _one(states), {axis})


@rule("Split", "SplitV")
def _split(analysis, operation, states):
    inputs = list(operation.inputs)
    if operation.type == "Split":
        inputs, states = [inputs[1], inputs[0]], [states[1], states[0]]
    state = _one(states)
    if len(operation.outputs) == 1:  # for one device, say
        analysis.set_dims(operation.outputs[0], state, analysis.dims(inputs[0]))
        return state
    axes = _axes(analysis, inputs[-1], analysis.rank(inputs[0]))
    if state.axis in axes:
        raise Mixed("it takes examples apart")
    _keep_dims(analysis, operation, state, axes)
    return state


@rule("Pad", "PadV2", "MirrorPad")
def _pad(analysis, operation, states):
    state, paddings = _one(states), analysis.value(operation.inputs[1])
    if paddings is None or list(paddings[state.axis]) != [Size(0), Size(0)]:
        raise Mixed("it may add examples")
    axes = {*range(len(paddings))} - {state.axis}
    _keep_dims(analysis, operation, state, axes)
    return state


@rule("OneHot")
def _one_hot(analysis, operation, states):
    state, rank = _one(states), analysis.rank(operation.inputs[0])
    axis = operation.get_attr("axis")
    axis = rank if axis == -1 else axis
    return _with_axis(analysis, operation, state, axis, None)


@rule("StridedSlice")
def _strided_slice(analysis, operation, states):
    state, *bounds = states
    if state.kind != "rows" or any(s.kind not in ("fixed", "sizes") for s in bounds):
        raise Mixed("rows are chosen by values")
    tensor, rank = operation.inputs[0], analysis.rank(operation.inputs[0])
    begin, end, strides = (analysis.value(each) for each in operation.inputs[1:])
    number = operation.inputs[1].shape.num_elements()
    if number is None:
        raise Mixed("its axes are not known")
    masks = {
        name: operation.get_attr(f"{name}_mask")
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    masks["stride"] = 0

    def has(name: str, i: int) -> bool:
        return bool(masks[name] >> i & 1)

    entries = list(range(number))
    if not masks["ellipsis"]:
        entries.append(None)
    taken = sum(
        not has("ellipsis", i) and not has("new_axis", i) for i in range(number)
    )
    dims, source, axis, known = analysis.dims(tensor), 0, None, []
    for i in entries:
        if i is None or has("ellipsis", i):
            for place in range(source, source + rank - taken):
                axis = len(known) if place == state.axis else axis
                known.append(dims[place])
            source += rank - taken
        elif has("new_axis", i):
            known.append(ONE)
        else:
            is_whole = has("begin", i) or begin is not None and begin[i] == Size(0)
            is_whole &= has("end", i) or end is not None and end[i] == dims[source]
            is_whole &= strides is not None and strides[i] == ONE
            is_whole &= not has("shrink_axis", i)
            if source == state.axis:
                if not is_whole:
                    raise Mixed("it chooses examples")
                axis = len(known)
            elif any(
                not has(name, i)
                and s.kind == "sizes"
                and (value is None or value[i].power)
                for name, value, s in zip(
                    ("begin", "end", "stride"), (begin, end, strides), bounds
                )
            ):
                raise Mixed(_SIZE)
            if not has("shrink_axis", i):
                known.append(dims[source] if is_whole else None)
            source += 1
    found = state._replace(axis=axis, is_first=False)
    analysis.set_dims(operation.outputs[0], found, known)
    return found


@rule("StridedSliceGrad")
def _strided_slice_back(analysis, operation, states):
    *bounds, state = states
    shape = analysis.value(operation.inputs[0])
    strides = analysis.value(operation.inputs[3])
    is_whole = strides is not None and strides[0] == ONE
    is_whole &= all(operation.get_attr(f"{name}_mask") & 1 for name in ("begin", "end"))
    masks = ("shrink_axis_mask", "new_axis_mask", "ellipsis_mask")
    is_first = not any(operation.get_attr(name) & 1 for name in masks)
    if (
        shape is None
        or state.kind != "rows"
        or state.axis
        or not (is_whole and is_first)
    ):
        raise Mixed("it chooses examples")
    _without_places([state])
    if shape[0] != N * state.each or any(size.power for size in shape[1:]):
        raise Mixed(_SIZE)
    if any(s.kind != "fixed" for s in bounds[1:]):
        raise Mixed(_SIZE)
    analysis.set_dims(operation.outputs[0], state, list(shape))
    return state


@rule("Slice")
def _slice(analysis, operation, states):
    state = states[0]
    if state.kind != "rows" or any(
        s.kind not in ("fixed", "sizes") for s in states[1:]
    ):
        raise Mixed("rows are chosen by values")
    _without_places([state])
    begin, size = (analysis.value(each) for each in operation.inputs[1:])
    if begin is None or size is None:
        raise Mixed("it may choose examples")
    others = [i for i in range(len(begin)) if i != state.axis]
    if any(value[i].power for value in (begin, size) for i in others):
        raise Mixed(_SIZE)
    whole = (Size(-1), N * state.each)
    if begin[state.axis] != Size(0) or size[state.axis] not in whole:
        raise Mixed("it chooses examples")
    _keep_dims(analysis, operation, state, set(others))
    return state._replace(is_first=False)


# Rows that a size makes.


def _made(analysis, output: tf.Tensor, dims) -> State:
    """Returns the state of what has the shape `dims`, each element like the others."""
    if dims is None:
        raise Mixed("a shape that is not known before there are numbers")
    places = [i for i, size in enumerate(dims) if size.power]
    if len(places) != 1 or dims[places[0]].power != 1:
        raise Mixed(_UNLIKE)
    found = State("rows", places[0], dims[places[0]] // N)
    analysis.set_dims(output, found, list(dims))
    return found


@rule("Fill")
def _fill(analysis, operation, states):
    if states[1].kind != "fixed" or states[0].kind not in ("fixed", "sizes"):
        raise Mixed(_SIZE)
    return _made(analysis, operation.outputs[0], analysis.value(operation.inputs[0]))


@rule(*SHAPED_DRAWS)
def _random(analysis, operation, states):
    if states[0].kind != "sizes" or any(state.kind != "fixed" for state in states[1:]):
        raise Mixed(_SIZE)
    if operation.type.startswith("Stateless") and not _is_of_micro_batch(operation):
        raise Mixed(
            "a stateless operation draws the same numbers for every micro-batch"
        )
    return _made(analysis, operation.outputs[0], analysis.value(operation.inputs[0]))


def _is_of_micro_batch(operation: tf.Operation) -> bool:
    """Returns whether a seed is another one for each micro-batch or run."""
    seeds = data_ancestors([tensor.op for tensor in operation.inputs[1:]])
    return any(e.type == "Placeholder" or e.type.startswith("Rng") for e in seeds)


@rule("RngReadAndSkip")
def _random_state(analysis, operation, states):
    return FIXED  # of a run; a size only says how many numbers are skipped


@rule("Multinomial")
def _multinomial(analysis, operation, states):
    state = _one(states)
    if state.axis != 0:
        raise Mixed("it draws for each class")
    return state


@rule("Range")
def _range(analysis, operation, states):
    start, limit, delta = (analysis.value(each) for each in operation.inputs)
    if start is None or limit is None or delta is None or start[()] != Size(0):
        raise Mixed(_PLACE)
    number = limit[()] // delta[()]
    found = State("rows", 0, number // N, distance=delta[()], is_number=True)
    if found.each != ONE:
        raise Mixed(_PLACE)
    analysis.set_dims(operation.outputs[0], found, [number])
    return found


@rule("Tile", "BroadcastTo")
def _tile(analysis, operation, states):
    state, tensor = states[0], operation.inputs[0]
    value, output = analysis.value(operation.inputs[1]), operation.outputs[0]
    if value is None or states[1].kind not in ("fixed", "sizes"):
        raise Mixed("a shape that is not known before there are numbers")
    is_tile, rank = operation.type == "Tile", analysis.rank(tensor)
    places = [i for i, size in enumerate(value) if size.power]
    if state.kind == "rows":
        axis = state.axis + len(value) - rank
        if is_tile:
            if places or value[axis] != ONE:
                raise Mixed("it repeats the examples")
            dims = [a * b for a, b in zip(analysis.dims(tensor), value, strict=True)]
        else:
            if places != [axis] or value[axis] != N * state.each:
                raise Mixed(_UNLIKE)
            dims = list(value)
        found = state._replace(axis=axis, is_first=False)
        analysis.set_dims(output, found, dims)
        return found
    if state.kind != "fixed" or len(places) != 1 or value[places[0]].power != 1:
        raise Mixed(_SIZE)
    (place,) = places
    own = place if is_tile else place - len(value) + rank
    if own >= 0 and analysis.dims(tensor)[own] != ONE:
        raise Mixed(_FIXED_BESIDE)
    found = State("rows", place, value[place] // N)
    dims = list(value)
    if is_tile:
        sizes_of = analysis.dims(tensor)
        dims = [a * b for a, b in zip(sizes_of, value, strict=True)]
    analysis.set_dims(output, found, dims)
    return found


# Rows that are looked up.


@rule("GatherV2", "Gather", "ResourceGather")
def _gather(analysis, operation, states):
    table, places, *_ = states
    axis, batch_dims = 0, 0
    if operation.type == "GatherV2":
        value = analysis.value(operation.inputs[2])
        if value is None:
            raise Mixed("its axis is not known")
        axis = int(value.flat[0])
    if operation.type != "Gather":
        batch_dims = operation.get_attr("batch_dims")
    indices, output = operation.inputs[1], operation.outputs[0]
    if table.kind == "fixed" and places.kind == "rows" and not batch_dims:
        _without_places([places])
        # The rank of a variable's handle is none of its values.
        axis = axis % analysis.rank(operation.inputs[0]) if axis else 0
        found = places._replace(axis=axis + places.axis)
        rank = output.shape.rank
        if rank is not None:
            dims = [None] * rank
            dims[axis : axis + analysis.rank(indices)] = analysis.dims(indices)
            analysis.set_dims(output, found, dims)
        return found
    if table.kind != "rows" or table.distance is not None:
        raise Mixed("rows are chosen by values")
    axis %= analysis.rank(operation.inputs[0])
    if places.kind == "fixed" and not batch_dims and axis != table.axis:
        moved = analysis.rank(indices) - 1 if axis < table.axis else 0
        return table._replace(axis=table.axis + moved)
    if places.kind != "rows":
        raise Mixed("rows are chosen by values")
    if batch_dims > table.axis and axis >= batch_dims:
        _without_places([places])
        if (places.axis, places.each) == (table.axis, table.each):
            return table
    if not batch_dims and axis == table.axis == 0 and places.distance is not None:
        return _from_own(analysis, operation, places, table)
    raise Mixed("rows are chosen by values")


def _from_own(analysis, operation, state: State, table: State) -> State:
    """Returns the state of rows that are looked up by the number of their example."""
    if state.distance != table.each:
        raise Mixed("rows are chosen by values")
    if not state.is_number:
        tensor, places = operation.inputs[:2]
        analysis.guards.append(Guard(places, state.axis, tensor))
    return state._replace(distance=None, is_number=False, is_first=False)


@rule("GatherNd", "ResourceGatherNd")
def _gather_nd(analysis, operation, states):
    table, places = states
    *_, length = analysis.dims(operation.inputs[1])
    last = analysis.rank(operation.inputs[1]) - 1
    if places.kind != "rows" or places.axis == last:
        raise Mixed("rows are chosen by values")
    if table.kind == "fixed":
        _without_places([places])
        return places
    # Of a place that is the number again and again only the first is an example's.
    is_number = places.is_number and length == ONE
    is_own = places.distance == table.each and (is_number or places.is_first)
    if table.kind == "rows" and table.axis == 0 and is_own:
        return places._replace(distance=None, is_number=False, is_first=False)
    raise Mixed("rows are chosen by values")


# Losses and sequences.


@rule("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
def _cross_entropy(analysis, operation, states):
    _without_places(states)
    if any(state.kind != "rows" for state in states):
        raise Mixed(_FIXED_BESIDE)
    if any(state.axis for state in states):
        raise Mixed(_ALONG)
    each = {state.each for state in states}
    if len(each) > 1 and not all(size.symbols for size in each):
        raise Mixed(_UNLIKE)
    return states[0]


@rule("ReverseSequence")
def _reverse_sequence(analysis, operation, states):
    _without_places(states)
    state, lengths = states
    if state.kind != lengths.kind or operation.get_attr("batch_dim") != state.axis:
        raise Mixed(_ALONG)
    if lengths.axis or lengths.each != state.each:
        raise Mixed(_UNLIKE)
    return state


# Lists of tensors: TensorList of control flow v2, TensorArray of v1.

# Places of the list, of the number of an element, and of elements that are put into it.
_LISTS = {
    "TensorListSetItem": (0, 1, 2),
    "TensorListPushBack": (0, None, 1),
    "TensorArrayWriteV3": (3, 1, 2),
    "TensorListFromTensor": (None, None, 0),
    "TensorArrayScatterV3": (3, 1, 2),
    "TensorListGetItem": (0, 1, None),
    "TensorArrayReadV3": (2, 1, None),
    "TensorListStack": (0, None, None),
    "TensorListGather": (0, 1, None),
    "TensorArrayGatherV3": (2, 1, None),
}


def _places(operation, states: list[State]) -> tuple[int | None, int | None]:
    """Returns the places of the list, and of elements that are put into it."""
    of, index, item = _LISTS[operation.type]
    if index is not None and states[index].kind != "fixed":
        raise Mixed("an element is chosen by a value")
    return of, item


def _element(found: State) -> State:
    """Returns the state of a list's elements."""
    if found.kind == "list" and found.axis is None:
        raise Mixed("an element of an empty list")
    return State("rows", found.axis, found.each) if found.kind == "list" else found


def _with(found: State, element: State) -> State:
    """Returns the state of a list that `element`, a list's state, joins."""
    found = join(found, element)
    if found.kind == "mixed":
        raise Mixed("a list of elements of several kinds")
    return found


def _take(analysis, found: State, of: tf.Tensor, output: tf.Tensor) -> State:
    """Returns the state of an element of the list `of`."""
    element = _element(found)
    if element.kind == "rows" and analysis.knows_dims(of):
        analysis.set_dims(output, element, analysis.dims(of))
    return element


@rule("TensorListSetItem", "TensorListPushBack", "TensorArrayWriteV3")
def _put(analysis, operation, states):
    of, item = _places(operation, states)
    element, tensor = states[item], operation.inputs[item]
    _without_places([element])
    if element.kind == "rows":
        element = element._replace(kind="list")  # its dims are those of its elements
        analysis.set_dims(operation.outputs[0], element, analysis.dims(tensor))
    return _with(states[of], element)


@rule("TensorListFromTensor", "TensorArrayScatterV3")
def _unstack(analysis, operation, states):
    of, item = _places(operation, states)
    state, tensor = states[item], operation.inputs[item]
    if state.kind != "rows":
        return state if of is None else join(states[of], state)
    _without_places([state])
    if state.axis == 0:
        raise Mixed("a list of examples")
    found = state._replace(kind="list", axis=state.axis - 1)
    analysis.set_dims(operation.outputs[0], found, analysis.dims(tensor)[1:])
    return found if of is None else _with(states[of], found)


@rule("TensorListGetItem", "TensorArrayReadV3")
def _get(analysis, operation, states):
    of, _ = _places(operation, states)
    return _take(analysis, states[of], operation.inputs[of], operation.outputs[0])


@rule("TensorListPopBack")
def _pop(analysis, operation, states):
    handle, (output, item) = operation.inputs[0], operation.outputs
    if analysis.knows_dims(handle):
        analysis.set_dims(output, states[0], analysis.dims(handle))
    return [states[0], _take(analysis, states[0], handle, item)]


@rule("TensorListStack", "TensorListGather", "TensorArrayGatherV3")
def _stack(analysis, operation, states):
    of, _ = _places(operation, states)
    element, tensor = _element(states[of]), operation.inputs[of]
    if element.kind != "rows":
        return element
    element = element._replace(axis=element.axis + 1)
    if analysis.knows_dims(tensor):
        analysis.set_dims(operation.outputs[0], element, [None, *analysis.dims(tensor)])
    return element


@rule("TensorListLength", "TensorArraySizeV3")
def _length(analysis, operation, states):
    return FIXED


@rule("TensorListElementShape")
def _element_shape(analysis, operation, states):
    return SIZES
