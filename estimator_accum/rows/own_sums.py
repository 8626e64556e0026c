"""Proof that gradients that somebody wrote for variables are sums over the examples.

    gradient of the batch = sum of the gradients of its micro-batches

A gradient without rows must add rows, or be a linear function of such sums and of
gradients that TensorFlow derives. A clipped one is no sum, nor is a number that each
micro-batch would add again.
"""

import re
from collections.abc import Iterable

import tensorflow as tf

from estimator_accum.graph.functions import (
    all_nodes,
    functions_of,
    has_own_gradient,
    library_of_functions,
    nodes_of,
)
from estimator_accum.graph.internals import gradient_scope_of
from estimator_accum.graph.names import BRANCHES, CALLERS, FED, LOOPS
from estimator_accum.rows.analysis import Analysis, in_order
from estimator_accum.rows.loss_sums import combines_rows, sums_rows

DERIVATIVES = "derivatives_of_rows"  # the scope of tf.gradients
_DERIVED = re.compile(rf"(^|/)(gradients|{DERIVATIVES})(_\d+)?/")
_FILTERS = re.compile(r".*BackpropFilter(V2)?")
# Operations that are linear in their first input, in any, in all together. Those of the
# first set change no axis.
_OF_PLACES = {
    *("Cast", "CheckNumerics", "CheckNumericsV2", "Conj", "Div", "DivNoNan"),
    *("EnsureShape", "Identity", "Neg", "Real", "RealDiv", "StopGradient"),
}
_OF_FIRST = {
    *("BroadcastTo", "Cumsum", "ExpandDims", "GatherNd", "GatherV2", "MatrixBandPart"),
    *("Mean", "Pad", "Reshape", "ReverseV2", "Roll", "Slice", "SplitV", "Squeeze"),
    *("StridedSlice", "Sum", "Tile", "Transpose", "UnsortedSegmentSum", "Unpack"),
    *_OF_PLACES,
}
_OF_ANY = {"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul", "Mul"}
_OF_ALL = {"Add", "AddN", "AddV2", "Pack", "Sub"}
_CHOOSING = {"Select", "SelectV2"}
_ELEMENTWISE = {"Add", "AddN", "AddV2", "Mul", "Sub", *_CHOOSING, *_OF_PLACES}


def check_own_sums(
    backward: Analysis,
    gradients: list[tf.Tensor],
    returned: list,
    customized: list[tf.Operation],
    remedy: str,
) -> None:
    """Raises ValueError unless gradients that somebody wrote are sums over the examples.

    Args:
        backward: The states of `gradients` and `returned`.
        gradients: The tensors of the gradients of variables.
        returned: The tensors of what somebody's gradients return for all that is
            computed from variables.
        customized: Operations with a gradient that somebody wrote, or with one inside.
        remedy: End of the error's last sentence.
    """
    nodes = filter(has_own_gradient, all_nodes(customized))
    proof = _Proof({gradient_scope_of(node) for node in nodes})
    culprit = proof.culprit(backward, [*gradients, *returned], returned)
    if culprit is not None:
        raise ValueError(
            "The gradient that a tf.custom_gradient has for a variable must be a sum over "
            f"the examples. Received: {culprit.name} of type {culprit.type}, of which "
            f"this is not proved. {remedy.capitalize()}."
        )


class _Proof:
    """The search for what is no sum.

    Args:
        scopes: Parts of names, of all operations of gradients that somebody wrote.
    """

    def __init__(self, scopes: Iterable[str]):
        self._scopes = list(scopes)

    def culprit(
        self,
        analysis: Analysis,
        results: list[tf.Tensor],
        returned: Iterable[tf.Tensor] = (),
        arguments: dict | None = None,
    ) -> tf.Operation | None:
        """Returns an operation by which a gradient that somebody wrote is no sum.

        Args:
            analysis: The states.
            results: Results of a graph.
            returned: Tensors of the graph that must be sums.
            arguments: The culprits of a function's arguments, None for a sum.
        """
        order = in_order([result.op for result in results])
        culprits, found = {}, []  # culprits: by the tensor that is no sum
        for operation in order:
            if operation.type in CALLERS and not self._is_own(operation):
                found += self._of_bodies(analysis, operation, culprits)
            if operation.type in FED:
                culprit = (arguments or {}).get(operation.outputs[0].ref(), operation)
            else:
                culprit = self._cause(analysis, operation, culprits)
            for tensor in operation.outputs if culprit else ():
                if analysis.state(tensor).kind == "mixed":
                    culprits[tensor.ref()] = culprit
        used = [t for op in order if not self._is_own(op) for t in op.inputs]
        leaving = [t for t in (*used, *results) if self._is_own(t.op)]
        for tensor in (*returned, *leaving):
            if tensor.ref() in culprits:
                found.append(culprits[tensor.ref()])
            elif not _may_be_added(analysis, tensor):
                found.append(tensor.op)
        return found[0] if found else None

    def _is_own(self, operation: tf.Operation) -> bool:
        # A function's argument may have the name of what it is used for.
        has_scope = any(scope in f"/{operation.name}" for scope in self._scopes)
        return has_scope and operation.type not in FED

    def _cause(
        self, analysis: Analysis, operation: tf.Operation, culprits: dict
    ) -> tf.Operation | None:
        """Returns why results that have no rows are no sums, or None if they are."""
        if _DERIVED.search(operation.name) and not self._is_own(operation):
            return None
        causes = [culprits[t.ref()] for t in operation.inputs if t.ref() in culprits]
        is_sum = not causes and _makes_sums(analysis, operation)
        return None if is_sum else [*causes, operation][0]

    def _of_bodies(
        self, analysis: Analysis, operation: tf.Operation, culprits: dict
    ) -> list[tf.Operation]:
        """Returns the operations in functions by which a gradient is no sum."""
        bodies = {
            graph: body
            for (caller, graph), body in analysis.bodies.items()
            if caller is operation
        }
        if not bodies:  # such as those with results of unknown rank
            nodes = nodes_of(functions_of(operation), library_of_functions())
            names = [f"/{node.name}" for node in nodes]
            has_own = any(scope in name for scope in self._scopes for name in names)
            return [operation] if has_own else []
        found = []
        outer = operation.inputs[operation.type in BRANCHES :]
        for graph, body in bodies.items():
            arguments = {}
            if operation.type not in LOOPS:  # whose steps may change them
                pairs = zip(graph.inputs, outer, strict=True)
                arguments = {a.ref(): culprits.get(b.ref()) for a, b in pairs}
            found.append(self.culprit(body, graph.outputs, arguments=arguments))
        return [culprit for culprit in found if culprit is not None]


def _makes_sums(analysis: Analysis, operation: tf.Operation) -> bool:
    """Returns whether results are sums over the examples, if inputs without rows are."""
    states = [analysis.state(tensor) for tensor in operation.inputs]
    kinds = [state.kind for state in states]
    if any(state.distance is not None for state in states):
        return False  # places of examples are others in a micro-batch
    is_known = all(output.shape.is_fully_defined() for output in operation.outputs)
    if not is_known and operation.type not in _ELEMENTWISE:
        return False  # an axis might be that of the examples
    if "mixed" not in kinds:
        return _adds_rows(analysis, operation, states)
    if not {*kinds} <= {"fixed", "mixed"}:
        return False
    number, sums = len(kinds), kinds.count("mixed")
    others = [
        place
        for place, tensor in enumerate(operation.inputs)
        if kinds[place] == "fixed" and not _is_zero(tensor)
    ]
    if operation.type in _OF_FIRST:
        is_of_first = sums == 1 and kinds[0] == "mixed"
        return is_of_first and not operation.outputs[0].dtype.is_integer
    if operation.type in _OF_ANY:
        return sums == 1
    if operation.type == "Split":
        return kinds == ["fixed", "mixed"]
    if operation.type in _CHOOSING:
        return kinds[0] == "fixed" and not {1, 2} & {*others}
    if operation.type == "ConcatV2":
        return kinds[-1] == "fixed" and not {*others} - {number - 1}
    return operation.type in _OF_ALL and not others


def _adds_rows(analysis: Analysis, operation: tf.Operation, states: list) -> bool:
    rows = [(state.axis, state.span) for state in states if state.kind == "rows"]
    if not rows or states[0].kind != "rows":
        return False
    if operation.type == "Sum":
        return sums_rows(analysis, operation)
    if operation.type in ("Einsum", "MatMul"):
        return combines_rows(analysis, operation)
    if operation.type == "BiasAddGrad":
        return True
    if operation.type == "UnsortedSegmentSum":  # of numbers, by places of each example
        return len(rows) == 2 and rows[0] == rows[1] and rows[0][0] == 0
    if _FILTERS.fullmatch(operation.type):
        return [axis for axis, _ in rows] == [0, 0]
    return False


def _may_be_added(analysis: Analysis, tensor: tf.Tensor) -> bool:
    """Returns whether micro-batches may add a tensor that is of none, or has rows."""
    state, dtype = analysis.state(tensor), tensor.dtype
    if state.kind == "fixed":
        return not (dtype.is_floating or dtype.is_complex) or _is_zero(tensor)
    return state.distance is None


def _is_zero(tensor: tf.Tensor) -> bool:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    value = tf.get_static_value(tensor)
    return tensor.op.type == "ZerosLike" or value is not None and not value.any()
