"""Gradients with respect to variables that cannot be summed over micro-batches."""

import tensorflow as tf

from estimator_accum.graph.internals import context_of, counts_vectorized
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.microbatch.batch import WholeBatch

# Attribute of an operation that reads a sum of gradients: the name of what they are of.
SUM_OF = "_estimator_accum_sum_of"


def check_outside(graph: tf.Graph, ys: list[tf.Tensor]) -> None:
    """Raises ValueError if a loss is made outside of the model_fn's own graph."""
    for y in ys:
        if is_inside(graph, y):
            raise ValueError(
                "A loss that is made inside of tf.cond, tf.while_loop or a function "
                "must not have its gradients with respect to variables computed "
                f"there: they are summed over micro-batches. Received: {y.name}. "
                "Make the loss outside, or train without micro-batches."
            )


def is_inside(graph: tf.Graph, tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is of a function, branch or loop inside of a graph."""
    return tensor.graph is not graph or context_of(tensor.op) is not None


def check_first_order(ys: list[tf.Tensor]) -> None:
    """Raises ValueError if tensors to derive need sums of gradients."""
    needed = data_ancestors([y.op for y in ys if hasattr(y, "op")])
    name = next((getattr(op, SUM_OF) for op in needed if hasattr(op, SUM_OF)), None)
    if name is not None:
        raise ValueError(
            "A loss, or the primals of tf.autodiff.ForwardAccumulator.jvp, "
            "must not contain gradients with respect to weights: each "
            f"micro-batch knows only its share of them. Received: {ys[0].name}, which "
            f"needs the gradient of {name}. Train without micro-batches."
        )


def check_not_repeated(ys: list[tf.Tensor]) -> None:
    """Raises ValueError if gradients are those of one number after another."""
    for operation in data_ancestors([y.op for y in ys]):
        if counts_vectorized(operation):
            raise ValueError(
                "Gradients with respect to variables must be those of a loss, not "
                "of one number after another, as in `GradientTape.jacobian` and "
                f"`tf.vectorized_map`. Received: {ys[0].name}, which needs "
                f"{operation.name}. Train without micro-batches."
            )


def check_shapes(batch: WholeBatch) -> None:
    """Raises ValueError if a part of the batch has a static number of examples."""
    for part in batch.parts:
        shape = part.sliced.shape
        if part.has_rows and shape.rank and shape.as_list()[0] is not None:
            raise ValueError(
                "A batch that is split must have no static number of examples. "
                f"Received: {part.sliced.name} of shape {shape}. Call "
                "`Tensor.set_shape` with None as the number of examples."
            )


def check_one_replica(loss: tf.Tensor) -> None:
    """Raises ValueError if a loss reads a variable that an optimizer has changed.

    One replica alone may run such a model_fn.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise ValueError(
            "On several replicas a loss must not read a variable that an optimizer of the "
            f"same train op has changed. Received: {loss.name}. Take all gradients before "
            "the first update (tf.gradients, then apply_gradients), or train by "
            "microbatch_step, or on one replica."
        )


def check_replicas(number: int) -> None:
    """Raises ValueError if gradients are not those of a replica with its own batch.

    Args:
        number: Number of batches.
    """
    if tf.distribute.get_replica_context() is None:
        raise ValueError(
            "The gradients of a step must be computed in a replica. Received: a call in "
            "the scope of a strategy. Compute them in a function for `strategy.run`, or "
            "call the step outside of the scope."
        )
    if not tf.distribute.has_strategy():
        return
    replicas = len(tf.distribute.get_strategy().extended.worker_devices)  # of this task
    if number < replicas:
        raise ValueError(
            "Each replica of a step must have a batch of its own. Received: "
            f"number of batches {number}, number of replicas {replicas}. Pass batches of "
            "`strategy.experimental_distribute_dataset`, in the scope of the strategy."
        )
