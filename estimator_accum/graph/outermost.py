"""Values that are kept with a graph, the outermost one of a branch or function."""

import tensorflow as tf


def value_of_graph(graph: tf.Graph, name: str, default):
    """Returns a graph's value under a name, `default` from the first call on."""
    if not hasattr(graph, name):
        setattr(graph, name, default)
    return getattr(graph, name)


def mark_graph(graph: tf.Graph, name: str) -> None:
    """Marks a graph under a name, for `has_mark`."""
    setattr(graph, name, True)


def has_mark(graph: tf.Graph, name: str) -> bool:
    """Returns whether a graph was marked under a name."""
    return hasattr(graph, name)


def outermost_graph() -> tf.Graph:
    """Returns the graph in which the default graph is a branch's or a function's."""
    with tf.init_scope():
        return tf.compat.v1.get_default_graph()
