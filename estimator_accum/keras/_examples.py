"""Number of examples that count alike in a Keras micro-batch.

`fit` passes no batch to the optimizer, but the graph of its step has what the gradients
are computed from.
"""

import tensorflow as tf

from estimator_accum.core.gradients import Gradient
from estimator_accum.core.linear import parts_of
from estimator_accum.graph.functions import captured_among
from estimator_accum.graph.names import BATCHES
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.loss_sums import may_be_sum, terms_of

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
    inputs = [t for t in _batch_of([t.op for t in parts]) if t.shape.rank]
    if not inputs:
        return unknown
    sizes = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in inputs])
    is_one = tf.reduce_all(tf.equal(sizes, sizes[0]))
    return tf.where(is_one, sizes[0], unknown)


def is_sum_over_examples(loss: tf.Tensor) -> bool:
    """Returns whether a loss provably is a sum over the examples, times a constant.

    Such as tf.nn.compute_average_loss(losses, global_batch_size=32): each micro-batch
    counts by its examples.

    Args:
        loss: The loss of a micro-batch, in the graph of a function.
    """
    inputs = _batch_of([loss.op])
    rows = [t for t in inputs if t.shape.rank and t.shape.as_list()[0] is None]
    if not rows or not may_be_sum(loss, lambda op: bool(_batch_of([op]))):
        return False  # a constant may be the number of examples, if that is static
    analysis = Analysis(rows, inputs)
    analysis.analyze([loss])
    terms = terms_of(analysis, loss)
    return bool(terms) and all(term and None not in term.factors for term in terms)


def _batch_of(operations: list[tf.Operation]) -> list[tf.Tensor]:
    """Returns the tensors of the batch that operations compute from."""
    needed = data_ancestors(operations)
    fed = [op for op in needed if op.type in {*BATCHES, "Placeholder"}]
    captured = captured_among(fed)
    fed = [operation for operation in fed if operation not in captured]
    inputs = [tensor for operation in fed for tensor in operation.outputs]
    return [t for t in inputs if t.dtype not in (tf.resource, tf.variant)]
