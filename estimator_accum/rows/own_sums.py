"""Proof that gradients that somebody wrote for variables are sums over the examples.

    gradient of the batch = sum of the gradients of its micro-batches

A gradient without rows must add rows, or be a linear function of such sums and of
gradients that TensorFlow derives. A clipped one is no sum, nor is a number that each
micro-batch would add again.
"""

import itertools
import re
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.graph.functions import all_nodes, has_own_gradient
from estimator_accum.graph.internals import gradient_scope_of
from estimator_accum.graph.names import BRANCHES, CALLERS, FED, LOOPS
from estimator_accum.graph.walks import walk
from estimator_accum.rows.analysis import Analysis, in_order
from estimator_accum.rows.loss_sums import combines_rows, sums_rows

DERIVATIVES = "derivatives_of_rows"  # the scope of tf.gradients
_DERIVED = re.compile(rf"(^|/){DERIVATIVES}(_\d+)?/")
_DERIVED_IN_FUNCTIONS = re.compile(r"(^|/)gradients(_\d+)?/")
_FILTERS = re.compile(r".*BackpropFilter(V2)?")
# Operations that are linear in one input, in any, in all together.
_OF_PLACES = {
    *("Cast", "CheckNumerics", "CheckNumericsV2", "Conj", "Div", "DivNoNan"),
    *("EluGrad", "EnsureShape", "Identity", "LeakyReluGrad", "Neg", "Real", "RealDiv"),
    *("Relu6Grad", "ReluGrad", "SeluGrad", "SoftplusGrad", "StopGradient"),
}
_OF_SECOND = {"ReciprocalGrad", "RsqrtGrad", "SigmoidGrad", "SqrtGrad", "TanhGrad"}
_OF_FIRST = {
    *("BroadcastTo", "Cumsum", "ExpandDims", "GatherNd", "GatherV2", "MatrixBandPart"),
    *("Mean", "Pad", "Reshape", "ReverseV2", "Roll", "Slice", "SplitV", "Squeeze"),
    *("StridedSlice", "Sum", "Tile", "Transpose", "UnsortedSegmentSum", "Unpack"),
    *_OF_PLACES,
}
_OF_ANY = {"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul", "Mul"}
_OF_ALL = {"Add", "AddN", "AddV2", "Pack", "Sub"}
CHOOSING = {"Select", "SelectV2"}
_ELEMENTWISE = {
    *("Add", "AddN", "AddV2", "Mul", "Sub"),
    *(*CHOOSING, *_OF_PLACES, *_OF_SECOND),
}
# Operations of a loop's gradient that return values of its forward pass.
_KEPT = {*FED, "TensorListPopBack"}


def is_derived(operation: tf.Operation) -> bool:
    """Returns whether an operation is in the scope of DERIVATIVES."""
    return _DERIVED.search(operation.name) is not None


def check_own_sums(
    backward: Analysis,
    gradients: list[tf.Tensor],
    returned: list[tf.Tensor],
    of_rows: list[tf.Tensor],
    customized: list[tf.Operation],
    remedy: str,
) -> None:
    """Raises ValueError unless gradients that somebody wrote are sums over the examples.

    Args:
        backward: The states of all gradients.
        gradients: The tensors of the gradients of variables.
        returned: The tensors of what somebody's gradients return for all that is
            computed from variables.
        of_rows: Those of them for tensors with rows.
        customized: Operations with a gradient that somebody wrote, or with one inside.
        remedy: End of the error's last sentence.
    """
    graph = _Graph(backward, _DERIVED, {}, is_loop=False)
    proof = _Proof(customized)
    culprit = proof.culprit(graph, gradients, returned)
    culprit = culprit or proof.without_rows(graph, of_rows)
    if culprit is not None:
        raise ValueError(
            "The gradients of a tf.custom_gradient must be sums over the examples, or have "
            f"a row for each. Received: {culprit.name} of type {culprit.type}, of which "
            f"this is not proved. {remedy.capitalize()}."
        )


class _Graph(NamedTuple):
    """A graph of gradients.

    Attributes:
        analysis: The states.
        derived: Pattern of the names of operations that TensorFlow derived.
        arguments: Culprits of a function's arguments, None for a sum.
        is_loop: Whether it is a step of a loop, after which arguments are others.
    """

    analysis: Analysis
    derived: re.Pattern
    arguments: dict
    is_loop: bool


class _Proof:
    """The search for a culprit: an operation by which a gradient is no sum.

    Args:
        customized: Operations with a gradient that somebody wrote, or with one inside.
    """

    def __init__(self, customized: list[tf.Operation]):
        nodes = all_nodes(customized)
        written = filter(has_own_gradient, nodes)
        callers = {gradient_scope_of(node) for node in nodes if node.op in CALLERS}
        self._own = {gradient_scope_of(node) for node in written}  # parts of names
        self._callers = callers - self._own

    def culprit(
        self, graph: _Graph, results: list[tf.Tensor], returned: list[tf.Tensor]
    ) -> tf.Operation | None:
        """Returns an operation by which a gradient that somebody wrote is no sum.

        Args:
            graph: The graph.
            results: Results of the graph.
            returned: Tensors that must be sums.
        """
        order = in_order([result.op for result in (*results, *returned)])
        culprits, faults = {}, []  # culprits: by the tensor that is no sum
        for operation in order:
            if self._sums_for_rows(graph, operation):
                faults.append(operation)
            if operation.type in CALLERS and not self._is_own(operation):
                faults += self._in_functions(graph, operation, culprits)
            culprit = self._cause(graph, operation, culprits)
            for tensor in operation.outputs if culprit else ():
                if graph.analysis.state(tensor).kind == "mixed":
                    culprits[tensor.ref()] = culprit
        used = [t for op in order if not self._is_own(op) for t in op.inputs]
        leaving = [t for t in (*used, *results) if self._is_own(t.op)]
        summands = [part for t in returned for part in self._summands(graph, t)]
        faults += [self._judge(graph, t, culprits) for t in (*summands, *leaving)]
        return next((culprit for culprit in faults if culprit is not None), None)

    def without_rows(
        self, graph: _Graph, returned: list[tf.Tensor]
    ) -> tf.Operation | None:
        """Returns an operation whose result has no rows, although it must have them."""
        for tensor in (part for t in returned for part in self._summands(graph, t)):
            has_rows = graph.analysis.state(tensor).kind == "rows"
            if not (has_rows or _is_zero(tensor) or self._is_derived(graph, tensor.op)):
                return tensor.op
        return None

    def _sums_for_rows(self, graph: _Graph, operation: tf.Operation) -> bool:
        """Returns whether TensorFlow derives from rows and from a sum that has none."""
        kinds = [
            (graph.analysis.state(tensor).kind, self._is_own(tensor.op))
            for tensor in operation.inputs
        ]
        has_sum = ("mixed", True) in kinds and "rows" in {kind for kind, _ in kinds}
        is_call = operation.type in CALLERS
        return has_sum and not is_call and not self._is_own(operation)

    def _is_own(self, operation: tf.Operation) -> bool:
        # Arguments and kept values may have the name of their first use.
        has_scope = any(scope in f"/{operation.name}" for scope in self._own)
        return has_scope and operation.type not in _KEPT

    def _is_derived(self, graph: _Graph, operation: tf.Operation) -> bool:
        is_named = graph.derived.search(operation.name) is not None
        return is_named and operation.type not in _KEPT and not self._is_own(operation)

    def _cause(
        self, graph: _Graph, operation: tf.Operation, culprits: dict
    ) -> tf.Operation | None:
        """Returns why results that have no rows are no sums, or None if they are."""
        if self._is_derived(graph, operation):
            return None
        if operation.type in FED and not graph.is_loop:
            return graph.arguments.get(operation.outputs[0].ref(), operation)
        causes = [culprits[t.ref()] for t in operation.inputs if t.ref() in culprits]
        is_sum = not causes and _makes_sums(graph.analysis, operation)
        return None if is_sum else [*causes, operation][0]

    def _judge(
        self, graph: _Graph, tensor: tf.Tensor, culprits: dict
    ) -> tf.Operation | None:
        """Returns why micro-batches must not add a tensor; None if they may."""
        state = graph.analysis.state(tensor)
        is_argument = tensor.op.type in FED and tensor.ref() in graph.arguments
        if is_argument and state.kind != "rows":
            return graph.arguments[tensor.ref()]
        if state.kind == "fixed":
            is_same = not is_number(tensor) or _is_zero(tensor)
            # Of what is given as 0 TensorFlow derives 0.
            return None if is_same or self._is_derived(graph, tensor.op) else tensor.op
        if state.distance is not None:
            return tensor.op
        return culprits.get(tensor.ref())

    def _summands(self, graph: _Graph, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors of which TensorFlow derived a sum."""
        summands, waiting = [], [tensor]
        while waiting:
            tensor = waiting.pop()
            operation, inputs = tensor.op, [*tensor.op.inputs]
            is_passed = operation.type == "Identity" and not self._is_own(operation)
            is_split = is_passed or self._is_derived(graph, operation)
            if operation.type == "ConcatV2":  # of slices
                inputs.pop()
            elif operation.type not in ("AddN", "AddV2", "Identity"):
                is_split = False
            if is_split:
                waiting += reversed(inputs)
            else:
                summands.append(tensor)
        return summands

    def _in_functions(
        self, graph: _Graph, operation: tf.Operation, culprits: dict
    ) -> list[tf.Operation | None]:
        """Returns culprits in the functions that an operation calls."""
        is_called = any(scope in f"/{operation.name}" for scope in self._callers)
        if not is_called or not self._is_derived(graph, operation):
            return []
        bodies = {
            inner: body
            for (caller, inner), body in graph.analysis.bodies.items()
            if caller is operation
        }
        if not bodies:  # such as those that return a tensor of unknown rank
            return [operation]
        is_loop = operation.type in LOOPS
        outer = operation.inputs[operation.type in BRANCHES :]
        faults = []
        for inner, body in bodies.items():
            pairs = zip(inner.inputs, outer, strict=True)
            causes = {a.ref(): self._judge(graph, b, culprits) for a, b in pairs}
            step = _Graph(body, _DERIVED_IN_FUNCTIONS, causes, is_loop)
            returned = [
                tensor
                for before, tensor in itertools.zip_longest(inner.inputs, inner.outputs)
                if tensor is not None and is_number(tensor)
                # An argument of a loop that stays the same.
                if not (is_loop and _origin(tensor) is before)
            ]
            faults.append(self.culprit(step, inner.outputs, returned))
        return faults


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def is_number(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor may have a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex


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
        return is_of_first and is_number(operation.outputs[0])
    if operation.type in _OF_ANY:
        return sums == 1
    if operation.type == "Split" or operation.type in _OF_SECOND:
        return kinds == ["fixed", "mixed"]
    if operation.type in CHOOSING:
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


def _is_zero(tensor: tf.Tensor) -> bool:
    def factors(tensor: tf.Tensor) -> list[tf.Tensor]:
        is_passed = tensor.op.type in ("Cast", "Identity", "Neg", "Reshape")
        return list(tensor.op.inputs)[
            : 1 if is_passed else 2 * (tensor.op.type == "Mul")
        ]

    places = walk([tensor.ref()], lambda ref: [t.ref() for t in factors(ref.deref())])
    for place in (ref.deref() for ref in places):
        value = None if factors(place) else tf.get_static_value(place)
        if place.op.type == "ZerosLike" or value is not None and not value.any():
            return True
    return False
