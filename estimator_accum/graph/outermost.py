"""The outermost graph of a branch or function, and values that are kept with a graph."""

import tensorflow as tf


def value_of_graph(graph: tf.Graph, name: str, default):
    """Returns what a graph holds under a name, `default` from the first call on."""
    if not hasattr(graph, name):
        setattr(graph, name, default)
    return getattr(graph, name)


def outermost_graph() -> tf.Graph:
    """Returns the graph in which the default graph is a branch's or a function's."""
    with tf.init_scope():
        return tf.compat.v1.get_default_graph()
