"""Seeds for TensorFlow's stateless random operations, one for each micro-batch."""

import zlib

import tensorflow as tf

from estimator_accum.core.current_batch import current_batch
from estimator_accum.graph.outermost import value_of_graph
from estimator_accum.graph.variables import find_global_step

_ATTRIBUTE = "_estimator_accum_micro_batch_number"
_MOST_EXAMPLES = 2**24  # of a batch that is cut, so that no two numbers are equal


def micro_batch_seed(name: str) -> tf.Tensor:
    """Returns the seed of a random operation in the current micro-batch.

        noise = tf.random.stateless_normal(shape, seed=micro_batch_seed("noise"))

    The seed depends only on the graph's own seed (`tf_random_seed` of the RunConfig), on
    `name`, on global_step, on the replica, and on the place of the micro-batch in a
    batch of `microbatch_model_fn`. So a run that is stopped and resumed draws the
    numbers of the undisturbed run, even if the rest of the graph has changed.

    Args:
        name: Name of the operation; two operations with one name draw the same numbers.

    Returns:
        int64 Tensor [2].

    Raises:
        ValueError: If the graph has no global step.
    """
    return _named(name, _micro_batch_number(current_batch()))


def batch_seed(name: str) -> tf.Tensor:
    """Returns a seed that all micro-batches of a batch share; see `micro_batch_seed`."""
    return _named(name, _micro_batch_number(None))


def _named(name: str, number: tf.Tensor) -> tf.Tensor:
    seed, _ = tf.compat.v1.get_seed(0)
    named = zlib.crc32(f"{seed}/{name}".encode())
    return tf.stack([tf.constant(named, tf.int64), number])


def _micro_batch_number(batch) -> tf.Tensor:
    """Returns a scalar int64 that no two micro-batches of a run share.

    Args:
        batch: The batch that is cut; None if there is none.
    """
    graph = tf.compat.v1.get_default_graph()
    replica = tf.distribute.get_replica_context()
    number, count = 0, 1
    if replica is not None:
        number, count = replica.replica_id_in_sync_group, replica.num_replicas_in_sync
    numbers = value_of_graph(graph, _ATTRIBUTE, {})
    key = (batch, getattr(number, "name", number))
    if key not in numbers:
        with tf.control_dependencies(None):
            serial = _global_step() * count + tf.cast(number, tf.int64)
            if batch is not None:
                serial = serial * _MOST_EXAMPLES + batch.begin
        numbers[key] = serial
    return numbers[key]


def _global_step() -> tf.Tensor:
    step = find_global_step()
    if step is None:
        raise ValueError(
            "The seed of a micro-batch must come from a global step. Received: a graph "
            "without one. Call tf.compat.v1.train.get_or_create_global_step() first."
        )
    return tf.identity(tf.cast(step, tf.int64))
