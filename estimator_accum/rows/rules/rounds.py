"""Rules of loops with a round for each row, such as those of `tf.map_fn`.

    for i in range(n):  results[i] = function(rows[i])

In a round any operation may combine all values: they are of one example, or fixed. So
only the numbers of the rows that are read or written matter.
"""

import tensorflow as tf

from estimator_accum.graph.functions import (
    functions_of,
    has_own_gradient,
    library_of_functions,
    nodes_of,
)
from estimator_accum.graph.internals import is_stateful
from estimator_accum.graph.names import (
    CALLERS,
    LOOK_UPS,
    READERS_OF_VALUE,
    draws_from_seed,
)
from estimator_accum.graph.walks import origin_of
from estimator_accum.rows.sizes import N, Size
from estimator_accum.rows.states import FIXED, MIXED, Mixed, State

_HARMLESS = {*CALLERS, *LOOK_UPS, *READERS_OF_VALUE, "Assert"}
_OTHERS = "a round of the loop needs more than one example"


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    return origin_of(tensor, {"Identity"})


class Rounds:
    """A loop with a round for each row.

    Args:
        analysis: The analysis.
        tensors: Inputs of the loop.
        states: Their states.
        body: Graph of a round.
        condition: Graph of the loop's condition.
    """

    def __init__(self, analysis, tensors, states, body, condition):
        self._analysis, self._tensors, self._outer = analysis, tensors, states
        self._body, self._condition = body, condition
        self._library = library_of_functions()
        pairs = list(zip(body.inputs, map(_origin, body.outputs), strict=True))
        self._is_same = [inner is result for inner, result in pairs]
        self._counters = [
            place
            for place, pair in enumerate(pairs)
            if self._starts_at_zero(place) and _adds_one(*pair)
        ]

    def states(self) -> list[State] | None:
        """Returns the states of the results; None if it is another loop."""
        span = self._rows()
        lists = [state for state in self._outer if state.kind == "examples"]
        if span is None or any(state.span != span for state in lists):
            return None
        states = self._of_round()
        results = []
        for place, (outer, output) in enumerate(
            zip(self._outer, self._body.outputs, strict=True)
        ):
            if self._is_same[place]:
                results.append(outer)
            elif outer.kind == "examples" and states[output.ref()] == "written":
                written = _origin(output).op.inputs[0]
                is_own = _origin(written) is self._body.inputs[place]
                is_new = outer.axis is None
                if not (is_own and is_new):
                    raise Mixed(_OTHERS)
                results.append(outer._replace(axis=0))
            elif outer.kind == "examples":
                raise Mixed(_OTHERS)
            else:
                results.append(MIXED)
        return results

    def _starts_at_zero(self, place: int) -> bool:
        value = self._analysis.value(self._tensors[place])
        return value is not None and value.ndim == 0 and value[()] == Size(0)

    def _rows(self) -> Size | None:
        """Returns the number of rounds for each example; None if it is not known."""
        (output,) = self._condition.outputs
        waiting, limits = [_origin(output)], set()
        while waiting:
            tensor = waiting.pop()
            inputs = list(map(_origin, tensor.op.inputs))
            if tensor.op.type == "LogicalAnd":
                waiting += inputs
                continue
            places = [self._place(inner) for inner in inputs]
            if tensor.op.type != "Less" or None in places:
                return None
            counter, limit = places
            value = self._analysis.value(self._tensors[limit])
            if counter not in self._counters or not self._is_same[limit]:
                return None
            if value is None or value.ndim or value[()].power != 1:
                return None
            limits.add(value[()] // N)
        return limits.pop() if len(limits) == 1 else None

    def _place(self, tensor: tf.Tensor) -> int | None:
        places = [i for i, t in enumerate(self._condition.inputs) if t is tensor]
        return places[0] if places else None

    def _of_round(self) -> dict:
        """Returns "fixed", "own", "counter", "rows", "results", ... of each tensor."""
        states = {}
        for place, (inner, outer) in enumerate(
            zip(self._body.inputs, self._outer, strict=True)
        ):
            if place in self._counters:
                state = "counter"
            elif outer.kind == "examples":
                state = "rows" if self._is_same[place] and outer.axis == 0 else "list"
            else:
                is_fixed = outer == FIXED and self._is_same[place]
                state = "fixed" if is_fixed else "mixed"
            states[inner.ref()] = state
        for operation in self._body.get_operations():
            for output in operation.outputs:
                if output.ref() not in states:
                    states[output.ref()] = self._of(operation, states)
        return states

    def _of(self, operation: tf.Operation, states: dict) -> str:
        inputs = [states.get(tensor.ref(), "mixed") for tensor in operation.inputs]
        if operation.type == "Identity":
            return inputs[0]
        if operation.type == "TensorListGetItem" and inputs[:2] == ["rows", "counter"]:
            return "own"
        is_written = operation.type == "TensorListSetItem"
        if is_written and inputs[:2] == ["list", "counter"]:
            return "written" if inputs[2] in ("fixed", "own") else "mixed"
        if {*inputs} - {"fixed", "own"} or not self._is_function(operation):
            return "mixed"
        return "own" if "own" in inputs else "fixed"

    def _is_function(self, operation: tf.Operation) -> bool:
        """Returns whether equal inputs give equal results, with TensorFlow's gradients."""
        nodes = [operation.node_def]
        if called := functions_of(operation):
            nodes += nodes_of(called, self._library)
        return not any(
            has_own_gradient(node)
            or draws_from_seed(node.op)
            or (is_stateful(node.op) is not False and node.op not in _HARMLESS)
            for node in nodes
        )


def _adds_one(inner: tf.Tensor, result: tf.Tensor) -> bool:
    operation = result.op
    if operation.type not in ("Add", "AddV2") or inner.shape.rank != 0:
        return False
    one, other = map(_origin, operation.inputs)
    value = tf.get_static_value(other)
    return one is inner and value is not None and value == 1
