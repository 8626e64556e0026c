"""Operations that run with every micro-step."""

import re

import tensorflow as tf

from estimator_accum.core.options import Options


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
    own = _replica_of(f"{graph.get_name_scope()}/")
    return [update for update in updates if _replica_of(update.name) == own]


def _replica_of(name: str) -> str | None:
    """Returns the number of the replica that has made an operation; None: the first."""
    found = re.search(r"(?:^|/)replica_(\d+)/", name)
    return found and found[1]
