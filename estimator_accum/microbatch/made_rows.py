"""Micro-batches' rows of values that are made with the static size of the batch.

    x * tf.zeros([x.shape[0], 8])    x[begin:end] * tf.zeros([N, 8])[begin:end]

Where such a value meets a tensor whose size there is known of the batch alone, both sizes
must be equal, or the step itself fails: outside of functions, branches and loops. So each
row of the value belongs to an example, or to as many rows for each example. An operation
that combines examples gets all rows.

    tf.random.normal([x.shape[0], 8]) @ kernel

A layer takes the micro-batch's rows of random numbers of that size, too, as a generator
does of its noise. Of any numbers that is exact: if rows are combined later, all of them
are collected.

    tf.reshape(x, [N, 4, 2])    tf.reshape(x, [-1, 4, 2])

The elements keep their order, so the second is the same on the whole batch.

N = number of examples in the batch.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from estimator_accum.core.interception import is_interception_off
from estimator_accum.graph.internals import change_inputs, is_recorded
from estimator_accum.graph.names import is_any_draw
from estimator_accum.graph.outermost import in_graph
from estimator_accum.graph.replicas import number_of_replica
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.own_optimizer.head import View
from estimator_accum.microbatch.static_sizes import StaticSizes
from estimator_accum.rows.rules.elementwise import ELEMENTWISE
from estimator_accum.rows.states import FIXED

_ARITHMETIC = {"Add", "AddV2", "Sub", "Mul", "Select"}
_KINDS = {*ELEMENTWISE, *_ARITHMETIC, "ConcatV2", "Pack"}
# Layers, by the place of the input that lists examples.
_LAYERS = {
    **dict.fromkeys(["MatMul", "BatchMatMulV2", "Conv2D", "Conv3D", "Einsum"], 0),
    **dict.fromkeys(["DepthwiseConv2dNative"], 0),
    **dict.fromkeys(["GatherV2", "ResourceGather"], 1),  # along the first axis
    **dict.fromkeys(["Conv2DBackpropInput", "Conv3DBackpropInputV2"], 2),
}


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
        if is_interception_off():
            return tensors
        if kind == "Reshape":
            return [tensors[0], self._target_of(*tensors)]
        if kind in _LAYERS:
            if kind == "GatherV2" and tf.get_static_value(tensors[2]) != 0:
                return tensors
            return self._inputs_of_layer(tensors, _LAYERS[kind])
        if kind not in _KINDS:
            return tensors
        if any(tensor.shape.rank is None for tensor in tensors):
            return tensors
        return [self._rows_of(tensor, tensors) for tensor in tensors]

    def _inputs_of_layer(self, tensors: list, place: int) -> list:
        rows, changed = self._drawn_rows_of(tensors[place]), [*tensors]
        if rows is not tensors[place]:
            changed[place] = rows
            if place == 2:  # a transposed convolution gets its output's size, too
                size = tf.shape(rows, tensors[0].dtype)[:1]
                changed[0] = tf.concat([size, tensors[0][1:]], 0)
        return changed

    def _drawn_rows_of(self, tensor):
        """Returns the rows of random numbers of all examples, others as they are."""
        shape, batch = tensor.shape, self._batch_here()
        if not hasattr(tensor, "op") or not shape.rank or batch is None:
            return tensor
        numbers = [n for other, n in self._numbers() if other is batch]
        if not numbers or shape[0] is None or shape[0] % numbers[0]:
            return tensor
        # A gradient with respect to the numbers themselves needs all of them.
        if is_recorded(tensor) or not any(
            map(is_any_draw, data_ancestors([tensor.op]))
        ):
            return tensor
        rows = self._rows_if_fixed(tensor, 0, batch, shape[0] // numbers[0])
        self._sizes.are_read |= rows is not None  # perhaps by chance a multiple
        return tensor if rows is None else rows

    def _batch_here(self) -> WholeBatch | None:
        """Returns the batch of the replica whose code runs, None if none is known."""
        if len(self._batches) == 1:
            return self._batches[0]
        number = number_of_replica()
        return None if number is None else self._batches[number % len(self._batches)]

    def _target_of(self, tensor, target):
        """Returns the target of a reshape, without the number of examples in the batch."""
        shape, sizes = tensor.shape, tf.get_static_value(target, partial=True)
        if shape.rank is None or None not in shape.as_list() or not np.ndim(sizes):
            return target
        sizes = [None if size is None else int(size) for size in sizes]
        leading = _leading(sizes)
        pairs = [
            (batch, n)
            for batch, n in self._numbers()
            if any(size % n == 0 for size in leading)
        ]
        numbers = [n for _, n in _needed(pairs, tensor)]
        if not numbers:
            return target
        whole, axis = self._sizes.sizes_of(tensor), shape.as_list().index(None)
        changed = _without_number(tensor, axis, whole, sizes, min(numbers))
        if changed is None:
            return target
        self._sizes.are_read = True
        parts = [target[i] if k is None else k for i, k in enumerate(changed)]
        return tf.stack([tf.cast(part, target.dtype) for part in parts])

    def _numbers(self) -> list[tuple[WholeBatch, int]]:
        """Returns the batches whose number of examples is static, with that number."""
        numbers = [(b, self._sizes.number_of(b.parts)) for b in self._batches]
        return [(batch, n) for batch, n in numbers if n not in (None, 0, 1)]

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
        pairs = [(b, n) for b, n in self._numbers() if size % n == 0]
        pairs = _needed(pairs, other)
        if not pairs:
            return None
        batch, number = pairs[0]
        if self._sizes.sizes_of(other)[place] != size:
            return None  # by chance a multiple
        self._sizes.are_read = True
        return self._rows_if_fixed(tensor, axis, batch, size // number)

    def _rows_if_fixed(self, tensor, axis: int, batch: WholeBatch, span: int):
        """Returns `span` rows for each example, None if `_is_fixed` is not so."""
        tensor = in_graph(tensor)
        key = tensor.ref(), axis, batch.begin.ref()
        if key not in self._are_fixed:
            self._are_fixed[key] = _is_fixed(tensor, axis, batch)
        if not self._are_fixed[key]:
            return None
        # Not kept: a tape sees the slices that are made while it watches.
        rows = batch.take_rows(tensor, axis, span)
        self._sizes.add([rows], [tensor])
        return rows


def _needed(pairs: list, tensor: tf.Tensor) -> list:
    """Returns those (batch, ...) that a tensor is computed from."""
    needed = data_ancestors([tensor.op]) if pairs else ()
    return [(batch, n) for batch, n in pairs if batch.begin.op in needed]


def _leading(target: list) -> list[int]:
    """Returns a reshape's known sizes before others, but the last, which layers need."""
    leading = itertools.takewhile(lambda size: size and size > 0, target)
    return list(leading)[: max(1, len(target) - 1)]


def _without_number(
    tensor, axis: int, whole: list, target: list, number: int
) -> list | None:
    """Returns a reshape's target with a micro-batch's size where it has the batch's.

    Args:
        tensor: The tensor that is reshaped.
        axis: Its axis of rows.
        whole: Its sizes in the batch, None where they are not known.
        target: The target's sizes, None where they are not known, -1 for the rest.
        number: The number of examples.

    Returns: Sizes, None where they are not known; None if none of them is the batch's.
    """
    if 0 in [*whole, *target]:
        return None  # of which TensorFlow infers no size
    rows, before = whole[axis], math.prod(whole[:axis])
    places = [
        place
        for place, size in enumerate(_leading(target))
        if math.prod(target[:place]) == before and size % number == 0
    ]
    if not places or rows is None or rows % number:
        return None
    (place,), new = places, list(target)
    if target[place] == rows:
        new[place] = tf.shape(tensor)[axis]
        return new
    if None in [*whole, *target]:
        return None
    rest, others = math.prod(whole), math.prod(size for size in target if size != -1)
    if rest % others or (-1 not in target and rest != others):
        return None  # TensorFlow refuses it
    if -1 in target:
        new[target.index(-1)] = rest // others
    new[place] = -1
    return new


def _is_fixed(tensor: tf.Tensor, axis: int, batch: WholeBatch) -> bool:
    """Returns whether micro-batches may take rows: all have the same, and no training.

    The rows of one that is trained may be alike.
    """
    if View(batch, [tensor]).state(tensor) != FIXED:
        return False
    needed = data_ancestors(
        [tensor.op], lambda operation: filter(_derives, operation.inputs)
    )
    is_trained = any(t.dtype == tf.resource for op in needed for t in op.outputs)
    return not is_trained or _is_repeated(tensor, axis)


def _is_repeated(tensor: tf.Tensor, axis: int) -> bool:
    """Returns whether a tensor is one row, many times, such as a token's."""
    if tensor.op.type not in ("BroadcastTo", "Tile"):
        return False
    row = tensor.op.inputs[0].shape
    return row.rank == tensor.shape.rank and row[axis] == 1


def _derives(tensor: tf.Tensor) -> bool:
    """Returns whether gradients flow through a tensor, or it is a variable's handle."""
    dtype = tensor.dtype
    return dtype.is_floating or dtype.is_complex or dtype == tf.resource
