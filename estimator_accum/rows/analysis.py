"""Dataflow analysis: which tensors of a micro-batch's graph have a row for each example.

    fixed    holds no value of the micro-batch
    rows     one axis lists the examples, or for each example as many rows as for any
             other, and each row is computed from its own example and fixed values alone
    unpadded rows of which the last ones may be missing, on the way to their padding
    entries  the first axis lists entries, such as those of a sparse tensor: any number
             for each example, in their order, each computed from its own example
    sizes    a shape, or a part of one, in which the number of examples occurs
    counts   the same, with the number of entries of a list
    splits   where the entries of each row begin and end in a list, as of a RaggedTensor
    list     a list of tensors (TensorList, TensorArray) that have rows
    examples a list (TensorList) with one element for each row
    mixed    anything else

The states of inputs decide the states of outputs, operation by operation, by the rules
in `rules/`; the bodies of branches, loops and functions are looked into. Operations
without a rule, and cases that need numbers, are mixed, which is always right.

n = number of examples in the micro-batch, which no static shape may contain.
"""

import contextlib
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.graph.computations import computation_of
from estimator_accum.graph.functions import (
    functions_of,
    graphs_called,
    kinds_in,
    library_of_functions,
)
from estimator_accum.graph.internals import captures_of, context_of
from estimator_accum.graph.lookups import UNIQUE
from estimator_accum.graph.names import (
    CALLERS,
    PYTHON,
    STATELESS,
    draws_by_state,
    is_draw,
    moves_generator,
)
from estimator_accum.graph.walks import data_ancestors, in_order, origin_of
from estimator_accum.rows.declaration import ROWS_ATTRIBUTE
from estimator_accum.rows.entries import of_entries
from estimator_accum.rows.guards import EqualEntries
from estimator_accum.rows.integers import (
    OF_SHAPE,
    clamped,
    computed_from,
    integer_value,
)
from estimator_accum.rows.rules.blocks import blocks_of
from estimator_accum.rows.rules.control_flow import MOST_ROUNDS, UNSETTLED
from estimator_accum.rows.rules.from_sizes import FROM_SIZES
from estimator_accum.rows.rules.refusals import SIZE
from estimator_accum.rows.rules.table import (
    RULES,
    RULES_OF_ANY,
    RULES_OF_ENTRIES,
    RULES_OF_MIXED,
)
from estimator_accum.rows.sizes import N, Size, Unknown, has_examples, lists_of
from estimator_accum.rows.states import (
    COUNTS,
    FIXED,
    MIXED,
    NO_RULE,
    OF_SPLITS,
    SIZES,
    UNPADDED,
    Mixed,
    State,
)

# Their outputs may be of another state than fixed although all inputs are.
_FROM_FIXED = {"TensorListReserve", "EmptyTensorList", "TensorArrayV3", "Merge"}
_OF_LISTS = {"entries", *OF_SPLITS}
_OF_ENTRIES = {"counts", *_OF_LISTS}
# Extremes that a comparison bounds if they are its first or second operand.
_BOUNDED = {
    **dict.fromkeys(("Less", "LessEqual"), ("Max", "Min")),
    **dict.fromkeys(("Greater", "GreaterEqual"), ("Min", "Max")),
}
_ASSERTION = "an assertion that the examples decide together"


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
        mixed: Tensors of the micro-batch, of which all without another state are mixed.
        states: States of further tensors, by reference.
        values: Values of integer tensors among them, as sizes, by reference.
        can_check: As the attribute.

    Attributes:
        can_check: Whether micro-batches can check facts; else nothing depends on any.
        guards: Facts that every micro-batch must check.
        bounds: (operation, index of its input) of numbers of the batch that loops get,
            such as the longest length.
        origins: The operations that mix examples, in the order of the graph.
        combining: (operation, its own or that of its body), where what is mixed meets
            rows, or rows become as many mixed ones.
        complete_lists: Names of the lists with an entry for every row.
        sparse_lists: Names of the lists that are a sparse or ragged tensor's.
        lengths: Names of the lists of which tensors are the numbers of entries in each
            row, by the tensors' references.
        short: Number of rows for each example, by the operation that computes no row
            for the last examples if they have no entry.
        padded: Results with rows, by the operation that adds rows that may be missing;
            None by those on the way to it.
        path: Names of the calls that lead to a function's graph.
    """

    def __init__(
        self,
        parts: Iterable[tf.Tensor],
        mixed: Iterable[tf.Tensor] = (),
        states: dict | tuple = (),
        values: dict | tuple = (),
        *,
        can_check: bool = True,
    ):
        self.can_check = can_check
        self._values, self._dims = dict(values), {}
        self._seen = {}  # operations, with the number of their results
        self._states = {part.ref(): MIXED for part in mixed} | dict(states)
        self._states |= {part.ref(): State("rows", 0) for part in parts}
        self._given = dict.fromkeys(self._states)  # by the caller
        self._has_changed = False
        self._caller, self._arguments = None, {}  # of a function: their outer tensors
        self.path = ""
        self._library = {}  # definitions of functions, made on first use
        self._begin()

    def with_states(self, states: dict) -> "Analysis":
        """Returns another analysis, to which further tensors' states are given, too."""
        states = {key: self._states[key] for key in self._given} | states
        values = {k: v for k, v in self._values.items() if k in self._given}
        return Analysis((), (), states, values, can_check=self.can_check)

    def state(self, tensor: tf.Tensor) -> State:
        """Returns the state of a tensor that `analyze` has reached."""
        state = self._states.get(tensor.ref(), FIXED)
        if not self._alias or state.kind not in _OF_LISTS:
            return state
        places = state.places and self.list_of(state.places)
        return state._replace(of=self.list_of(state.of), places=places)

    def value(self, tensor: tf.Tensor) -> np.ndarray | None:
        """Returns an integer tensor as an array of sizes; None if it is not known."""
        waiting = [tensor]  # not one call in the other, for long chains of numbers
        while waiting:
            inner = waiting[-1]
            new = [t for t in computed_from(inner) if t.ref() not in self._values]
            if new and inner.ref() not in self._values:
                waiting += new
            elif waiting.pop().ref() not in self._values:
                self._values[inner.ref()] = integer_value(self, inner)
        value = self._values[tensor.ref()]
        return value if value is None or not self._alias else self._renamed(value)

    def dims(self, tensor: tf.Tensor) -> list[Size]:
        """Returns the shape.

        Raises:
            Mixed: If the rank is not known, or nothing is known of a mixed tensor.
        """
        key, state = tensor.ref(), self.state(tensor)
        if key not in self._dims:
            if tensor.shape.rank is None:
                raise Mixed("its rank is unknown")
            if state.kind in ("mixed", "list", "examples"):
                raise Mixed("its shape is not known before there are numbers")
            self._dims[key] = self.complete(tensor, state, [None] * tensor.shape.rank)
        return [*self._renamed(self._dims[key])] if self._alias else self._dims[key]

    def rank(self, tensor: tf.Tensor) -> int:
        """Returns the number of axes.

        Raises:
            Mixed: If it is not known.
        """
        rank = tensor.shape.rank
        return len(self.dims(tensor)) if rank is None else rank

    def knows_dims(self, tensor: tf.Tensor) -> bool:
        """Returns whether something is known of a shape, of a list's elements too."""
        return tensor.ref() in self._dims

    def complete(self, tensor: tf.Tensor, state: State, sizes: list) -> list[Size]:
        """Returns `sizes` dimensions, where None is one that has a name of its own."""
        dims = []
        static = sizes
        if state.kind != "list" and (shape := tensor.shape).rank is not None:
            static = shape.as_list()
        for axis, (size, number) in enumerate(zip(sizes, static, strict=True)):
            if axis == state.axis:  # of rows, entries, and of a list's elements
                dims.append(state.length)
            elif number is not None and not isinstance(number, Size):
                dims.append(Size(number))
            else:
                name = f"{self.path}{tensor.name}:{axis}"
                dims.append(size or Size(symbols=(name,)))
        if state.kind not in _OF_LISTS and lists_of(dims):
            raise Mixed("its shape is another one in each micro-batch")
        return dims

    def set_value(self, tensor: tf.Tensor, value: np.ndarray) -> State:
        """Takes down the value of an integer output, as sizes; returns its state."""
        self._values[tensor.ref()] = value
        return _state_of_value(value)

    def name_of_list(self, operation: tf.Operation, *key) -> str:
        """Returns a name for the list of entries that an operation makes.

        Args:
            operation: The operation.
            *key: Lists with equal keys are the same, entry by entry; none means that the
                list is like no other.
        """
        name = f"{self.path}{operation.name}"
        return self._names.setdefault((operation.type, *key), name) if key else name

    def name_of_true(self, mask: tf.Tensor) -> str:
        """Returns a name for the list of the places where a mask is True.

        In the order of the mask's elements, so a reshaped mask has the same list.
        """
        mask = origin_of(mask, {"Reshape"})
        name = f"true in {self.path}{mask.name}"
        return self._names.setdefault(("Where", computation_of(mask)), name)

    def list_of(self, name: str) -> str:
        """Returns the name of a list among those that are taken for the same."""
        while name in self._alias:
            name = self._alias[name]
        return name

    def first_of_list(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the first tensor that has the list of a tensor's entries."""
        return self._first[self._states[tensor.ref()].of]

    def is_in_order(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor lists entries in the order of their examples.

        A caller may list those of a sparse tensor in any order, those of a ragged one not.
        """
        names, waiting = set(), [self._states[tensor.ref()].of]
        while waiting:
            name = waiting.pop()
            if name in names:
                continue
            names.add(name)
            blocks, first = blocks_of(name), self._first.get(name)
            if blocks and blocks[0] == 1:
                continue
            if blocks or first is None or first.op.type in UNIQUE:
                return False
            if first.ref() in self._given:
                parts = map(self._states.get, self._given)
                if not any(s.kind == "splits" and s.of == name for s in parts):
                    return False
            elif first.op.type != "SparseReorder":
                states = [self._states.get(t.ref(), FIXED) for t in first.op.inputs]
                if MIXED in states:  # as of rows that are repeated
                    needed = data_ancestors([first.op], self._mixed_inputs)
                    tensors = [tensor for op in needed for tensor in op.inputs]
                    states = [self._states.get(t.ref(), FIXED) for t in tensors]
                waiting += [state.of for state in states if state.kind in _OF_LISTS]
        return True

    def _mixed_inputs(self, operation: tf.Operation) -> list[tf.Tensor]:
        return [tensor for tensor in operation.inputs if self.state(tensor) == MIXED]

    def take_for_same(self, one: str, other: str) -> None:
        """Takes two lists for the same, which every micro-batch must check.

        Raises:
            Mixed: If none is a sparse or ragged tensor's, such as lists of chosen
                examples, which may be pairs of other examples, or if the numbers of
                their entries are not known.
        """
        one, other = self.list_of(one), self.list_of(other)
        if one == other:
            return
        numbers, others = (self._numbers.get(name, {}) for name in (one, other))
        kinds = [key for key in numbers if key in others]
        if not kinds or not {one, other} & self.sparse_lists:
            raise Mixed("entries of several lists")
        self.assume(EqualEntries(numbers[kinds[0]], others[kinds[0]]))
        self._alias[other] = one
        for names in (self.complete_lists, self.sparse_lists):
            if other in names:
                names.add(one)

    def assume(self, guard) -> None:
        """Takes down a fact that every micro-batch must check; Mixed if none does."""
        if not self.can_check:
            raise Mixed("it is right for some values alone, and training checks them")
        self.guards.append(guard)

    @contextlib.contextmanager
    def forgetting(self):
        """Context in which a rule that raises takes no fact for granted."""
        before = {**self._alias}, {*self.complete_lists}, {*self.sparse_lists}
        number = len(self.guards)
        try:
            yield
        except (Mixed, Unknown):
            self._alias, self.complete_lists, self.sparse_lists = before
            del self.guards[number:]
            raise

    def _renamed(self, value: Iterable[Size]) -> np.ndarray:
        """Returns sizes in which lists that are the same have one name."""
        names = {name: self.list_of(name) for name in self._alias}
        value = np.asarray(value, object)
        renamed = np.empty_like(value)
        renamed.flat = [size.renamed(names) for size in value.flat]
        return renamed

    def set_dims(self, tensor: tf.Tensor, state: State, sizes: list) -> State:
        """Takes down the known part of the shape of an output; returns its state."""
        if state.kind == "list" or tensor.shape.rank in (None, len(sizes)):
            self._dims[tensor.ref()] = self.complete(tensor, state, sizes)
        return state

    def analyze(self, tensors: Iterable[tf.Tensor]) -> None:
        """Finds the states of `tensors` and of all that they are computed from."""
        order = inputs_first(tensor.op for tensor in tensors)
        has_loop = any(op.type == "NextIteration" for op in order)
        for _ in range(MOST_ROUNDS):
            self._has_changed = False
            self._begin()
            self._look_at(order)
            if not (has_loop and self._has_changed):
                return
        loops = [op for op in order if context_of(op) or op.type == "Exit"]
        for operation in loops:
            self._put(operation, MIXED)
        self._begin()
        self._look_at([op for op in order if {*map(self.state, op.outputs)} != {MIXED}])
        self.origins += [Origin(op, UNSETTLED) for op in loops if op.type == "Exit"]

    def analyze_further(self, tensors: Iterable[tf.Tensor]) -> bool:
        """Finds the states of further tensors; returns False if a loop needs all anew."""
        self._library.clear()  # there may be more functions
        order = inputs_first((tensor.op for tensor in tensors), self._seen)
        # By gradients, which need values of each round.
        has_grown = any(len(op.outputs) != n for op, n in self._seen.items())
        if has_grown or any(op.type == "NextIteration" for op in order):
            return False
        self._look_at(order)
        return True

    def is_given(self, tensor: tf.Tensor) -> bool:
        """Returns whether the caller decided the tensor's state."""
        return tensor.ref() in self._given

    def has_seen(self, operation: tf.Operation) -> bool:
        """Returns whether the states of an operation's outputs are found."""
        return operation in self._seen

    def is_new_in_each_run(self, tensor: tf.Tensor) -> bool:
        """Returns whether a seed is computed from a number that every run is fed with."""
        needed = data_ancestors([tensor.op])
        operations = [op for op in needed if op.graph is tensor.graph]
        placeholders = [op.outputs[0] for op in operations if op.type == "Placeholder"]
        if self._caller is not None:  # they are arguments, such as a loop's counter
            outer = [self._arguments[placeholder.ref()] for placeholder in placeholders]
            placeholders = [t for t in outer if self._caller.is_new_in_each_run(t)]
        else:
            captured = {inner.ref() for _, inner in captures_of(tensor.graph)}
            placeholders = [t for t in placeholders if t.ref() not in captured]
        return bool(placeholders) or any(op.type.startswith("Rng") for op in operations)

    def _begin(self) -> None:
        """Forgets all facts but those that were given."""
        self.guards, self.bounds, self.origins, self.combining = [], [], [], []
        self.short, self.padded, self.complete_lists = {}, {}, set()
        self.lengths = {}
        self._names, self._numbers, self._alias = {}, {}, {}  # of lists of entries
        self._first = {}  # tensor of each list
        for key in self._given:
            self._note_list(key.deref(), self._states[key])
        self.sparse_lists = {*self._numbers}
        for facts in (self._values, self._dims):
            for key in facts.keys() - self._given.keys():
                del facts[key]

    def _look_at(self, order: list[tf.Operation]) -> None:
        for operation in order:
            self._step(operation)
            self._seen[operation] = len(operation.outputs)

    def _forget_facts_of(self, operation: tf.Operation) -> None:
        """Forgets facts that a rule asked for before the operation was reached."""
        for output in operation.outputs:
            key = output.ref()
            if key not in self._given:
                self._values.pop(key, None)
                self._dims.pop(key, None)

    def _step(self, operation: tf.Operation) -> None:
        are_given = [output.ref() in self._given for output in operation.outputs]
        # A call may have further results.
        if all(are_given) if operation.type in CALLERS else any(are_given):
            return
        self._forget_facts_of(operation)
        span = getattr(operation, ROWS_ATTRIBUTE, None)
        if span is not None:
            self._put(operation, State("rows", 0, span))
            return
        states = [self.state(tensor) for tensor in operation.inputs]
        kinds = {state.kind for state in states}
        if kinds <= {"fixed"}:
            reason = self._why_not_fixed(operation)
            if reason:
                self.origins.append(Origin(operation, reason))
                self._put(operation, MIXED)
                return
            if operation.type not in _FROM_FIXED:
                if operation in self._seen:
                    self._put(operation, FIXED)
                return
        if operation.type == "Enter":
            self.note_bounds(operation)
        number, reason = len(self.origins), None
        try:
            outputs = self._transfer(operation, states, kinds)
        except Mixed as mixed:
            outputs, reason = MIXED, str(mixed)
        if isinstance(outputs, State):
            outputs = [outputs] * len(operation.outputs)
        if MIXED in outputs:
            inside = [origin.reason for origin in self.origins[number:]]
            self._note_mixing(operation, states, outputs, reason, inside)
        # The body of a call is looked into.
        is_call = operation.type in CALLERS
        if "mixed" in kinds and kinds & {"rows", "entries"} and not is_call:
            self.combining.append((operation, operation))
        self._put(operation, outputs)

    def _note_mixing(self, operation, states, outputs, reason, inside: list[str]):
        """Takes down an operation with mixed outputs whose inputs are not mixed.

        Args:
            operation: The operation.
            states: States of its inputs.
            outputs: States of its outputs.
            reason: Why all outputs are mixed; None if only some of them may be.
            inside: Why operations of its functions have mixed outputs.
        """
        pairs = zip(operation.inputs, states, strict=True)
        # A loop of TensorFlow 1 leads back to itself.
        before = {s.kind for t, s in pairs if t.op.type != "NextIteration"}
        if "mixed" in before:
            return
        if reason is None and before & _OF_ENTRIES:
            reason = "entries of examples in a function, branch, loop or list"
        pairs = zip(operation.outputs, outputs, strict=True)
        mixed = [tensor for tensor, state in pairs if state == MIXED]
        if reason is not None and any(map(_may_have_rows, mixed)):
            self.combining.append((operation, operation))
        self.origins.append(Origin(operation, reason or (*inside, NO_RULE)[0]))

    def _why_not_fixed(self, operation: tf.Operation) -> str | None:
        """Returns why a result is mixed although all inputs are fixed."""
        if operation.type in ("StackPop", "StackPopV2"):
            return "a loop of TensorFlow 1 kept it"
        if self._is_for_all(operation):
            return "it is computed once, for all examples"
        return None

    def _is_for_all(self, operation: tf.Operation) -> bool:
        """Returns whether every run has another result, which all examples share.

        Such as random numbers of a fixed shape, in functions, branches and loops; draws
        elsewhere are changed to one for each batch.
        """
        if operation.type in PYTHON or moves_generator(operation.type):
            return True
        if is_draw(operation):
            is_inside = context_of(operation) is not None
            is_inside |= self._caller is not None
            return is_inside or operation.type not in STATELESS
        if not functions_of(operation):
            return False
        kinds = self._kinds_in(operation)
        draws = any(draws_by_state(kind) or moves_generator(kind) for kind in kinds)
        return draws or bool(kinds & PYTHON)

    def _kinds_in(self, operation: tf.Operation) -> set[str]:
        if not self._library:
            self._library.update(library_of_functions())
        return kinds_in(operation, self._library)

    def _put(self, operation: tf.Operation, states: State | list[State]) -> None:
        if isinstance(states, State):
            states = [states] * len(operation.outputs)
        for output, state in zip(operation.outputs, states, strict=True):
            if output.ref() in self._given:
                continue
            is_along = state.kind == "rows" or state.kind in _OF_LISTS
            has_rows = is_along and (shape := output.shape).rank is not None
            # A shape without that axis is that of operands that do not fit.
            if has_rows and shape.as_list()[state.axis :][:1] != [None]:
                reason = "its number of examples is static"  # by Tensor.set_shape
                self.origins.append(Origin(operation, reason))
                state = MIXED
            if self.state(output) != state:
                self._states[output.ref()] = state
                self._has_changed = True
            self._note_list(output, state)

    def _note_list(self, tensor: tf.Tensor, state: State) -> None:
        """Takes down a list's first tensor, and indices of places in examples.

        Or row splits, which say as well how many entries each example has.
        """
        if state.kind == "entries":
            self._first.setdefault(state.of, tensor)
        has_numbers = state.kind == "entries" and state.is_first and state.distance
        if has_numbers and tensor.shape.rank == 2 and tensor.shape[1] != 1:
            self._numbers.setdefault(state.of, {})["indices", state.distance] = tensor
        if state.kind == "splits" and state.places is None:
            self._numbers.setdefault(state.of, {})["splits", state.span] = tensor

    def _transfer(self, operation, states: list[State], kinds: set[str]):
        """Returns the state of all outputs, or a list of their states."""
        if "unpadded" in kinds:
            if operation not in self.padded:
                raise Mixed("rows of the last examples may be missing")
            return self.padded[operation] or UNPADDED
        if operation.type in RULES_OF_ANY:
            # Entries have no rules there.
            states = [MIXED if state.kind in _OF_ENTRIES else state for state in states]
            return RULES_OF_ANY[operation.type](self, operation, states)
        if operation.type in OF_SHAPE or clamped(self, operation) is not None:
            return self._of_values(operation, "the shape of what is mixed")
        if "mixed" in kinds and operation.type not in RULES_OF_MIXED:
            return MIXED
        numbers = {"fixed", "sizes", "counts"}
        if kinds == {"fixed", "sizes"} and operation.type in ("Greater", "Less"):
            if self._has_an_example(operation):
                return FIXED
            if operation.type == "Greater":
                return SIZES  # which of several holds, as `tf.vectorized_map` asks
        if kinds <= numbers and operation.type not in FROM_SIZES:
            return self._of_values(operation, SIZE)
        try:
            with self.forgetting():
                return self._by_rule(operation, states, kinds)
        except Unknown as error:
            raise Mixed("a shape is not known before there are numbers") from error

    def _by_rule(self, operation, states: list[State], kinds: set[str]):
        if "mixed" in kinds:
            state = RULES_OF_MIXED[operation.type](self, operation, states)
            return MIXED if state is None else state
        if kinds & _OF_ENTRIES or operation.type in RULES_OF_ENTRIES:
            return of_entries(self, operation, states)
        rule = RULES.get(operation.type)
        if rule is None:
            raise Mixed(NO_RULE)
        return rule(self, operation, states)

    def _has_an_example(self, operation: tf.Operation) -> bool:
        """Returns whether a comparison asks if there are examples, as layers may."""
        number, limit = map(self.value, operation.inputs)
        if operation.type == "Less":
            number, limit = limit, number
        if number is None or limit is None or number.ndim:
            return False
        return number[()] == N and all(size == Size(0) for size in limit.flat)

    def _of_values(self, operation: tf.Operation, reason: str) -> list[State]:
        """Returns the states of integer outputs; raises Mixed if one is not known."""
        values = [self.value(output) for output in operation.outputs]
        if any(value is None for value in values):
            raise Mixed(reason)
        return [_state_of_value(value) for value in values]

    def of_function(
        self,
        operation: tf.Operation,
        graph: tf.Graph,
        tensors: Iterable[tf.Tensor],
        states: list[State],
        has_own_value: list[bool] | None = None,
    ) -> list[State]:
        """Returns the states of a function's outputs.

        Args:
            operation: The operation that calls the function.
            graph: The function's graph.
            tensors: The function's arguments.
            states: Their states.
            has_own_value: Whether the function gets the argument's own value; None
                means always.
        """
        body = Analysis(())
        body._caller, body._library = self, self._library
        body.path = f"{self.path}{operation.name}/{graph.name}/"
        for i, (inner, outer) in enumerate(zip(graph.inputs, tensors, strict=True)):
            body._states[inner.ref()] = states[i]
            body._arguments[inner.ref()] = outer
            is_same = has_own_value is None or has_own_value[i]
            if states[i].kind in ("fixed", "sizes") and is_same:
                body._values[inner.ref()] = self.value(outer)
            elif self.state(outer).kind in _OF_LISTS:
                continue  # its length is another one in each micro-batch
            elif states[i].kind == "rows" or self.knows_dims(outer):
                # A variable of a loop may change its shape.
                dims = self.dims(outer)
                body.set_dims(inner, states[i], dims if is_same else [None] * len(dims))
        body._given = dict.fromkeys(tensor.ref() for tensor in graph.inputs)
        body._analyze_body(graph)
        self.combining += [(operation, inner) for _, inner in body.combining]
        if body.guards:
            raise Mixed("rows are looked up by number inside a function")
        self.origins += body.origins
        states = [body.state(output) for output in graph.outputs]
        # Another call has other entries.
        return [MIXED if state.kind in _OF_ENTRIES else state for state in states]

    def _analyze_body(self, graph: tf.Graph) -> None:
        """Finds the states of a function's outputs.

        Raises:
            Mixed: If it checks something that the examples decide together.
        """
        checks = self._checks_in(graph)
        self.analyze([*graph.outputs, *(t for op in checks for t in op.inputs)])
        for operation in checks:
            states = [self.state(tensor) for tensor in operation.inputs]
            kinds = {state.kind for state in states}
            if kinds <= {"fixed"} or (
                self._asserts_its_condition(operation)
                and self._holds_in_parts(operation.inputs[0])
            ):
                continue
            if operation.type == "Assert":
                raise Mixed(_ASSERTION)
            try:
                self._transfer(operation, states, kinds)
            except Mixed as mixed:
                raise Mixed(_ASSERTION) from mixed

    def _checks_in(self, graph: tf.Graph) -> list[tf.Operation]:
        """Returns the assertions, and the calls of functions that have some."""
        return [
            operation
            for operation in graph.get_operations()
            if operation.type in CALLERS | {"Assert"}
            and "Assert" in self._kinds_in(operation)
        ]

    def _asserts_its_condition(self, operation: tf.Operation) -> bool:
        """Returns whether it asserts its first input alone, as tf.debugging's branch."""
        if operation.type != "If":
            return operation.type == "Assert"
        condition, *tensors = operation.inputs
        otherwise, then = graphs_called(operation)
        pairs = zip(otherwise.inputs, tensors, strict=True)
        conditions = {inner.ref() for inner, outer in pairs if outer is condition}
        return not self._checks_in(then) and all(
            check.type == "Assert" and check.inputs[0].ref() in conditions
            for check in self._checks_in(otherwise)
        )

    def _holds_in_parts(self, condition: tf.Tensor) -> bool:
        """Returns whether a condition holds if it does so in each micro-batch."""
        operation = condition.op
        if self.state(condition).kind in ("fixed", "rows", "entries"):
            return condition.dtype == tf.bool
        if operation.type in ("All", "Identity", "LogicalAnd"):
            parts = [tensor for tensor in operation.inputs if tensor.dtype == tf.bool]
            return bool(parts) and all(map(self._holds_in_parts, parts))
        if operation.type in _BOUNDED:
            return self._bounds_examples(operation)
        if operation.type != "Equal" or not condition.op.inputs[0].dtype.is_integer:
            return False
        sizes = [self.value(tensor) for tensor in operation.inputs]
        return all(size is not None for size in sizes) and np.array_equal(*sizes)

    def _bounds_examples(self, operation: tf.Operation) -> bool:
        """Returns whether a comparison bounds the largest or smallest of some values."""
        for extreme, limit, kind in zip(
            operation.inputs,
            reversed(operation.inputs),
            _BOUNDED[operation.type],
            strict=True,
        ):
            if extreme.op.type == kind and self.state(limit) == FIXED:
                state = self.state(extreme.op.inputs[0])
                return state.kind in ("rows", "entries") and not state.is_place
        return False

    def note_bounds(self, operation: tf.Operation) -> None:
        """Takes down the numbers of the batch that enter a loop."""
        for i, tensor in enumerate(operation.inputs):
            is_number = tensor.dtype.is_integer and tensor.shape.rank == 0
            if is_number and self.state(tensor).kind == "mixed":
                self.bounds.append((operation, i))


def _state_of_value(value: np.ndarray) -> State:
    if lists_of(value.flat):
        return COUNTS
    return SIZES if has_examples(value) else FIXED


def _may_have_rows(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor may have gradients of examples."""
    return tensor.dtype.is_floating and not tensor.shape.is_fully_defined()


def inputs_first(
    roots: Iterable[tf.Operation], without: Collection[tf.Operation] = ()
) -> list[tf.Operation]:
    """Returns `roots` and the operations that they are computed from, inputs first.

    The order of creation is another one: tf.cond of TensorFlow 1 sets inputs later. A
    loop of TensorFlow 1 comes from its begin to its end, and then what leads back.
    """
    roots = [operation for operation in roots if operation not in without]

    def before(operation: tf.Operation) -> list[tf.Operation]:
        if operation.type == "NextIteration":
            roots.append(operation.inputs[0].op)
            return []
        inputs = [tensor.op for tensor in operation.inputs]
        return [other for other in inputs if other not in without]

    return [*in_order(roots, before)]  # which grow
