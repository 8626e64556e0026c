"""Proof that gradients that somebody wrote for variables are sums over the examples.

    gradient of the batch = sum of the gradients of its micro-batches

A gradient with rows is proved by own_gradients.py. One without must add rows, or be a
linear function of gradients that TensorFlow derives. A clipped one is no sum, nor is a
number that each micro-batch would add again.
"""

import re
from collections.abc import Callable

import tensorflow as tf

from estimator_accum.graph.functions import all_nodes, has_own_gradient
from estimator_accum.graph.internals import gradient_scope_of
from estimator_accum.graph.names import FED
from estimator_accum.rows.analysis import Analysis, in_order
from estimator_accum.rows.loss_sums import combines_rows, sums_rows

_DERIVED = re.compile(r"(^|/)gradients(_\d+)?/")  # the names of derivatives
_ADDING_ROWS = re.compile(r"BiasAddGrad|UnsortedSegmentSum|.*BackpropFilter(V2)?")
# Operations that are linear in their first input, in any, in all together.
_OF_FIRST = {
    *("BroadcastTo", "Cast", "Div", "DivNoNan", "ExpandDims", "GatherV2", "Identity"),
    *("Mean", "Neg", "Pad", "RealDiv", "Reshape", "ReverseV2", "Slice", "Squeeze"),
    *("SplitV", "StopGradient", "StridedSlice", "Sum", "Tile", "Transpose", "Unpack"),
}
_OF_ANY = {"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul", "Mul"}
_OF_ALL = {"Add", "AddN", "AddV2", "Pack", "Sub"}
_CHOOSING = {"Select", "SelectV2"}


def check_own_sums(
    backward: Analysis,
    gradients: list[tf.Tensor],
    customized: list[tf.Operation],
    remedy: str,
) -> None:
    """Raises ValueError unless gradients that somebody wrote are sums over the examples.

    Args:
        backward: The states of `gradients`.
        gradients: The tensors of the gradients of variables.
        customized: Operations with a gradient that somebody wrote, or with one inside.
        remedy: End of the error's last sentence.
    """
    nodes = filter(has_own_gradient, all_nodes(customized))
    scopes = {gradient_scope_of(node) for node in nodes}

    def is_own(operation: tf.Operation) -> bool:
        # A function's argument may have the name of what it is used for.
        has_scope = any(scope in f"/{operation.name}" for scope in scopes)
        return has_scope and operation.type not in FED

    operation = _find_other(backward, gradients, is_own)
    if operation is not None:
        raise ValueError(
            "The gradient that a tf.custom_gradient has for a variable must be a sum over "
            f"the examples. Received: {operation.name} of type {operation.type}, of "
            f"which this is not proved. {remedy.capitalize()}."
        )


def _find_other(
    analysis: Analysis, results: list[tf.Tensor], is_own: Callable
) -> tf.Operation | None:
    """Returns an operation by which a gradient of `is_own` is no sum; else None."""
    for (_, graph), body in analysis.bodies.items():
        operation = _find_other(body, graph.outputs, is_own)
        if operation is not None:
            return operation
    order = in_order([result.op for result in results])
    culprits = {}  # by the tensor that is no sum
    for operation in order:
        if is_own(operation):
            causes = [
                culprits[t.ref()] for t in operation.inputs if t.ref() in culprits
            ]
            is_sum = not causes and _makes_sums(analysis, operation)
            culprit = None if is_sum else [*causes, operation][0]
        else:
            is_derived = _DERIVED.search(operation.name) and operation.type not in FED
            culprit = None if is_derived else operation
        for tensor in operation.outputs if culprit else ():
            if analysis.state(tensor).kind == "mixed":
                culprits[tensor.ref()] = culprit
    used = [tensor for op in order if not is_own(op) for tensor in op.inputs]
    for tensor in filter(lambda tensor: is_own(tensor.op), [*used, *results]):
        if tensor.ref() in culprits:
            return culprits[tensor.ref()]
        is_added_again = analysis.state(tensor).kind == "fixed" and not _is_zero(tensor)
        if is_added_again and tensor.dtype.is_floating:
            return tensor.op
    return None


def _makes_sums(analysis: Analysis, operation: tf.Operation) -> bool:
    """Returns whether results are sums over the examples, if inputs without rows are."""
    kinds = [analysis.state(tensor).kind for tensor in operation.inputs]
    if not all(output.shape.is_fully_defined() for output in operation.outputs):
        return False
    if "mixed" not in kinds:
        return _adds_rows(analysis, operation, kinds)
    if not {*kinds} <= {"fixed", "mixed"}:
        return False
    others = [
        place
        for place, tensor in enumerate(operation.inputs)
        if kinds[place] == "fixed" and not _is_zero(tensor)
    ]
    last, sums = len(kinds) - 1, kinds.count("mixed")
    if operation.type in _OF_FIRST:
        return (
            sums == 1 and kinds[0] == "mixed" and operation.outputs[0].dtype.is_floating
        )
    if operation.type in _OF_ANY:
        return sums == 1
    if operation.type in _CHOOSING:
        return kinds[0] == "fixed" and not {1, 2} & {*others}
    if operation.type == "ConcatV2":
        return kinds[last] == "fixed" and not {*others} - {last}
    return operation.type in _OF_ALL and not others


def _adds_rows(analysis: Analysis, operation: tf.Operation, kinds: list[str]) -> bool:
    if kinds[:1] != ["rows"]:
        return False
    if operation.type == "Sum":
        return sums_rows(analysis, operation)
    if operation.type in ("Einsum", "MatMul"):
        return combines_rows(analysis, operation)
    return _ADDING_ROWS.fullmatch(operation.type) is not None


def _is_zero(tensor: tf.Tensor) -> bool:
    value = tf.get_static_value(tensor)
    return tensor.op.type == "ZerosLike" or value is not None and not value.any()
