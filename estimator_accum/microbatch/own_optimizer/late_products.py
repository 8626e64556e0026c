"""Products behind the sum over examples, on the way to a variable's gradient.

    x @ (a @ b)    d (a @ b) = sum over examples,  d a = d (a @ b) @ transposed b

An accelerator rounds the factors of products, so a product of sums is not quite the sum
of products. Such a gradient tells less than the sums that it is computed from.

No static shape contains the number of examples, so what has a static shape has no rows.
"""

import tensorflow as tf

from estimator_accum.graph.functions import graphs_called
from estimator_accum.graph.names import CALLERS
from estimator_accum.graph.walks import data_descendants

_PRODUCTS = ("BatchMatMul", "Conv", "Depthwise", "Einsum", "MatMul", "SparseMatMul")


def factors_of_late_products(parts: list[tf.Tensor]) -> list[tf.Tensor] | None:
    """Returns the sums over examples that products compute a gradient from.

    Args:
        parts: The tensors of the gradient.

    Returns:
        The first products' factors, but those within functions; None if there is no
        such product.
    """
    sums, between, seen, waiting = [], {}, set(), list(parts)
    while waiting:
        tensor = waiting.pop()
        if tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        if all(map(_has_static_shape, tensor.op.inputs)):
            between[tensor.op] = None
            waiting += [t for t in tensor.op.inputs if t.dtype.is_floating]
        elif tensor.dtype.is_floating and _has_static_shape(tensor):
            sums.append(tensor)
    behind = data_descendants(sums, between.__contains__)
    products = {op for op in behind if op.type.startswith(_PRODUCTS)}
    if not products and not any(map(_is_product_in_function, sums)):
        return None
    results = [output for op in products for output in op.outputs]
    late = products | data_descendants(results, between.__contains__)
    early = {tensor.op for tensor in sums} | behind - late
    return [t for op in between if op in products for t in op.inputs if t.op in early]


def _is_product_in_function(tensor: tf.Tensor) -> bool:
    """Returns whether a function, branch or loop computes a result so."""
    operation = tensor.op
    if operation.type not in CALLERS:
        return False
    return any(
        factors_of_late_products([graph.outputs[tensor.value_index]]) is not None
        for graph in graphs_called(operation)
        if tensor.value_index < len(graph.outputs)
    )


def _has_static_shape(tensor: tf.Tensor) -> bool:
    is_number = tensor.dtype.is_floating or tensor.dtype.is_complex
    return not is_number or tensor.shape.is_fully_defined()
