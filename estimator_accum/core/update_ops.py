"""Operations that run with every micro-step."""

import tensorflow as tf

from estimator_accum.core.options import Options
from estimator_accum.graph.internals import replica_of


def update_ops_of(options: Options) -> list[tf.Operation]:
    """Returns the operations of every micro-step: batch normalization's averages."""
    if options.update_ops is not None:
        return options.update_ops
    graph = tf.compat.v1.get_default_graph()
    if graph.building_function:
        return []  # inside a caller's tf.cond; they belong outside
    updates = graph.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return updates
    # The replicas of a process share the collection, and each has its own micro-batch.
    replica = replica_of(f"{graph.get_name_scope()}/")
    return [update for update in updates if replica_of(update.name) == replica]
