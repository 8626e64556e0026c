"""Operations that run with every micro-step."""

import logging

import tensorflow as tf

from estimator_accum.core.current_batch import current_batch
from estimator_accum.core.options import Options
from estimator_accum.graph.internals import replica_of
from estimator_accum.graph.outermost import value_of_graph

_TAKEN = "_estimator_accum_update_ops"  # attribute of a graph: their names
_logger = logging.getLogger("tensorflow.estimator_accum")


def update_ops_of(options: Options) -> list[tf.Operation]:
    """Returns the operations of every micro-step: batch normalization's averages."""
    if options.update_ops is not None:
        return options.update_ops
    graph = tf.compat.v1.get_default_graph()
    if graph.building_function:
        return []  # inside a caller's tf.cond; they belong outside
    updates = graph.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        # The replicas of a process share it, and each has its own micro-batch.
        replica = replica_of(f"{graph.get_name_scope()}/")
        updates = [update for update in updates if replica_of(update.name) == replica]
    if current_batch() is None:  # else all train ops run together
        _warn_of_shared(graph, [update.name for update in updates])
    return updates


def _warn_of_shared(graph: tf.Graph, names: list[str]) -> None:
    taken = value_of_graph(graph, _TAKEN, set())
    shared = [name for name in names if name in taken]
    if shared:
        _logger.warning(
            "UPDATE_OPS run with each of several train ops, so twice unless both are in "
            "one session.run. Received: %s. If they are those of another network, pass "
            "`update_ops` to each train op.",
            shared[0],
        )
    taken.update(names)
