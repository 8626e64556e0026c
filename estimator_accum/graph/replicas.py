"""Values of all replicas of a strategy."""

import tensorflow as tf


def first_of(strategy, values):
    """Returns one replica's value of `values`, which are equal in all replicas."""
    return strategy.experimental_local_results(values)[0]


def flatten(strategy, values) -> list:
    """Returns every replica's values in one list, from any structure."""
    per_value = tf.nest.map_structure(strategy.experimental_local_results, values)
    return tf.nest.flatten(per_value)
