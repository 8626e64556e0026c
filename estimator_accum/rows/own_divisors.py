"""A mean over a number of elements that differs between micro-batches.

    sum(loss of tokens * mask) / sum(mask)      mean(boolean_mask(loss of tokens, mask))

The mean over micro-batches of such means is not the mean over the batch, unless each
micro-batch is weighted by its divisor.
"""

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.graph.functions import captured_among, functions_of
from estimator_accum.graph.internals import graph_of_function
from estimator_accum.graph.names import BRANCHES, CALLS, SHAPES, SUMS, VARIABLES
from estimator_accum.graph.walks import data_ancestors, walk
from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.loss_sums import SCALING, SHOWN, is_one_number
from estimator_accum.rows.rules.blocks import blocks_of

_QUOTIENTS = SCALING - {"Mul"}
# Operations whose results are elements of the first input, or multiples of them.
_MOVED = {"Cast", "ExpandDims", "Identity", "Neg", "Reshape", "Squeeze", "Transpose"}
_MOVED |= {"StopGradient", *SHOWN}
# Operations through which a sum of weights stays one, more or less.
_CHOOSING = {"Select", "SelectV2"}
_OF_COUNTS = {*SUMS, *SCALING, *_MOVED, *_CHOOSING, "Maximum", "Minimum", "Prod"}
_OF_COUNTS |= {"ClipByValue", "Pack", "StridedSlice", "Unpack"}
# Operations that add up weights.
_ADDING = {"Bincount", "Cumsum", "DenseBincount", "Einsum", "L2Loss", "MatMul", "Mean"}
_ADDING |= {"SegmentSum", "Sum", "UnsortedSegmentSum"}
# Operations whose results have as many elements as the values decide.
_SELECTING = {"DynamicPartition", "Unique", "UniqueV2", "Where"}
# Operations that put all selected elements together again.
_JOINING = {"DynamicStitch", "ParallelDynamicStitch"}
_LIKE = {"OnesLike", "ZerosLike"}
_logger = logging.getLogger("tensorflow.estimator_accum")


class Divisor(NamedTuple):
    """A divisor that is computed from the examples.

    Attributes:
        tensor: The divisor, or the tensor whose elements are averaged.
        is_size: Whether the divisor is the number of these elements.
    """

    tensor: tf.Tensor
    is_size: bool


def warn_of_own_divisors(
    loss: tf.Tensor,
    is_source: Callable[[tf.Tensor], bool],
    analyze: Callable[[], Analysis] | None,
    share: str,
    remedy: str = "",
) -> None:
    """Warns of a loss that no equal weights of micro-batches fit.

    Args:
        loss: The loss of a micro-batch, without a `weight`.
        is_source: Whether a tensor is a part of the batch with rows.
        analyze: Returns an analysis that has reached the loss; None if the sizes of the
            batch are static, so that those that are unknown depend on its values.
        share: Each micro-batch's share of the mean, in words.
        remedy: A sentence; empty: the `weight` to write, if one fits.
    """
    divisors = _Search(loss, is_source, analyze).divisors()
    if not any(divisors):
        return
    replica = tf.distribute.get_replica_context()
    number = getattr(replica, "replica_id_in_sync_group", 0)
    if tf.get_static_value(number) not in (0, None):
        return  # the first one warns for all
    first, *others = {_key_of(divisor): divisor for divisor in divisors}.values()
    size = "as many elements as %s has in it"
    if others:
        first = first or others[0]
    if not remedy:
        remedy = _remedy(first, has_others=bool(others))
    _logger.warning(
        f"%s is a mean over another number of elements in each micro-batch: "
        f"{size if first.is_size else 'it is divided by %s'}, which depends on the "
        f"examples. Without `weight`, {share}, so the update is not the big batch's. "
        f"{remedy}",
        loss.name,
        first.tensor.name + " in a function" * (first.tensor.graph is not loss.graph),
    )


def _key_of(divisor: Divisor | None) -> tuple | None:
    return divisor and (divisor.tensor.graph, divisor.tensor.name)


def _remedy(divisor: Divisor, has_others: bool) -> str:
    if has_others:
        return (
            "Its terms have other divisors, so no weight fits all of them: let "
            "microbatch_model_fn split the batches of a model_fn with a plain optimizer, "
            "which computes the loss of the whole batch."
        )
    if divisor.is_size:
        return (
            "Write weight=tf.cast(tf.size(elements), tf.float32), with these elements, "
            "where the train op is made."
        )
    return (
        "Write weight=tf.reduce_sum(mask), with the weights that this divisor adds up, "
        "where the train op is made."
    )


def _is_of_each_example(tensor: tf.Tensor) -> bool:
    """Returns whether numbers of each example are added up, such as of a single one."""
    operation = tensor.op
    if operation.type not in ("Mean", "Sum") or not tensor.shape.rank:
        return False
    axes = tf.get_static_value(operation.inputs[1])
    rank = operation.inputs[0].shape.rank
    return axes is not None and rank and 0 not in axes.reshape(-1) % rank


def _each(waiting: list[tf.Tensor]) -> Iterator[tf.Tensor]:
    """Yields the tensors of a list that grows, the last one first, and each once."""
    seen = set()
    while waiting:
        tensor = waiting.pop()
        if tensor.ref() not in seen:
            seen.add(tensor.ref())
            yield tensor


class _Search:
    """Search for the divisors of a loss; for the arguments see `warn_of_own_divisors`."""

    def __init__(self, loss, is_source, analyze):
        self._loss, self._is_source = loss, is_source
        self._analyze, self._analysis = analyze, None
        self._results, self._arguments = {}, {}  # of functions

    def divisors(self) -> list[Divisor | None]:
        """Returns each term's divisor; None for a mean over all examples.

        Terms without examples, such as penalties, have no place.
        """
        ends, waiting = {}, [self._source(self._loss)]
        for tensor in _each(waiting):
            operation, inputs = tensor.op, self._inputs(tensor)
            unknown = [t for t in inputs if tf.get_static_value(t) is None]
            if operation.type in {*SUMS, "Pack"}:
                waiting += inputs
            elif operation.type in _MOVED or (
                operation.type in ("Mean", "Sum")
                and (is_one_number(inputs[0]) or inputs[0].op.type == "Pack")
            ):
                waiting.append(inputs[0])
            elif (
                operation.type in SCALING
                and len(unknown) == 1
                and (operation.type == "Mul" or unknown[0] is inputs[0])
            ):
                waiting += unknown
            else:
                ends[tensor.ref()] = self._divisor_in(tensor)
        if not any(ends.values()):
            return []
        return [
            divisor
            for end, divisor in ends.items()
            if divisor or self._is_of_batch(end.deref())
        ]

    def _inputs(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        return [self._source(other) for other in tensor.op.inputs]

    def _source(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor that an argument or result of a function is."""
        while True:
            operation = tensor.op
            if operation.type in CALLS:
                (tensor,) = self._results_of(tensor)
            elif operation.type == "Switch":
                tensor = operation.inputs[0]
            elif tensor.ref() in self._arguments:
                tensor = self._arguments[tensor.ref()]
            else:
                return tensor

    def _results_of(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Returns a result of an operation in each function that it calls."""
        operation = tensor.op
        if operation not in self._results:
            outer = operation.inputs[operation.type in BRANCHES :]
            shapes = [argument.shape for argument in outer]
            names = functions_of(operation)
            graphs = [graph_of_function(operation, shapes, name) for name in names]
            for graph in graphs:
                pairs = zip(graph.inputs, outer, strict=True)
                self._arguments |= {inner.ref(): argument for inner, argument in pairs}
            self._results[operation] = [graph.outputs for graph in graphs]
        place = tensor.value_index
        return [results[place] for results in self._results[operation]]

    def _divisor_in(self, term: tf.Tensor) -> Divisor | None:
        """Returns a number of the batch by which all of a term is divided."""
        waiting = [term]
        for tensor in _each(waiting):
            operation, inputs = tensor.op, self._inputs(tensor)
            if operation.type in {*_QUOTIENTS, "Reciprocal", "Inv"}:
                if is_one_number(inputs[-1]) and (count := self._count(inputs[-1])):
                    return count
                waiting += inputs[:-1]
            elif operation.type == "Mul":
                waiting += inputs
            elif operation.type in _CHOOSING:
                waiting += inputs[1:]
            elif operation.type in BRANCHES:
                waiting += map(self._source, self._results_of(tensor))
            elif operation.type == "Merge":
                waiting += inputs
            elif operation.type == "Mean" and self._has_own_size(inputs[0]):
                return Divisor(inputs[0], True)
            elif operation.type in {*_MOVED, "Mean", "Sum"}:
                waiting += inputs[:1]
        return None

    def _count(self, divisor: tf.Tensor) -> Divisor | None:
        """Returns a divisor that is a sum of weights of examples, or a number of them.

        A norm or a deviation is none, and of one that is trained nothing is known.
        """
        waiting, count = [divisor], None
        for tensor in _each(waiting):
            operation, inputs = tensor.op, self._inputs(tensor)
            if operation.type in _OF_COUNTS:
                waiting += inputs[operation.type in _CHOOSING :]
            elif operation.type in SHAPES:
                if self._has_own_size(inputs[0]):
                    count = count or Divisor(inputs[0], True)
            elif self._is_of_batch(tensor):
                is_sum = operation.type in _ADDING and not _is_of_each_example(tensor)
                if not is_sum or self._is_trained(tensor):
                    return None
                count = Divisor(divisor, False)
        return count

    def _is_of_batch(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is computed from values of the examples."""
        return any(self._is_source(ref.deref()) for ref in self._needs(tensor))

    def _is_trained(self, tensor: tf.Tensor) -> bool:
        trained = {v.op.name for v in tf.compat.v1.trainable_variables()}
        operations = [ref.deref().op for ref in self._needs(tensor)]
        # Nothing tells whether a variable of a function is trained.
        captured = captured_among(operations)
        return any(
            (op.type in VARIABLES and op.name in trained)
            or (op in captured and op.outputs[0].dtype == tf.resource)
            for op in operations
        )

    def _needs(self, tensor: tf.Tensor) -> list:
        """Returns the tensors that a tensor's values are computed from, by reference."""

        def inputs_of(ref) -> list:
            tensor = ref.deref()
            if self._is_source(tensor) or tensor.op.type in {*SHAPES, *_LIKE}:
                return []
            return [other.ref() for other in self._inputs(tensor)]

        return list(walk([tensor.ref()], inputs_of))

    def _has_own_size(self, tensor: tf.Tensor) -> bool:
        """Returns whether the values of the examples decide the number of elements."""
        if is_one_number(tensor):
            return False
        if self._analyze is None:
            return self._is_selected(tensor)
        if tensor.graph is not self._loss.graph:
            return False  # it is not known
        if self._analysis is None:
            operations = data_ancestors([self._loss.op])
            is_needed = any(op.type in _SELECTING for op in operations)
            self._analysis = self._analyze() if is_needed else Analysis(())
        state = self._analysis.state(tensor)
        return state.kind == "entries" and blocks_of(state.of) is None

    def _is_selected(self, tensor: tf.Tensor) -> bool:
        """Returns whether an unknown size comes from an operation that selects elements."""

        def inputs_of(ref) -> list:
            operation = ref.deref().op
            if operation.type in {*_JOINING, *_SELECTING}:
                return []
            inputs = self._inputs(ref.deref())
            return [t.ref() for t in inputs if not t.shape.is_fully_defined()]

        if tensor.shape.is_fully_defined():
            return False
        tensors = [ref.deref() for ref in walk([tensor.ref()], inputs_of)]
        return any(t.op.type in _SELECTING and self._is_of_batch(t) for t in tensors)
