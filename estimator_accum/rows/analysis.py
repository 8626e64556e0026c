"""Dataflow analysis: which tensors of a micro-batch's graph have a row for each example.

    fixed    holds no value of the micro-batch
    rows     one axis lists the examples, or for each example as many rows as for any
             other, and each row is computed from its own example and fixed values alone
    sizes    a shape, or a part of one, in which the number of examples occurs
    list     a list of tensors (TensorList, TensorArray) that have rows
    mixed    anything else

The states of inputs decide the states of outputs, operation by operation, by the rules
of estimator_accum/rows/rules.py; the bodies of branches, loops and functions are
looked into. What no rule knows, and what shapes without numbers cannot decide, is mixed,
which is always right.

n = number of examples in the micro-batch, which no static shape may contain.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util_v2

from estimator_accum.graph.functions import functions_of, library_of_functions, nodes_of
from estimator_accum.graph.names import STATELESS, is_draw
from estimator_accum.rows import rules
from estimator_accum.rows.sizes import (
    ARITHMETIC,
    N,
    Size,
    Unknown,
    compute,
    has_examples,
    sizes,
)
from estimator_accum.rows.states import (
    EMPTY_LIST,
    FIXED,
    MIXED,
    SIZES,
    Mixed,
    State,
    join,
)

_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}
_LOOPS = {"While", "StatelessWhile"}
_CALLS_PYTHON = {"PyFunc", "EagerPyFunc"}
_MOST_ROUNDS = 8  # through a loop, until nothing changes any more
# Attribute of an operation whose rows its author has declared.
ROWS_ATTRIBUTE = "_estimator_accum_per_example"


def per_example(tensor: tf.Tensor) -> tf.Tensor:
    """Declares that each row of a tensor is computed from its own example alone.

        scores = per_example(tf.numpy_function(score, [texts], tf.float32))

    For what `microbatch_model_fn` cannot look into: Python functions and operations of
    other libraries. Without it they are computed once, on the whole batch, with all
    that follows them.

    Args:
        tensor: A Tensor with one row for each example along its first axis.

    Returns:
        The same values.

    Raises:
        ValueError: If the tensor has no axis.
    """
    tensor = tf.identity(tensor)
    if tensor.shape.rank == 0:
        raise ValueError(
            "`tensor` must have one row for each example along its first axis. "
            f"Received: {tensor.name}, a scalar. Declare what it is computed from."
        )
    setattr(tensor.op, ROWS_ATTRIBUTE, True)
    return tensor


class Origin(NamedTuple):
    """The first mixed operation on a way to a tensor.

    Attributes:
        operation: The operation.
        reason: Why its outputs are mixed.
    """

    operation: tf.Operation
    reason: str


class Analysis:
    """The states of a graph's tensors.

    Args:
        parts: Tensors that have one row for each example along their first axis.
        mixed: Other tensors of the micro-batch.
        states: States of further tensors, by reference.

    Attributes:
        guards: Rows that are looked up by number.
        bounds: (operation, index of its input) of numbers of the batch that loops get,
            such as the longest length.
        origins: The operations that mix examples, in the order of the graph.
        combining: (operation, its own or that of its body), where what is mixed meets
            rows, or rows become as many mixed ones.
    """

    def __init__(
        self,
        parts: Iterable[tf.Tensor],
        mixed: Iterable[tf.Tensor] = (),
        states: dict | tuple = (),
    ):
        self.guards, self.bounds, self.origins, self.combining = [], [], [], []
        self._states, self._values, self._dims = dict(states), {}, {}
        self._seen, self._known = set(), set()
        for part in parts:
            self._states[part.ref()] = State("rows", 0)
        for part in mixed:
            self._states[part.ref()] = MIXED
        self._given = frozenset(self._states)  # by the caller
        self._has_changed = False
        self._is_body = False
        self._library = {}  # definitions of functions, made on first use

    def state(self, tensor: tf.Tensor) -> State:
        """Returns the state of a tensor that `analyze` has reached."""
        return self._states.get(tensor.ref(), FIXED)

    def value(self, tensor: tf.Tensor) -> np.ndarray | None:
        """Returns an integer tensor as an array of sizes; None if it is not known."""
        key = tensor.ref()
        if key not in self._values:
            self._values[key] = self._value(tensor)
        return self._values[key]

    def dims(self, tensor: tf.Tensor) -> list[Size]:
        """Returns the shape.

        Raises:
            Mixed: If the rank is not known, or nothing is known of a mixed tensor.
        """
        key, state = tensor.ref(), self.state(tensor)
        if key not in self._dims:
            if tensor.shape.rank is None:
                raise Mixed("its rank is unknown")
            if state.kind in ("mixed", "list"):
                raise Mixed("its shape is not known before there are numbers")
            self._dims[key] = self.complete(tensor, state, [None] * tensor.shape.rank)
        return self._dims[key]

    def rank(self, tensor: tf.Tensor) -> int:
        """Returns the number of axes.

        Raises:
            Mixed: If it is not known.
        """
        if tensor.shape.rank is not None:
            return tensor.shape.rank
        return len(self.dims(tensor))

    def knows_dims(self, tensor: tf.Tensor) -> bool:
        """Returns whether something is known of a shape, of a list's elements too."""
        return tensor.ref() in self._dims

    def complete(self, tensor: tf.Tensor, state: State, known: list) -> list[Size]:
        """Returns `known` dimensions, where None is one that has a name of its own."""
        dims = []
        static = known
        if state.kind != "list" and tensor.shape.rank is not None:
            static = tensor.shape.as_list()
        for axis, (size, number) in enumerate(zip(known, static, strict=True)):
            if axis == state.axis:  # of rows, and of a list's elements
                dims.append(N * state.each)
            elif number is not None and not isinstance(number, Size):
                dims.append(Size(number))
            else:
                dims.append(size or Size(symbols=(f"{tensor.name}:{axis}",)))
        return dims

    def set_dims(self, tensor: tf.Tensor, state: State, known: list) -> None:
        """Takes down what is known of the shape of an operation's output."""
        if state.kind == "list" or tensor.shape.rank in (None, len(known)):
            self._dims[tensor.ref()] = self.complete(tensor, state, known)

    def analyze(self, tensors: Iterable[tf.Tensor]) -> None:
        """Finds the states of `tensors` and of all that they are computed from."""
        order = _in_order([tensor.op for tensor in tensors])
        has_loop = any(each.type == "NextIteration" for each in order)
        for _ in range(_MOST_ROUNDS):
            self._has_changed = False
            self._round(order)
            if not (has_loop and self._has_changed):
                return
        for operation in order:
            if operation._get_control_flow_context() or operation.type == "Exit":
                self._put(operation, MIXED)
        self._round([each for each in order if self.state_of_outputs(each) != MIXED])

    def state_of_outputs(self, operation: tf.Operation) -> State | None:
        """Returns the state that all outputs share."""
        states = {self.state(output) for output in operation.outputs}
        return states.pop() if len(states) == 1 else None

    def _round(self, order: list[tf.Operation]) -> None:
        self.guards, self.bounds, self.origins, self.combining = [], [], [], []
        given = {*self._given, *self._known}
        for found in (self._values, self._dims):
            for key in [key for key in found if key not in given]:
                del found[key]
        for operation in order:
            self._step(operation)
            self._seen.add(operation)

    def _step(self, operation: tf.Operation) -> None:
        if any(output.ref() in self._given for output in operation.outputs):
            return
        if hasattr(operation, ROWS_ATTRIBUTE):
            self._put(operation, State("rows", 0))
            return
        states = [self.state(tensor) for tensor in operation.inputs]
        kinds = {state.kind for state in states}
        starts_list = operation.type in rules.LISTS_BEGIN
        if kinds <= {"fixed"}:
            reason = self._why_not_fixed(operation)
            if reason:
                self.origins.append(Origin(operation, reason))
                self._put(operation, MIXED)
                return
        if kinds <= {"fixed"} and not starts_list and operation.type != "Merge":
            if operation in self._seen:
                self._put(operation, FIXED)
            return
        if operation.type == "Enter":
            self._note_bounds(operation)
        try:
            if operation.type in _CALLS:
                name = operation.get_attr("f").name
                given = operation.inputs, states, len(operation.outputs)
                found, _ = self._body(operation, name, *given)
            elif operation.type in _BRANCHES:
                found = self._branch(operation, states)
            elif operation.type in _LOOPS:
                found = self._loop(operation, states)
            elif operation.type in ("Merge", "Switch", "Exit"):
                found = self._control_flow_v1(operation, states)
            elif starts_list:
                # Neither the number of elements that a list may have at most is a value,
                # nor the shape of those that are not put into it.
                numbers = {
                    "EmptyTensorList": states[2:],
                    "TensorListReserve": states[1:],
                }
                numbers = numbers.get(operation.type, states)
                is_known = {state.kind for state in numbers} <= {"fixed"}
                found = EMPTY_LIST if is_known else MIXED
            else:
                found = self._transfer(operation, states, kinds)
        except Mixed as mixed:
            if "mixed" not in kinds:
                self.origins.append(Origin(operation, str(mixed)))
                if any(map(_may_have_rows, operation.outputs)):
                    self.combining.append((operation, operation))
            found = MIXED
        # The body of a call is looked into.
        is_call = operation.type in _CALLS | _BRANCHES | _LOOPS
        if {"mixed", "rows"} <= kinds and not is_call:
            self.combining.append((operation, operation))
        self._put(operation, found)

    def _why_not_fixed(self, operation: tf.Operation) -> str | None:
        """Returns why a result is mixed although all inputs are fixed."""
        if operation.type in ("StackPop", "StackPopV2"):
            return "a loop of TensorFlow 1 kept it"
        if self._is_for_all(operation):
            return "it is computed once, for all examples"
        return None

    def _is_for_all(self, operation: tf.Operation) -> bool:
        """Returns whether every run has another result, which all examples share.

        Such as random numbers of a fixed shape, in functions, branches and loops; what
        draws elsewhere is made to draw once for each batch.
        """
        if operation.type in _CALLS_PYTHON or operation.type == "RngReadAndSkip":
            return True
        if is_draw(operation):
            is_inside = operation._get_control_flow_context() is not None
            return self._is_body or is_inside
        functions = functions_of(operation)
        if not functions:
            return False
        if not self._library:
            self._library.update(library_of_functions())
        kinds = {node.op for node in nodes_of(functions, self._library)}
        return bool(kinds & {*STATELESS, *_CALLS_PYTHON, "RngReadAndSkip"})

    def _put(self, operation: tf.Operation, found: State | list[State]) -> None:
        if isinstance(found, State):
            found = [found] * len(operation.outputs)
        for output, state in zip(operation.outputs, found, strict=True):
            has_rows = state.kind == "rows" and output.shape.rank is not None
            # A shape without that axis is that of operands that do not fit.
            if has_rows and output.shape.as_list()[state.axis :][:1] != [None]:
                reason = "its number of examples is static"  # by Tensor.set_shape
                self.origins.append(Origin(operation, reason))
                state = MIXED
            if self.state(output) != state:
                self._states[output.ref()] = state
                self._has_changed = True

    def _transfer(self, operation, states: list[State], kinds: set[str]):
        if operation.type in rules.OF_SHAPE:
            return self._of_shape(operation, states)
        if "mixed" in kinds:
            return MIXED
        is_shape = kinds <= {"fixed", "sizes"}
        if is_shape and operation.type not in rules.FROM_SIZES:
            values = [self.value(output) for output in operation.outputs]
            if any(value is None for value in values):
                raise Mixed("the number of examples as a value")
            return [SIZES if has_examples(value) else FIXED for value in values]
        rule = rules.RULES.get(operation.type)
        if rule is None:
            raise Mixed("there is no rule for it")
        try:
            return rule(self, operation, states)
        except Unknown as error:
            raise Mixed("a shape is not known before there are numbers") from error

    def _of_shape(self, operation: tf.Operation, states: list[State]):
        """Shape, Size and Rank, also of a mixed tensor."""
        found = []
        for output in operation.outputs:
            value = self.value(output)
            if value is None:
                raise Mixed("the shape of what is mixed")
            found.append(SIZES if has_examples(value) else FIXED)
        return found

    def _value(self, tensor: tf.Tensor) -> np.ndarray | None:
        operation = tensor.op
        if not tensor.dtype.is_integer or self.state(tensor).kind in ("rows", "mixed"):
            return None
        constant = tf.get_static_value(tensor)
        if constant is not None:
            return sizes(constant) if constant.size <= 64 else None
        try:
            if operation.type == "Rank" and operation.inputs[0].shape.rank is not None:
                return sizes(operation.inputs[0].shape.rank)
            if operation.type in ("Shape", "ShapeN"):
                index = operation.outputs.index(tensor)
                return sizes(self.dims(operation.inputs[index]))
            if operation.type == "Size":
                return sizes(rules.product(self.dims(operation.inputs[0])))
            if operation.type in ("BroadcastGradientArgs", "BroadcastArgs"):
                return rules.broadcast_value(self, operation, tensor)
            inputs = []
            if operation.type in ARITHMETIC:
                inputs = [self.value(each) for each in operation.inputs]
            if inputs and not any(each is None for each in inputs):
                return compute(operation, inputs)[operation.outputs.index(tensor)]
        except (Mixed, Unknown):
            pass
        kinds = {self.state(each).kind for each in operation.inputs}
        if operation.type in rules.OF_SHAPE and kinds != {"fixed"}:
            return None
        if self.state(tensor).kind == "fixed" and "sizes" not in kinds:
            return _named(tensor)
        return None

    # Branches, loops and functions.

    def _body(
        self,
        operation,
        name: str,
        tensors,
        states: list[State],
        results: int,
        known=None,
    ):
        """Returns the states of a function's outputs, and its graph.

        Args:
            operation: The operation that calls the function.
            name: The function's name.
            tensors: The function's arguments.
            states: Their states.
            results: Number of the function's outputs.
            known: Whether the function gets the argument's own value; None is always.
        """
        graph = self._graph_of(operation, name, tensors, results)
        body = Analysis(())
        body._is_body, body._library = True, self._library
        for i, (inner, outer) in enumerate(zip(graph.inputs, tensors, strict=True)):
            body._states[inner.ref()] = states[i]
            if states[i].kind in ("fixed", "sizes") and (known is None or known[i]):
                body._values[inner.ref()] = self.value(outer)
                body._known.add(inner.ref())
            elif states[i].kind == "rows" or self.knows_dims(outer):
                # A variable of a loop may change its shape.
                free = known is not None and not known[i]
                dims = self.dims(outer)
                body.set_dims(inner, states[i], [None] * len(dims) if free else dims)
        body._given = frozenset(tensor.ref() for tensor in graph.inputs)
        body.analyze(graph.outputs)
        self.combining += [(operation, inner) for _, inner in body.combining]
        if body.guards:
            raise Mixed("rows are looked up by number inside a function")
        self.origins += body.origins
        found = [body.state(output) for output in graph.outputs]
        return found, graph

    def _graph_of(self, operation, name: str, tensors, results: int) -> tf.Graph:
        """Returns a function's graph: its own, which knows more shapes, or another."""
        function = operation.graph._get_function(name)
        graph = getattr(function, "graph", None)
        # The gradient of another call may have added outputs to it.
        given = len(tensors), results
        if graph is not None and (len(graph.inputs), len(graph.outputs)) == given:
            return graph
        shapes = [tensor.shape for tensor in tensors]
        return control_flow_util_v2.get_func_graph(operation, shapes, name)

    def _branch(self, operation: tf.Operation, states: list[State]):
        if states[0].kind != "fixed":
            raise Mixed("the batch decides which branch is taken")
        if "branches" in operation.node_def.attr:
            names = [each.name for each in operation.get_attr("branches")]
        else:
            branches = ("then_branch", "else_branch")
            names = [operation.get_attr(each).name for each in branches]
        ways = [
            self._body(
                operation,
                name,
                operation.inputs[1:],
                states[1:],
                len(operation.outputs),
            )[0]
            for name in names
        ]
        return [functools.reduce(join, each) for each in zip(*ways, strict=True)]

    def _loop(self, operation: tf.Operation, states: list[State]):
        tensors = list(operation.inputs)
        name, known = operation.get_attr("body").name, [False] * len(states)
        for _ in range(_MOST_ROUNDS):
            given = tensors, states, len(tensors)
            after, graph = self._body(operation, name, *given, known)
            known = [a is b for a, b in zip(graph.inputs, graph.outputs, strict=True)]
            joined = [join(*pair) for pair in zip(states, after, strict=True)]
            if joined == states:
                break
            states = joined
        else:
            raise Mixed("a loop whose variables never settle")
        name = operation.get_attr("cond").name
        (predicate,), _ = self._body(operation, name, tensors, states, 1, known)
        self._note_bounds(operation)
        if predicate.kind != "fixed":
            raise Mixed("the batch decides when a loop ends")
        return states

    def _note_bounds(self, operation: tf.Operation) -> None:
        """Takes down which numbers of the batch enter a loop."""
        for i, tensor in enumerate(operation.inputs):
            is_number = tensor.dtype.is_integer and tensor.shape.rank == 0
            if is_number and self.state(tensor).kind == "mixed":
                self.bounds.append((operation, i))

    def _control_flow_v1(self, operation: tf.Operation, states: list[State]):
        context = operation._get_control_flow_context()
        if operation.type == "Switch":
            is_loop = context is not None and context.IsWhileContext()
            if not is_loop and states[1].kind != "fixed":
                raise Mixed("the batch decides which branch is taken")
            return states[0]
        if operation.type == "Exit":
            switch = operation.inputs[0].op
            if switch.type != "Switch":
                raise Mixed("a loop of another kind")
            if self.state(switch.inputs[1]).kind != "fixed":
                raise Mixed("the batch decides when a loop ends")
            return states[0]
        second = operation.inputs[1].op
        if second.type == "NextIteration":
            first = states[0]
            if second.inputs[0].op in self._seen:  # else it is the first round
                first = join(first, self.state(second.inputs[0]))
            return [first, FIXED]
        for tensor in operation.inputs:
            inner = tensor.op._get_control_flow_context()
            predicate = getattr(inner, "pred", None)
            if tensor.op.type == "Switch":
                predicate = tensor.op.inputs[1]
            if predicate is None or self.state(predicate).kind != "fixed":
                raise Mixed("the batch decides which branch is taken")
        return [functools.reduce(join, states), FIXED]


def _may_have_rows(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor may have gradients of examples."""
    return tensor.dtype.is_floating and not tensor.shape.is_fully_defined()


def _named(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns sizes with names of their own for an integer scalar or vector."""
    if tensor.shape.rank == 0:
        return sizes(Size(symbols=(tensor.name,)))
    number = tensor.shape.num_elements()
    if tensor.shape.rank == 1 and number is not None and number <= 64:
        return sizes([Size(symbols=(f"{tensor.name}[{i}]",)) for i in range(number)])
    return None


def _in_order(roots: list[tf.Operation]) -> list[tf.Operation]:
    """Returns `roots` and what they are computed from, inputs first.

    The order of creation is another one: tf.cond of TensorFlow 1 sets inputs later. A
    loop of TensorFlow 1 comes from its begin to its end, and then what leads back.
    """
    order, seen, roots = [], set(), list(roots)
    for root in roots:  # grows
        waiting = [(root, False)]
        while waiting:
            operation, is_ready = waiting.pop()
            if is_ready:
                order.append(operation)
                continue
            if operation in seen:
                continue
            seen.add(operation)
            waiting.append((operation, True))
            if operation.type == "NextIteration":
                roots.append(operation.inputs[0].op)
                continue
            waiting += [(t.op, False) for t in operation.inputs if t.op not in seen]
    return order
