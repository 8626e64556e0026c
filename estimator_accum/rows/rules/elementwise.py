"""Rules of operations that compute each element from those at its place."""

import tensorflow as tf

from estimator_accum.rows.rules.broadcasting import broadcast
from estimator_accum.rows.rules.refusals import ALONG, PLACE, UNLIKE, without_places
from estimator_accum.rows.rules.table import rule
from estimator_accum.rows.sizes import ONE, Size
from estimator_accum.rows.states import Mixed

ELEMENTWISE = (
    *("Abs", "AccumulateNV2", "Acos", "Acosh", "AddN", "Angle", "ApproximateEqual"),
    *("AsString", "Asin", "Asinh", "Atan", "Atan2", "Atanh", "BesselI0", "BesselI0e"),
    *("BesselI1", "BesselI1e", "BesselJ0", "BesselJ1", "BesselK0", "BesselK0e"),
    *("BesselK1", "BesselK1e", "BesselY0", "BesselY1", "Betainc", "BitwiseAnd"),
    *("BitwiseOr", "BitwiseXor", "Bucketize", "Ceil", "CheckNumerics"),
    *("CheckNumericsV2", "ClipByValue", "Complex", "ComplexAbs", "Conj", "Cos", "Cosh"),
    *("Dawsn", "Digamma", "Div", "DivNoNan", "Elu", "EluGrad"),
    *("Equal", "Erf", "Erfc", "Erfinv", "Exp", "Expint", "Expm1"),
    *("FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVars", "Floor", "FloorDiv"),
    *("FloorMod", "FresnelCos", "FresnelSin", "Greater", "GreaterEqual", "Igamma"),
    *("Igammac", "Imag", "Inv", "InvGrad", "Invert", "IsFinite", "IsInf", "IsNan"),
    *("LeakyRelu", "LeakyReluGrad", "LeftShift", "Less", "LessEqual", "Lgamma", "Log"),
    *("Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Mod"),
    *("MulNoNan", "Ndtri", "Neg", "NextAfter", "NotEqual", "OnesLike", "Polygamma"),
    *("PopulationCount", "Pow", "PreventGradient", "Real", "RealDiv", "Reciprocal"),
    *("ReciprocalGrad", "RegexFullMatch", "RegexReplace", "Relu", "Relu6", "Relu6Grad"),
    *("ReluGrad", "RightShift", "Rint", "Round", "Rsqrt", "RsqrtGrad", "SelectV2"),
    *("Selu", "SeluGrad", "Sigmoid", "SigmoidGrad", "Sign", "Sin", "Sinh", "Snapshot"),
    *("Softplus", "SoftplusGrad", "Softsign", "SoftsignGrad", "Spence", "Sqrt"),
    *("SqrtGrad", "Square", "SquaredDifference", "StaticRegexFullMatch"),
    *("StaticRegexReplace", "StringJoin", "StringLength", "StringLower", "StringStrip"),
    *("StringToHashBucket", "StringToHashBucketFast", "StringToHashBucketStrong"),
    *("StringToNumber", "StringUpper", "Tan", "Tanh", "TanhGrad", "TruncateDiv"),
    *("TruncateMod", "UnicodeScript", "UnicodeTranscode", "Xdivy", "Xlog1py", "Xlogy"),
    *("ZerosLike", "Zeta"),
)


@rule(*ELEMENTWISE, "Substr")
def _of_values(analysis, operation, states):
    if operation.type == "SelectV2" and _are_numbers(analysis, operation, states):
        shape = analysis.dims(operation.inputs[1])
        return analysis.set_dims(operation.outputs[0], states[1], shape)
    without_places(states)
    return broadcast(analysis, list(operation.inputs), states, operation.outputs[0])


def _are_numbers(analysis, operation, states) -> bool:
    """Returns whether the numbers of rows are chosen, or 0 where there is a single row.

    `tf.vectorized_map` chooses so.
    """
    predicate, _, zero = operation.inputs
    if states[0].kind != "sizes" or not states[1].is_number or states[1].span != ONE:
        return False
    if predicate.op.type != "Greater" or zero.shape.rank != 0:
        return False
    size, least = map(analysis.value, predicate.op.inputs)
    if tf.get_static_value(zero) != 0 or size is None or least is None:
        return False
    are_scalars = size.ndim == least.ndim == 0
    return are_scalars and size[()].power == 1 and least[()] == ONE


@rule("Print")
def _print(analysis, operation, states):
    without_places(states)
    if states[0].kind != "rows":
        raise Mixed(ALONG)
    return states[0]


@rule(
    *("Identity", "IdentityN", "StopGradient", "PlaceholderWithDefault"),
    "DebugIdentityV2",
    *("Enter", "NextIteration", "RefEnter", "RefIdentity"),
)
def _passing(analysis, operation, states):
    for tensor, output, state in zip(operation.inputs, operation.outputs, states):
        # A branch may have a result of an unknown rank, which `Tensor.set_shape` tells.
        has_rank = tensor.shape.rank is not None or analysis.knows_dims(tensor)
        if state.kind == "rows" and (has_rank or output.shape.rank is None):
            analysis.set_dims(output, state, analysis.dims(tensor))
    return states


@rule("EnsureShape")
def _ensure_shape(analysis, operation, states):
    shape = tf.TensorShape(operation.get_attr("shape"))
    if shape.rank is not None and shape.as_list()[states[0].axis] is not None:
        raise Mixed("it wants a number of examples")
    return _passing(analysis, operation, states)


@rule("Add", "AddV2", "Sub", "Mul")
def _arithmetic(analysis, operation, states):
    if not any(state.distance is not None for state in states):
        return _of_values(analysis, operation, states)
    first, second = states
    tensors = list(operation.inputs)
    if first.distance is None and operation.type in ("Add", "AddV2", "Mul"):
        first, second, tensors = second, first, tensors[::-1]
    if first.distance is None or second.distance is not None:
        raise Mixed(PLACE)
    result = broadcast(analysis, tensors, [first, second], operation.outputs[0])
    if operation.type != "Mul":
        return result._replace(distance=first.distance)
    distance = first.distance * _factor(analysis, tensors[1])
    return result._replace(distance=distance, is_number=first.is_number)


def _factor(analysis, tensor: tf.Tensor) -> Size:
    """Returns the number that all elements are, of an example's too."""
    if tensor.op.type == "OnesLike":
        return ONE
    if tensor.op.type == "Fill":
        tensor = tensor.op.inputs[1]
    value = analysis.value(tensor)
    if value is None or len({*value.flat}) != 1 or value.flat[0].power:
        raise Mixed(PLACE)
    return value.flat[0]


@rule("Cast")
def _cast(analysis, operation, states):
    if operation.outputs[0].dtype in (tf.int32, tf.int64):  # others may overflow
        return _passing(analysis, operation, states)
    return _of_values(analysis, operation, states)


@rule("Select")
def _select(analysis, operation, states):
    without_places(states)
    condition, chosen, _ = operation.inputs
    if (
        analysis.rank(condition) == analysis.rank(chosen)
        or analysis.rank(condition) == 0
    ):
        return broadcast(analysis, list(operation.inputs), states, operation.outputs[0])
    if any(state.kind != "rows" or state.axis for state in states):  # a vector of rows
        raise Mixed(UNLIKE)
    if len({state.span for state in states}) > 1:
        raise Mixed(UNLIKE)
    return states[1]


@rule("LookupTableFindV2", "LookupTableFind")
def _look_up(analysis, operation, states):
    without_places(states)
    if operation.outputs[0].shape.rank is None:
        raise Mixed("its values may be vectors")
    if states[0].kind == states[2].kind == "fixed":
        return broadcast(
            analysis, [operation.inputs[1]], states[1:2], operation.outputs[0]
        )
    raise Mixed(ALONG)
