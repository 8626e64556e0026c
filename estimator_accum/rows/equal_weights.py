"""Warning of a loss that equal weights of micro-batches do not fit.

    L(A and B) + L(C and D) = L(A and D) + L(C and B)

for random halves of batches, if each example adds to the loss a number of its own. A mean
and a sum over examples do, also with penalties. A mean over tokens does not:

    sum(loss of tokens * mask) / sum(mask)      mean(boolean_mask(loss of tokens, mask))

The mean over micro-batches of such means is not the mean over the batch, unless each
micro-batch is weighted by its divisor w. The equation holds for w L and for w then.
"""

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.graph.functions import all_nodes
from estimator_accum.graph.internals import context_of
from estimator_accum.graph.names import (
    BATCHES,
    COMPARISONS,
    CONTROL_FLOW_V1,
    FED,
    OF_SHAPES,
    READERS_OF_VALUE,
    SHAPES,
    VARIABLES,
)
from estimator_accum.graph.replicas import number_of_replica
from estimator_accum.graph.walks import data_ancestors, origin_of
from estimator_accum.rows.analysis import Analysis, inputs_first
from estimator_accum.rows.heads import (
    SELECTING,
    Head,
    draw_examples,
    draw_others,
    find_head,
    runs_of,
)
from estimator_accum.rows.loss_sums import LINEAR, SCALING, SHOWN, is_one_number
from estimator_accum.rows.sizes import Size
from estimator_accum.rows.states import FIXED, MIXED, SIZES, State

_EXAMPLES = 8


class _Draw(NamedTuple):
    """The numbers that random examples have.

    Attributes:
        low: The least of the numbers, but for whole ones: positive ones have logarithms.
        high: The largest one: some may be numbers of groups.
        has_zeros: Whether there are zeros, as in masks, and numbers of comparisons.
        shares_wholes: Whether batches have the same whole numbers, which may be sorted.
        wholes: Whole numbers are below this one, such as a class.
    """

    low: float = 0.1
    high: float = 0.9
    has_zeros: bool = False
    shares_wholes: bool = False
    wholes: int = 2


_DRAWS = [_Draw(), _Draw(low=-0.9), _Draw(has_zeros=True), _Draw(shares_wholes=True)]
_MOST_WHOLES = 4
_DRAWS += [_Draw(high=4.0), _Draw(low=-0.9, has_zeros=True)]
_DRAWS += [_Draw(wholes=_MOST_WHOLES)]
_ROUNDS = 4  # of each
# Relative errors of a loss, by the numbers that it is computed with.
_ROUNDING = {tf.bfloat16: 0.08, tf.float16: 0.01, tf.float32: 6e-6, tf.float64: 1e-14}
# Operations whose results have as many elements as the values decide.
_OF_ANY_LENGTH = {"DynamicPartition", "Unique", "UniqueV2", "Where"}
_BY_MASK = {*SELECTING, "Where"}
_logger = logging.getLogger("tensorflow.estimator_accum")


class Assumption:
    """States of tensors where an analysis has none: a row for each example.

    A tensor with the batch's length along its first axis is taken for rows, unless it is
    computed from a number of the batch. So the numbers of a loss behind such tensors are
    right, and ways to join examples before are not seen. Rows that a mask selects are
    entries, and an analysis finds which are computed from these.

    Args:
        loss: The loss.
        rows: The parts of the batch that have a row for each example.
        parts: Its parts, of which there may be others.
        size: The number of examples; None if it is not static.
    """

    def __init__(
        self,
        loss: tf.Tensor,
        rows: Iterable[tf.Tensor],
        parts: Iterable[tf.Tensor],
        size: int | None,
    ):
        self._size, self._parts = size, {part.ref() for part in rows}
        joined, sizes = {part.ref() for part in parts} - self._parts, set()
        values = self._parts | joined
        self._operations = inputs_first([loss.op])
        for operation in self._operations:
            inputs = {tensor.ref() for tensor in operation.inputs}
            results = {tensor.ref() for tensor in operation.outputs}
            of_values = inputs & values
            if of_values and operation.type not in SHAPES:
                values |= results
                numbers = [ref for ref in of_values if is_one_number(ref.deref())]
                if numbers or inputs & joined or _moves_examples(operation):
                    joined |= results
            elif of_values or inputs & sizes:
                sizes |= results
        self._values, self._sizes, self._joined = values, sizes, joined
        self._entries = Analysis((), [*rows, *parts], self._selected())
        self._entries.analyze([loss])

    def is_given(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is a part of the batch."""
        return tensor.ref() in self._parts

    def state(self, tensor: tf.Tensor) -> State:
        """Returns the state."""
        key = tensor.ref()
        if key not in self._values:
            return SIZES if key in self._sizes else FIXED
        entries = self._entries.state(tensor)
        if entries.kind == "entries":
            return entries
        return self._state_by_length(tensor)

    def _state_by_length(self, tensor: tf.Tensor) -> State:
        key = tensor.ref()
        if key in self._joined or not tensor.shape.rank:
            return MIXED
        length, size = tensor.shape.as_list()[0], self._size
        if length is None or size is None:
            return State("rows", 0) if length == size else MIXED
        return MIXED if length % size else State("rows", 0, Size(length // size))

    def _selected(self) -> dict:
        """Returns the states of rows that are selected, and of masks, by reference."""
        tensors = [
            t for op in self._operations if op.type in _BY_MASK for t in op.inputs
        ]
        states = {tensor.ref(): self._state_by_length(tensor) for tensor in tensors}
        return {key: state for key, state in states.items() if state.kind == "rows"}


def warn_of_unequal_weights(
    loss: tf.Tensor,
    views: Iterable[tuple[tf.Tensor, Analysis | Assumption, int | None]],
    share: str,
    remedy: str = "",
) -> None:
    """Warns of a loss to which no examples add numbers of their own.

    Args:
        loss: The loss of a micro-batch, without a `weight`.
        views: Ways to look at it, the best one first: the loss or a copy of it, the states
            of tensors, the number of examples if it is static.
        share: Each micro-batch's share of the mean, in words.
        remedy: A sentence; empty: the `weight` to write, if one fits.
    """
    for tensor, states, size in views:
        with tensor.graph.as_default():
            verdict = _Verdict(states, tensor, size, loss.graph)
            if verdict.adds_up is None:
                continue
            divisor = None if verdict.adds_up else verdict.divisor()
        # One replica warns for all; the question adds an operation.
        if not verdict.adds_up and not number_of_replica():
            _logger.warning(_sentence(loss, divisor, share, remedy))
        return


def _sentence(
    loss: tf.Tensor, divisor: tf.Tensor | None, share: str, remedy: str
) -> str:
    if divisor is None:
        remedy = remedy or (
            "If a number of elements divides all of it, pass that number as `weight` where "
            "the train op is made. If not, let microbatch_model_fn split the batches of a "
            "model_fn with a plain optimizer, which computes the loss of the whole batch."
        )
        return (
            f"{loss.name} is not a mean over examples alone: what one of them adds depends "
            f"on the others of its micro-batch. Since {share}, the update is not the big "
            f"batch's. {remedy}"
        )
    if not is_one_number(divisor):
        cause = f"as many elements as {divisor.name} has in it"
        remedy = remedy or (
            "Write weight=tf.cast(tf.size(elements), tf.float32), with these elements, "
            "where the train op is made."
        )
    else:
        cause = f"it is divided by {divisor.name}"
        remedy = remedy or (
            "Write weight=tf.reduce_sum(mask), with the weights that this divisor adds up, "
            "where the train op is made."
        )
    return (
        f"{loss.name} is a mean over another number of elements in each micro-batch: "
        f"{cause}, which depends on the examples. Without `weight`, {share}, so the update "
        f"is not the big batch's. {remedy}"
    )


class _Verdict:
    """Whether each example adds to a loss a number of its own.

    Args:
        states: The states of tensors.
        loss: The loss.
        size: The number of examples; None if it is not static.
        graph: The graph of which that of the loss may be a copy.

    Attributes:
        adds_up: The answer; None if it is not known.
    """

    def __init__(
        self,
        states: Analysis | Assumption,
        loss: tf.Tensor,
        size: int | None,
        graph: tf.Graph,
    ):
        self._states, self._size, self._graph = states, size or _EXAMPLES, graph
        loss = origin_of(loss, SHOWN)
        self._head = find_head(states, loss, with_parts=True) or find_head(states, loss)
        self._numbers = self._limits()
        self.adds_up = self._adds_up()

    def _adds_up(self) -> bool | None:
        head = self._head
        if head is None:
            return None
        if not head.rows or all(map(self._is_linear, head.operations)):
            return True
        if self._has_batch_normalization():
            return None  # by the statistics of each micro-batch, as users know
        rounding, answers = _rounding(head), []
        with contextlib.closing(self._results([])) as results:
            for losses, *_ in results:
                answers.append(_is_separable([losses], rounding))
                if answers.count(False) == 2:  # one may be a matter of rounding
                    return False
        return True if True in answers else None

    def divisor(self) -> tf.Tensor | None:
        """Returns a number, or elements, by which all is divided; None without one."""
        outputs = [
            output
            for operation in self._head.operations
            if context_of(operation) is None and operation.type not in CONTROL_FLOW_V1
            for output in operation.outputs
            if output.dtype.is_floating or output.dtype.is_integer
        ]
        # Their numbers are trained, and how many they are is not.
        selected = {
            r.tensor.name: r.tensor for r in self._head.rows if r.selection is not None
        }
        outputs += selected.values()
        results = np.array([*self._results(outputs)])  # [draws, 1 + outputs, 4]
        if not results.size:
            return None
        rounding = _rounding(self._head)
        for place, tensor in enumerate(outputs, 1):
            # Where nothing is counted, guards decide.
            draws = results[(results[:, place] != 0).all(-1)]
            losses, weights = draws[:, 0], draws[:, place]
            if not weights.size or (weights == weights[0, 0]).all():
                continue  # a number of all batches
            with np.errstate(invalid="ignore"):  # infinite losses
                products = weights * losses
            if (
                _is_separable(weights, rounding)
                and _is_separable(products, rounding)
                and (tensor.name in selected or not self._is_trained(tensor))
            ):
                return tensor
        return None

    def _has_batch_normalization(self) -> bool:
        operations = self._head.operations
        nodes = all_nodes(operations)
        if any(node.op.startswith("FusedBatchNorm") for node in nodes):
            return True
        roots = [operation for operation in operations if operation.type == "Rsqrt"]
        kinds = {self._states.state(root.inputs[0]).kind for root in roots}
        return "mixed" in kinds

    def _is_trained(self, tensor: tf.Tensor) -> bool:
        """Returns whether a gradient may go through a tensor to a variable."""
        # Copies of static batches read no variables.
        try:
            original = self._graph.get_tensor_by_name(tensor.name)
        except KeyError:
            return False  # from tables of the batch, which are of the copy alone

        def inputs_of(operation: tf.Operation) -> list[tf.Tensor]:
            is_end = operation.type in {*BATCHES, *FED, *OF_SHAPES}
            inputs = [] if is_end else operation.inputs
            return [t for t in inputs if not self._states.is_given(t)]

        needed = data_ancestors([original.op], inputs_of)
        return any(op.type in {*READERS_OF_VALUE, *VARIABLES} for op in needed)

    def _is_linear(self, operation: tf.Operation) -> bool:
        """Returns whether an operation adds up, moves or scales numbers of examples."""
        kinds = [self._states.state(tensor).kind for tensor in operation.inputs]
        places = [i for i, kind in enumerate(kinds) if kind not in ("fixed", "sizes")]
        if not places:
            return True
        if not {"fixed", "sizes", "rows", "mixed"}.issuperset(kinds):
            return False  # such as entries, of which there are not as many everywhere
        if operation.type == "Cast":
            dtypes = {operation.inputs[0].dtype, operation.outputs[0].dtype}
            return all(dtype.is_floating for dtype in dtypes)
        if operation.type == "L2Loss":
            return kinds == ["rows"]
        if operation.type == "Mul":
            return len(places) == 1
        if operation.type in LINEAR - {"Reshape", "ExpandDims"}:
            return True
        moving = {*SCALING, *SHOWN, "ExpandDims", "Mean", "Reshape", "Sum", "Transpose"}
        return operation.type in moving and places == [0]

    def _results(self, further: list[tf.Tensor]) -> Iterator[list[list[float]]]:
        """Yields, for each draw, lists of four numbers: of the loss and of `further`.

        Of A and B, C and D, A and D, C and B, in this order. The number of a tensor with
        several elements is how many they are.
        """
        try:
            with runs_of(self._head, further) as run:
                for place, draw in enumerate(_DRAWS * _ROUNDS):
                    random = np.random.default_rng(place)
                    numbers = []
                    try:
                        for values in self._feeds(random, draw, flag=place % 2 == 0):
                            numbers.append([float(np.sum(x)) for x in run(values)])
                    except tf.errors.DeadlineExceededError:
                        return
                    except tf.errors.OpError:  # such as examples that do not fit
                        continue
                    yield [list(four) for four in zip(*numbers, strict=True)]
        except (tf.errors.OpError, TypeError, ValueError):
            return

    def _feeds(self, random, draw: _Draw, flag: bool) -> list[dict]:
        one, two = (self._examples(random, draw) for _ in range(2))
        others = draw_others(random, self._head, flag)
        mixed = [dict(others), dict(others)]
        for tensor, axis, *_ in self._head.rows:
            name = tensor.name
            if draw.shares_wholes and not tensor.dtype.is_floating:
                two[name] = one[name]
            half = self._half(one[name], axis)
            (a, b), (c, d) = (np.split(v[name], [half], axis) for v in (one, two))
            mixed[0][name] = np.concatenate([a, d], axis)
            mixed[1][name] = np.concatenate([c, b], axis)
        return [others | one, others | two, *mixed]

    def _examples(self, random, draw: _Draw) -> dict[str, np.ndarray]:
        limits = draw.low, draw.high, min(draw.wholes, self._most_wholes())
        values = draw_examples(random, self._head, self._size, *limits)
        shares = random.beta(0.5, 0.5, 2)  # of zeros, in each half: many numbers differ
        for tensor, axis, *_ in self._head.rows:
            value = values[tensor.name]
            if not draw.has_zeros:
                continue
            at = np.arange(value.shape[axis]) >= self._half(value, axis)
            share = shares[at.astype(int)].reshape([-1] + [1] * (value.ndim - axis - 1))
            is_zero = random.random(value.shape) < share
            dtype = tensor.dtype
            limits = self._numbers[dtype.is_integer]
            if dtype != tf.bool:
                limits = [limit for limit in limits if dtype.min <= limit <= dtype.max]
            chosen = random.choice(limits, value.shape).astype(value.dtype)
            values[tensor.name] = np.where(is_zero, chosen, value)
        return values

    def _half(self, value: np.ndarray, axis: int) -> int:
        """Returns the number of rows of the first half of the examples."""
        return value.shape[axis] // self._size * (self._size // 2)

    def _most_wholes(self) -> int:
        """Returns how many whole numbers mean something, such as classes; at least 2."""
        numbers = [
            tf.get_static_value(operation.inputs[1])
            for operation in self._head.operations
            if operation.type == "OneHot"
        ]
        numbers += [
            tf.get_static_value(tensor) + 1
            for operation in self._head.operations
            for tensor in (operation.inputs if operation.type == "Equal" else ())
            if tensor.dtype.is_integer
            if is_one_number(tensor) and tf.get_static_value(tensor) is not None
        ]
        numbers = [int(number) for number in numbers if number is not None]
        return max(2, min(numbers, default=_MOST_WHOLES))

    def _limits(self) -> dict[bool, list[float]]:
        """Returns 0 and the numbers of comparisons, such as no label's, by whether whole."""
        limits = {True: [0], False: [0.0]}
        for operation in self._head.operations if self._head else []:
            for tensor in operation.inputs if operation.type in COMPARISONS else []:
                dtype = tensor.dtype
                if is_one_number(tensor) and (dtype.is_floating or dtype.is_integer):
                    value = tf.get_static_value(tensor)
                    if value is not None and np.isfinite(np.sum(value)):
                        limits[tensor.dtype.is_integer].append(np.sum(value))
        return limits


def _moves_examples(operation: tf.Operation) -> bool:
    """Returns whether an operation selects examples, or puts their axis elsewhere."""
    if operation.type == "Transpose":
        axes = tf.get_static_value(operation.inputs[1])
        return axes is None or axes[0] != 0
    return operation.type in _OF_ANY_LENGTH


def _is_separable(values: Iterable, rounding: float) -> bool | None:
    """Returns whether the equation of this file holds; None without finite numbers.

    Args:
        values: Four numbers for each draw, in the order of the equation.
        rounding: The relative error of a loss.
    """
    values = np.array(values)
    values = values[np.isfinite(values).all(-1)]
    if not values.size:
        return None
    difference = np.abs(values[:, 0] + values[:, 1] - values[:, 2] - values[:, 3])
    spread = values.max(-1) - values.min(-1)
    bound = 1e-3 * spread + rounding * np.abs(values).max(-1)
    return bool((difference <= bound).all())


def _rounding(head: Head) -> float:
    """Returns the relative error of the coarsest numbers that operations compute with."""
    tensors = [rows.tensor for rows in head.rows]
    tensors += itertools.chain.from_iterable(op.outputs for op in head.operations)
    dtypes = {t.dtype.base_dtype for t in tensors if t.dtype.is_floating}
    return max((_ROUNDING.get(dtype, 1.0) for dtype in dtypes), default=1.0)
