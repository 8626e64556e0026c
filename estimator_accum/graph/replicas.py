"""Values of all replicas of a strategy."""

import tensorflow as tf


def first_of(strategy, values):
    """Returns one replica's value of `values`, which are equal in all replicas."""
    return strategy.experimental_local_results(values)[0]


def flatten(strategy, values) -> list:
    """Returns every replica's values in one list, from any structure."""
    per_value = tf.nest.map_structure(strategy.experimental_local_results, values)
    return tf.nest.flatten(per_value)


def in_each_replica(function, number: int) -> list:
    """Returns function(i) for each of `number` replicas, called in replica i.

    Outside of a strategy, or in a replica, there is one.
    """
    if not (tf.distribute.has_strategy() and tf.distribute.in_cross_replica_context()):
        return [function(0)]
    results = [None] * number

    @tf.autograph.experimental.do_not_convert
    def run() -> None:
        place = number_of_replica() % number
        results[place] = function(place)

    tf.distribute.get_strategy().run(run)
    return results


def number_of_replica() -> int | None:
    """Returns the number of the replica whose code runs, None if it is not known."""
    context = tf.distribute.get_replica_context()
    if context is None:
        return None
    number = tf.get_static_value(context.replica_id_in_sync_group)
    return None if number is None else int(number)


def distributed(values: list):
    """Returns one value of a list to each replica."""
    strategy = tf.distribute.get_strategy()
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group % len(values)]
    )
