"""Values that are kept with a graph, the outermost one of a branch or function."""

import tensorflow as tf

from estimator_accum.graph.internals import outer_graph_of


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


def in_graph(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor of the default graph that stands for one of eager execution.

    Such as the handle of a variable. In functions inside of a traced one it is that of
    the outermost function.
    """
    if hasattr(tensor, "op"):  # an eager tensor has none
        return tensor
    return outermost_function().capture(tensor)


def outermost_function() -> tf.Graph:
    """Returns the graph of the traced function around the default graph, or that graph."""
    graph = tf.compat.v1.get_default_graph()
    outer = outer_graph_of(graph)
    while outer is not None and outer.building_function:
        graph, outer = outer, outer_graph_of(outer)
    return graph


def outermost_graph() -> tf.Graph:
    """Returns the graph in which the default graph is a branch's or a function's."""
    with tf.init_scope():
        return tf.compat.v1.get_default_graph()
