"""Products of float32 in fewer digits, as accelerators compute them.

    product(round(a), round(b)), for each shape of a and b rounded in another way

TensorFlow multiplies float32 in TF32 on GPUs, and its code depends on the sizes: products
of one example and of four differ as much as if one of them was rounded in another way.
"""

import tensorflow as tf

from estimator_accum.graph.internals import set_input

# Digits of the mantissa behind the first one; the last is float32 itself, whose sums have
# another order for each size.
DIGITS = {"TF32": 10, "bfloat16": 7, "another order": 22}
_FLOAT32_DIGITS = 23
_PRODUCTS = {
    *("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul"),
    *("Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput"),
}


def round_products(graph: tf.Graph, digits: int) -> int:
    """Rewrites the products of a graph, but those of fingerprints; returns their number.

    A GPU computes fingerprints in float64.
    """
    products = [
        operation
        for operation in graph.get_operations()
        if operation.type in _PRODUCTS and "/fingerprint" not in operation.name
    ]
    for operation in products:
        with tf.control_dependencies(None), tf.name_scope("rounded"):
            inputs = [*operation.inputs]
            factor = _factor_of([t for t in inputs if t.dtype == tf.float32], digits)
            for place, tensor in enumerate(inputs):
                if tensor.dtype == tf.float32:
                    rounded = _round(tensor * factor, digits) / factor
                    set_input(operation, place, rounded)
    return len(products)


def _factor_of(tensors: list[tf.Tensor], digits: int) -> tf.Tensor:
    """Returns a number near 1, by whose product another digit is the last one."""
    sizes = tf.concat([tf.shape(tensor) for tensor in tensors], 0)
    places = tf.range(1, tf.size(sizes) + 1)
    seed = tf.stack([tf.reduce_sum(sizes * places * places), 7])
    return 1 + tf.random.stateless_uniform([], seed, -0.5, 0.5) * 2.0**-digits


def _round(value: tf.Tensor, digits: int) -> tf.Tensor:
    unit = 2 ** (_FLOAT32_DIGITS - digits)
    bits = tf.bitcast(value, tf.int32) + unit // 2
    return tf.bitcast(tf.bitwise.bitwise_and(bits, -unit), tf.float32)
