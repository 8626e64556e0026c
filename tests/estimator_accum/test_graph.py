"""Graph traversals: the operations that a fetch runs, the sources of a value."""

import tensorflow as tf

from estimator_accum._graph import data_ancestors, fetched_operations

v1 = tf.compat.v1


def test_a_fetch_is_any_structure_of_what_sessions_take():
    with tf.Graph().as_default() as graph:
        a, b, c = (tf.constant(1.0, name=name) for name in "abc")
        slices = tf.IndexedSlices(b[None], tf.constant([0], name="d"))
        variable = v1.get_variable("v", [], use_resource=True)
        fetches = {"x": [a, "b"], "y": (c.op, slices), "z": variable}
        names = {operation.name for operation in fetched_operations(graph, fetches)}
    assert {"a", "b", "c", "d"} <= names and any(n.startswith("v/") for n in names)


def test_values_come_from_outside_of_branches_and_not_by_control():
    with tf.Graph().as_default():
        a, b, c = (v1.placeholder(tf.float32, [], name) for name in "abc")
        with tf.control_dependencies([c]):
            outer = tf.cond(
                a > 0, lambda: tf.cond(a > 1, lambda: b + 1, lambda: b), lambda: a
            )
            found = {op.name for op in data_ancestors([tf.identity(outer).op])}
        names = []

        def branch():
            inner = b * 2.0
            names.extend(op.name for op in data_ancestors([inner.op]))
            return inner

        tf.cond(a > 0, branch, lambda: a)
    assert {"a", "b"} <= found and "c" not in found
    assert "b" in names and "a" not in names
