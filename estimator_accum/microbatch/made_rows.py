"""Micro-batches' rows of values that are made with the static size of the batch.

    x * tf.zeros([x.shape[0], 8])    x[begin:end] * tf.zeros([N, 8])[begin:end]

Where such a value meets a tensor whose size there is known of the batch alone, both sizes
must be equal, or the step itself fails: outside of functions, branches and loops. So each row of the value belongs to an example, or
to as many rows for each example. An operation that combines examples gets all rows.

N = number of examples in the batch.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from estimator_accum.core.interception import is_interception_off
from estimator_accum.graph.internals import change_inputs
from estimator_accum.graph.outermost import in_graph
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.own_optimizer.head import View
from estimator_accum.microbatch.static_sizes import StaticSizes
from estimator_accum.rows.rules.elementwise import ELEMENTWISE
from estimator_accum.rows.states import FIXED

_ARITHMETIC = {"Add", "AddV2", "Sub", "Mul", "Select"}
_KINDS = {*ELEMENTWISE, *_ARITHMETIC, "ConcatV2", "Pack"}


@contextlib.contextmanager
def taking_rows(batches: list[WholeBatch], sizes: StaticSizes) -> Iterator[None]:
    """Has new operations of the default graph take a micro-batch's rows of such values.

    Args:
        batches: The batch of each replica.
        sizes: The static sizes of the graph.
    """
    rows = _Rows(batches, sizes)
    with change_inputs(tf.compat.v1.get_default_graph(), rows.take):
        yield


class _Rows:
    def __init__(self, batches: list[WholeBatch], sizes: StaticSizes):
        self._batches, self._sizes, self._are_fixed = batches, sizes, {}

    def take(self, kind: str, tensors: list) -> list:
        """Returns the inputs for an operation of a type."""
        # Gradients derive operations that have taken rows.
        if kind not in _KINDS or is_interception_off():
            return tensors
        if any(tensor.shape.rank is None for tensor in tensors):
            return tensors
        return [self._rows_of(tensor, tensors) for tensor in tensors]

    def _rows_of(self, tensor, others: list):
        """Returns the rows of a value that meets others, aligned from the right."""
        shape = tensor.shape.as_list()
        for place in range(-len(shape), 0):
            if shape[place] in (None, 1):
                continue
            for other in others:
                sizes = other.shape.as_list()
                if len(sizes) >= -place and sizes[place] is None:
                    rows = self._slice(tensor, len(shape) + place, other, place)
                    if rows is not None:
                        return rows
        return tensor

    def _slice(self, tensor, axis: int, other, place: int) -> tf.Tensor | None:
        """Returns rows along an axis that meets an axis of another tensor, or None."""
        size = tensor.shape.as_list()[axis]
        numbers = [(b, self._sizes.number_of(b.parts)) for b in self._batches]
        pairs = [(b, n) for b, n in numbers if n not in (None, 0, 1) and size % n == 0]
        needed = data_ancestors([other.op]) if pairs else ()
        pairs = [(batch, number) for batch, number in pairs if batch.begin.op in needed]
        if not pairs:
            return None
        batch, number = pairs[0]
        are_read = self._sizes.are_read
        try:
            is_same = self._sizes.of(other)[place] == size
        except ValueError:  # it cannot be inferred
            is_same = False
        if not is_same:
            self._sizes.are_read = are_read  # by chance a multiple
            return None
        tensor = in_graph(tensor)
        key = tensor.ref(), batch.begin.ref()
        if key not in self._are_fixed:
            self._are_fixed[key] = _is_fixed(tensor, batch)
        if not self._are_fixed[key]:
            return None
        # Not kept: a tape sees the slices that are made while it watches.
        rows = batch.take_rows(tensor, axis, size // number)
        self._sizes.add([rows], [tensor])
        return rows


def _is_fixed(tensor: tf.Tensor, batch: WholeBatch) -> bool:
    """Returns whether a tensor is the same for all micro-batches, and not trained."""
    if View(batch, [tensor]).state(tensor) != FIXED:
        return False
    needed = data_ancestors(
        [tensor.op], lambda operation: filter(_derives, operation.inputs)
    )
    return not any(t.dtype == tf.resource for op in needed for t in op.outputs)


def _derives(tensor: tf.Tensor) -> bool:
    """Returns whether gradients flow through a tensor, or it is a variable's handle."""
    dtype = tensor.dtype
    return dtype.is_floating or dtype.is_complex or dtype == tf.resource
