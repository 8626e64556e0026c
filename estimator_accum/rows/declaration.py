"""Attributes by which an operation declares the rows of its results."""

import tensorflow as tf

from estimator_accum.rows.sizes import ONE

# Attribute of an operation whose rows are declared: their number for each example.
ROWS_ATTRIBUTE = "_estimator_accum_per_example"
# Attribute of an operation that computes moments by which rows of a micro-batch are
# normalized: the same for all of them.
MOMENTS_ATTRIBUTE = "_estimator_accum_moments"
# Attribute of an operation that adds rows which the last examples may be without.
ADDED_ATTRIBUTE = "_estimator_accum_added_rows"


def per_example(tensor: tf.Tensor) -> tf.Tensor:
    """Declares that each row of a tensor is computed from its own example alone.

        scores = per_example(tf.numpy_function(score, [texts], tf.float32))

    For Python functions and operations of other libraries, which `microbatch_model_fn`
    cannot analyse. Without it they are computed once, on the whole batch, with all
    later operations.

    Args:
        tensor: A Tensor with one row for each example along its first axis.

    Returns:
        The same values.

    Raises:
        ValueError: If the tensor has no axis.
    """
    tensor = tf.identity(tensor)
    if tensor.shape.rank == 0:
        raise ValueError(
            "`tensor` must have one row for each example along its first axis. "
            f"Received: {tensor.name}, a scalar. Declare the tensor that it is computed "
            "from."
        )
    setattr(tensor.op, ROWS_ATTRIBUTE, ONE)
    return tensor
