"""Number of examples in a Keras micro-batch.

`fit` passes no batch to the optimizer, but the graph of its step has what the gradients
are computed from.
"""

import tensorflow as tf

from estimator_accum.core.gradients import Gradient
from estimator_accum.core.linear import parts_of
from estimator_accum.graph.functions import captured_among
from estimator_accum.graph.names import BATCHES
from estimator_accum.graph.walks import data_ancestors

UNKNOWN = -1


def number_of_examples(gradients: list[Gradient]) -> tf.Tensor:
    """Returns the number of examples, int64; -1 if it is unknown.

    Args:
        gradients: Gradients of a traced function, or of eager execution.
    """
    graph = tf.compat.v1.get_default_graph()
    unknown = tf.constant(UNKNOWN, tf.int64)
    if tf.executing_eagerly():
        return unknown
    # Not of variables and of values from outside, which may be gradients too.
    parts = [part for gradient in gradients for part in parts_of(gradient)]
    parts = [part for part in parts if getattr(part, "graph", None) is graph]
    needed = data_ancestors([t.op for t in parts])
    fed = [op for op in needed if op.type in {*BATCHES, "Placeholder"}]
    captured = captured_among(fed)
    fed = [operation for operation in fed if operation not in captured]
    inputs = [tensor for operation in fed for tensor in operation.outputs]
    inputs = [t for t in inputs if t.shape.rank and not _is_handle(t)]
    if not inputs:
        return unknown
    sizes = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in inputs])
    is_one = tf.reduce_all(tf.equal(sizes, sizes[0]))
    return tf.where(is_one, sizes[0], unknown)


def _is_handle(tensor: tf.Tensor) -> bool:
    return tensor.dtype in (tf.resource, tf.variant)
