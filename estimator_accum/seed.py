"""Seeds for TensorFlow's stateless random operations, one for each micro-batch."""

import secrets
import zlib

import tensorflow as tf

from estimator_accum.checks.before_runs import note_draws
from estimator_accum.core.current_batch import current_batch
from estimator_accum.graph.outermost import (
    outermost_function,
    outermost_graph,
    value_of_graph,
)
from estimator_accum.graph.variables import find_global_step

# Attributes of a graph.
_NUMBERS, _START = "_estimator_accum_micro_batch_number", "_estimator_accum_start"
_NUMBER = "_estimator_accum_batch_number"
_MOST_EXAMPLES = 2**24  # of a batch that is split, so that no two numbers are equal
_MOST_NAMES = 2**32


def micro_batch_seed(name: str) -> tf.Tensor:
    """Returns the seed of a random operation in the current micro-batch.

        noise = tf.random.stateless_normal(shape, seed=micro_batch_seed("noise"))

    The seed depends only on the graph's own seed (`tf_random_seed` of the RunConfig), on
    `name`, on global_step, on the replica, and on the place of the micro-batch in a
    batch of `microbatch_model_fn`. So a run that is stopped and resumed draws the
    numbers of the undisturbed run, even if the rest of the graph has changed. A graph
    without a seed draws other numbers at each start, as TensorFlow's random operations
    do.

    Args:
        name: Name of the operation; two operations with one name draw the same numbers.

    Returns:
        int64 Tensor [2].

    Raises:
        ValueError: If the graph has no global step.
    """
    is_seeded = tf.compat.v1.get_default_graph().seed is not None
    return _named(name, is_seeded, current_batch())


def seed_of_draw(operation: tf.Operation, *, is_shared: bool) -> tf.Tensor:
    """Returns the seed of a stateless operation in place of one with a state.

    Args:
        operation: The operation that draws from a state.
        is_shared: Whether all micro-batches of a batch draw the same numbers.
    """
    seeds = operation.get_attr("seed"), operation.get_attr("seed2")
    # As TensorFlow does: two operations of equal seeds draw the same numbers.
    parts = seeds if any(seeds) else (operation.name, *seeds)
    name = "/".join(map(str, parts))
    return _named(name, any(seeds), None if is_shared else current_batch())


def _named(name: str, is_seeded: bool, batch) -> tf.Tensor:
    """Returns the seed of a name.

    Args:
        name: The name.
        is_seeded: Whether each start draws the same numbers.
        batch: The batch, whose micro-batches draw different numbers; None if they draw
            the same ones, or no batch is split.
    """
    if is_seeded:
        seed, _ = tf.compat.v1.get_seed(0)
    else:
        tf.compat.v1.get_seed(None)  # raises where all numbers must have a seed
        graph = outermost_graph() if _number() is None else outermost_function()
        seed = value_of_graph(graph, _START, secrets.randbits(64))
    named = tf.constant(zlib.crc32(f"{seed}/{name}".encode()), tf.int64)
    if current_batch() is not None and _number() is None:
        with tf.init_scope():
            repeats = current_batch().repeats(_global_step())
        named += repeats * _MOST_NAMES
    return tf.stack([named, _micro_batch_number(batch)])


def _micro_batch_number(batch) -> tf.Tensor:
    """Returns a scalar int64 that no two micro-batches share while global_step moves.

    Args:
        batch: The batch that is split; None if there is none.
    """
    graph = tf.compat.v1.get_default_graph()
    replica = tf.distribute.get_replica_context()
    number, count = 0, 1
    if replica is not None:
        number, count = replica.replica_id_in_sync_group, replica.num_replicas_in_sync
    numbers = value_of_graph(graph, _NUMBERS, {})
    key = (batch, getattr(number, "name", number))
    if key not in numbers:
        with tf.control_dependencies(None):
            serial = _global_step() * count + tf.cast(number, tf.int64)
            if batch is not None:
                serial = serial * _MOST_EXAMPLES + batch.begin
        numbers[key] = serial
        if _number() is None:  # else each batch has another one
            note_draws(outermost_graph(), serial)
    return numbers[key]


def number_batches(number: tf.Tensor) -> None:
    """Has the default graph's seeds come from a batch's number, not from global_step."""
    value_of_graph(outermost_function(), _NUMBER, number)


def _number() -> tf.Tensor | None:
    return getattr(outermost_function(), _NUMBER, None)


def _global_step() -> tf.Tensor:
    step = _number()
    if step is None:
        step = find_global_step()
    if step is None:
        raise ValueError(
            "The seed of a micro-batch must come from a global step. Received: a graph "
            "without one. Call tf.compat.v1.train.get_or_create_global_step() first."
        )
    return tf.identity(tf.cast(step, tf.int64))
