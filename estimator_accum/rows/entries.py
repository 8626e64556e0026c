"""States of results that are computed from lists of entries.

An entry of a list is like an example of its own: if each entry of a result is computed
from the entry at its place, it is computed from one example. So the rules of rows hold
for the entries of one list. Operations that make lists, or rows of entries, have rules of
their own in `rules/entries.py`.
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from estimator_accum.graph.functions import has_own_gradient
from estimator_accum.graph.names import is_any_draw
from estimator_accum.rows.rules.blocks import blocks_of
from estimator_accum.rows.rules.table import (
    RULES,
    RULES_OF_ENTRIES,
    RULES_OF_SPLITS,
)
from estimator_accum.rows.sizes import ONE, N, Size, count, lists_of, sizes
from estimator_accum.rows.states import (
    COUNTS,
    MIXED,
    NO_RULE,
    OF_SPLITS,
    SIZES,
    Mixed,
    State,
)

_ROWS = State("rows", 0)
# The name of a length of a sparse tensor, which is no list; the longest row decides it.
_WIDTH = re.compile(r".*:(width|axis\d+)")


class _EntriesAsExamples:
    """The analysis in which n is the number of entries of one list.

    Args:
        analysis: The analysis.
        name: Name of the list.
    """

    def __init__(self, analysis, name: str):
        self._analysis, self._name = analysis, name
        self._count = count(name).symbols[0]

    def state(self, tensor: tf.Tensor) -> State:
        """Returns the state of a tensor: that of rows for entries."""
        return self.of(self._analysis.state(tensor))

    def of(self, state: State) -> State:
        """Returns a state in terms of n."""
        if state == COUNTS:
            return SIZES
        return _ROWS if state.kind == "entries" else state

    def value(self, tensor: tf.Tensor) -> np.ndarray | None:
        """Returns an integer tensor as sizes; None if it is not known."""
        value = self._analysis.value(tensor)
        if value is None:
            return None
        return sizes([self._inner(size) for size in value.flat]).reshape(value.shape)

    def dims(self, tensor: tf.Tensor) -> list[Size]:
        """Returns a shape."""
        return [self._inner(size) for size in self._analysis.dims(tensor)]

    def rank(self, tensor: tf.Tensor) -> int:
        """Returns the number of axes."""
        return self._analysis.rank(tensor)

    def knows_dims(self, tensor: tf.Tensor) -> bool:
        """Returns whether something is known of a shape."""
        return self._analysis.knows_dims(tensor)

    def is_new_in_each_run(self, tensor: tf.Tensor) -> bool:
        """Returns whether a seed is computed from a number that every run is fed with."""
        return self._analysis.is_new_in_each_run(tensor)

    def set_dims(self, tensor: tf.Tensor, state: State, shape: list) -> State:
        """Takes down the known part of the shape of an output; returns its state."""
        outer = self.outer(state)
        self._analysis.set_dims(tensor, outer, [self._outer(size) for size in shape])
        return state

    def outer(self, state: State) -> State:
        """Returns the state of a rule's result in terms of entries."""
        if state.kind == "fixed":
            return state
        if state == _ROWS._replace(distance=ONE, is_number=True):
            return State("entries", 0, of=self._name, places=self._name)
        if state != _ROWS:
            raise Mixed("entries of examples become something else")
        return State("entries", 0, of=self._name)

    def _inner(self, size: Size) -> Size:
        if size.power:
            return self._number_of_blocks(size)
        symbols = tuple(name for name in size.symbols if name != self._count)
        power = len(size.symbols) - len(symbols)
        return dataclasses.replace(size, symbols=symbols, power=power)

    def _number_of_blocks(self, size: Size) -> Size:
        """Returns a size in terms of n, the number of rows in all blocks."""
        blocks = blocks_of(self._name)
        if blocks is None or size.power > 1 or size.factor % (blocks[0] * blocks[1]):
            raise Mixed("the number of examples beside that of entries")
        return dataclasses.replace(size, factor=size.factor // (blocks[0] * blocks[1]))

    def _outer(self, size: Size | None) -> Size | None:
        if size is None:
            return None
        symbols = tuple(sorted((*size.symbols, *[self._count] * size.power)))
        return dataclasses.replace(size, symbols=symbols, power=0)


def states_of_sparse(tensors: Mapping[str, list[tf.Tensor]]) -> tuple[dict, dict]:
    """Returns the states of the parts of sparse tensors, and the values of their shapes.

    Args:
        tensors: Indices, values and shape of each tensor, whose first axis lists the
            examples, by name. The other sizes are the same in all micro-batches.
    """
    states, values = {}, {}
    for name, (indices, entries, shape) in tensors.items():
        numbers = State("entries", 0, distance=ONE, is_first=True, of=name)
        states |= {indices.ref(): numbers, entries.ref(): State("entries", 0, of=name)}
        rank = shape.shape.num_elements()
        if rank:
            states[shape.ref()] = SIZES
            symbols = [Size(symbols=(f"{shape.name}[{i}]",)) for i in range(1, rank)]
            values[shape.ref()] = sizes([N, *symbols])
        else:
            states[shape.ref()] = MIXED
    return states, values


def states_of_ragged(tensors: Mapping[str, list[tf.Tensor]]) -> dict:
    """Returns the states of the parts of ragged tensors.

    Args:
        tensors: Flat values and row splits of each tensor by name, the outer splits
            first.
    """
    states = {}
    for name, (values, *splits) in tensors.items():
        outer = None
        for depth, tensor in enumerate(splits):
            inner = name if depth == len(splits) - 1 else f"{name}, axis {depth + 1}"
            states[tensor.ref()] = State("splits", 0, of=inner, places=outer)
            outer = inner
        states[values.ref()] = State("entries", 0, of=name)
    return states


def of_entries(analysis, operation: tf.Operation, states: list[State]):
    """Returns the state of all outputs, or a list of their states.

    Raises:
        Mixed: If a result may combine examples.
    """
    kinds = {state.kind for state in states}
    if kinds & OF_SPLITS:
        if operation.type not in RULES_OF_SPLITS:
            raise Mixed("row splits count the entries of the examples before")
        return RULES_OF_SPLITS[operation.type](analysis, operation, states)
    link = RULES_OF_ENTRIES.get(operation.type)
    result = None if link is None else link(analysis, operation, states)
    if result is not None:
        return result
    rule = RULES.get(operation.type)
    if rule is None:
        raise Mixed(NO_RULE)
    if not kinds & {"entries", "counts"}:
        return rule(analysis, operation, states)
    if not kinds <= {"fixed", "entries", "counts", "sizes"}:
        raise Mixed("entries of examples stand beside examples")
    if any(state.is_place for state in states):
        raise Mixed("the place of an entry as a value")
    if has_own_gradient(operation.node_def):
        raise Mixed("entries of examples with a gradient of their own")
    name, *others = sorted(_lists(analysis, operation, states))
    if is_any_draw(operation) and blocks_of(name) is None:
        raise Mixed("random numbers for the entries of examples")
    for other in others:
        analysis.take_for_same(name, other)
    within = _EntriesAsExamples(analysis, analysis.list_of(name))
    results = rule(within, operation, [within.of(state) for state in states])
    if isinstance(results, State):
        return within.outer(results)
    return [within.outer(state) for state in results]


def _lists(analysis, operation: tf.Operation, states: list[State]) -> set[str]:
    """Returns the names of the lists that an operation reads entries or counts of."""
    names = {state.of for state in states if state.kind == "entries"}
    for tensor, state in zip(operation.inputs, states, strict=True):
        if state == COUNTS:
            value = analysis.value(tensor)
            counted = set() if value is None else lists_of(value.flat)
            if not counted:
                raise Mixed("a number of entries that is not known")
            if any(count(name).rows is not None for name in counted):
                raise Mixed("one row more than there are")
            if any(map(_WIDTH.fullmatch, counted)):
                raise Mixed("as many as the longest row has, of no example")
            names |= counted
    return names
