"""Values of integer tensors, as arrays of sizes."""

import numpy as np
import tensorflow as tf

from estimator_accum.graph.names import SHAPES
from estimator_accum.rows.sizes import (
    ARITHMETIC,
    ONE,
    Size,
    Unknown,
    broadcast_gradient_axes,
    compute,
    product,
    sizes,
)
from estimator_accum.rows.states import OF_SPLITS, Mixed

# Their values are known of a mixed tensor, too.
OF_SHAPE = {*SHAPES, "BroadcastGradientArgs", "BroadcastArgs"}
_WITHOUT_VALUE = {"rows", "entries", "mixed", *OF_SPLITS}


def integer_value(analysis, tensor: tf.Tensor) -> np.ndarray | None:
    """Returns an integer tensor as an array of sizes; None if it is not known."""
    operation = tensor.op
    if not (tensor.dtype.is_integer or tensor.dtype == tf.bool):
        return None
    if analysis.state(tensor).kind in _WITHOUT_VALUE:
        return None
    constant = tf.get_static_value(tensor)
    if constant is not None:
        return sizes(constant) if constant.size <= 64 else None
    if (number := clamped(analysis, operation)) is not None:
        return number
    try:
        if operation.type in ("Shape", "ShapeN"):
            return sizes(analysis.dims(operation.inputs[tensor.value_index]))
        if operation.type == "Size":
            return sizes(product(analysis.dims(operation.inputs[0])))
        if operation.type in ("BroadcastGradientArgs", "BroadcastArgs"):
            return _broadcast_value(analysis, operation, tensor)
        inputs = []
        if operation.type in ARITHMETIC:
            inputs = [analysis.value(tensor) for tensor in operation.inputs]
        if inputs and not any(value is None for value in inputs):
            return compute(operation, inputs)[tensor.value_index]
    except (Mixed, Unknown):
        pass
    kinds = {analysis.state(tensor).kind for tensor in operation.inputs}
    if operation.type in OF_SHAPE and kinds != {"fixed"}:
        return None
    is_fixed = analysis.state(tensor).kind == "fixed"
    if is_fixed and tensor.dtype.is_integer and not kinds & {"sizes", "counts"}:
        return _named(analysis, tensor)
    return None


def computed_from(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns integer tensors from whose values that of a tensor is computed."""
    if tensor.op.type not in ARITHMETIC or not tensor.dtype.is_integer:
        return []
    return [t for t in tensor.op.inputs if t.dtype.is_integer]


def clamped(analysis, operation: tf.Operation) -> np.ndarray | None:
    """Returns a number between bounds that leave no choice; None if there are others.

    tf.minimum(5, tf.maximum(5, number)) = 5, and the same of n
    """
    pair = {"Minimum": "Maximum", "Maximum": "Minimum"}
    if operation.type not in pair or operation.outputs[0].shape.rank != 0:
        return None
    for inner, bound in zip(operation.inputs, reversed(operation.inputs), strict=True):
        outer = analysis.value(bound)
        if outer is None or inner.op.type != pair[operation.type]:
            continue
        for tensor in inner.op.inputs:
            value = analysis.value(tensor)
            if value is not None and np.array_equal(value, outer):
                return outer
            try:
                numbers = value is not None and (int(outer[()]), int(value[()]))
            except Unknown:
                continue
            if not numbers:
                continue
            choice = {"Minimum": min, "Maximum": max}[operation.type]
            if choice(numbers) == numbers[0]:
                return outer
    return None


def _broadcast_value(analysis, operation: tf.Operation, tensor: tf.Tensor):
    """Returns the value of an output of BroadcastGradientArgs or BroadcastArgs."""
    x, y = (analysis.value(tensor) for tensor in operation.inputs)
    if x is None or y is None:
        return None
    if operation.type == "BroadcastArgs":
        length = max(len(x), len(y))
        pairs = [[ONE] * (length - len(shape)) + [*shape] for shape in (x, y)]
        dims = [{*pair} - {ONE} for pair in zip(*pairs, strict=True)]
        if any(len(lengths) > 1 for lengths in dims):
            raise Unknown
        return sizes([(*lengths, ONE)[0] for lengths in dims])
    axes = broadcast_gradient_axes(x, y)
    return sizes(axes[tensor.value_index])


def _named(analysis, tensor: tf.Tensor) -> np.ndarray | None:
    """Returns sizes with names of their own for an integer scalar or vector."""
    name = f"{analysis.path}{tensor.name}"  # the same name may be in each function
    if tensor.shape.rank == 0:
        return sizes(Size(symbols=(name,)))
    number = tensor.shape.num_elements()
    if tensor.shape.rank == 1 and number is not None and number <= 64:
        return sizes([Size(symbols=(f"{name}[{i}]",)) for i in range(number)])
    return None
