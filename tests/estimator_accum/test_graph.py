"""Walks through graphs, branches without captures, zeros that take no memory."""

import os
import sys

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import make_accumulating_train_op
from estimator_accum.graph import functions, handles, writers
from estimator_accum.graph.branches import either, run_either
from estimator_accum.graph.variables import idle_zeros
from estimator_accum.graph.walks import (
    control_inputs_of,
    data_ancestors,
    fetched_operations,
)
from tests.helpers.models.interfaces import sgd, start_session
from tests.helpers.processes import running

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
            ancestors = {op.name for op in data_ancestors([tf.identity(outer).op])}
        names = []

        def branch():
            inner = b * 2.0
            names.extend(op.name for op in data_ancestors([inner.op]))
            return inner

        tf.cond(a > 0, branch, lambda: a)
    assert {"a", "b"} <= ancestors and "c" not in ancestors
    assert "b" in names and "a" not in names


def _graph(build, predicate):
    with tf.Graph().as_default():
        options = {"initializer": 0.0, "use_resource": True}
        counts = [v1.get_variable(name, **options) for name in "ab"]
        fed = v1.placeholder(tf.bool, [])
        result = build(fed, counts)
        with start_session() as session:
            return session.run(result, {fed: predicate}), session.run(counts)


def _eager(build, predicate, wrap=lambda function: function):
    counts = [tf.Variable(0.0) for _ in "ab"]
    result = wrap(lambda fed: build(fed, counts))(tf.constant(predicate))
    return result.numpy(), [count.numpy() for count in counts]


def _function(build, predicate):
    return _eager(build, predicate, tf.function)


@pytest.mark.parametrize("predicate", [True, False])
@pytest.mark.parametrize("run", [_graph, _function, _eager])
def test_one_branch_runs_and_returns_its_values(run, predicate):
    def add(count):
        with tf.control_dependencies([count.assign_add(1.0)]):
            return [tf.constant(2.0), tf.constant([1, 2, 3])]

    def build(fed, counts):
        a, b = counts
        floats, integers = either(fed, lambda: add(a), lambda: add(b))
        return floats + tf.cast(tf.reduce_sum(integers), tf.float32)

    assert run(build, predicate) == (8.0, [1.0, 0.0] if predicate else [0.0, 1.0])


@pytest.mark.parametrize("predicate", [True, False])
@pytest.mark.parametrize("run", [_graph, _function, _eager])
def test_what_comes_after_waits_for_the_branch_that_runs(run, predicate):
    def build(fed, counts):
        a, b = counts
        done = run_either(fed, lambda: [a.assign_add(1.0)], lambda: [b.assign_add(1.0)])
        with tf.control_dependencies([] if done is None else [done]):
            return a.read_value() + 10.0 * b.read_value()

    expected = (1.0, [1.0, 0.0]) if predicate else (10.0, [0.0, 1.0])
    assert run(build, predicate) == expected


def test_a_branch_in_a_branch_runs_only_with_it():
    def build(fed, counts):
        a, b = counts

        def inner():
            return [run_either(tf.constant(True), lambda: [a.assign_add(1.0)], list)]

        done = run_either(fed, inner, lambda: [b.assign_add(1.0)])
        with tf.control_dependencies([done]):
            return a.read_value() + 10.0 * b.read_value()

    assert _graph(build, True)[0] == 1.0
    assert _graph(build, False)[0] == 10.0


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip_micro_batch", "skip_window"])
def test_boundary_is_the_only_cond_of_a_train_op(on_nonfinite):
    with tf.Graph().as_default() as graph:
        x = v1.get_variable("x", [3])
        y = v1.get_variable("y", [2])
        loss = tf.reduce_sum(x) ** 2 + tf.reduce_sum(y) ** 2
        make_accumulating_train_op(loss, sgd(), 4, on_nonfinite=on_nonfinite)
        kinds = [operation.type for operation in graph.get_operations()]
    assert sum(kind in ("If", "StatelessIf") for kind in kinds) == 1


# On a CPU a sparse accumulator takes memory only for touched rows.
_ROWS, _WIDTH = 30_000, 1_024
_TABLE_BYTES = 4 * _ROWS * _WIDTH


def _resident_bytes() -> int:
    """Returns resident bytes without mapped files: libraries load as they are used."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def _bytes_of_accumulating() -> int:
    """Trains an embedding table for two windows, with two rows per micro-step.

    Returns:
        Bytes that the process takes, without TensorFlow's import and the table.
    """
    before = _resident_bytes()
    with tf.Graph().as_default(), v1.Session() as session:
        ids = v1.placeholder(tf.int32, [2])
        # A stateful initializer, which the session cannot fold into a constant and
        # keep.
        table = v1.get_variable(
            "table", initializer=lambda: tf.random.uniform([_ROWS, _WIDTH])
        )
        loss = tf.reduce_mean(tf.square(tf.gather(table, ids)))
        train_op = make_accumulating_train_op(loss, sgd(0.1), 3)
        session.run(v1.global_variables_initializer())
        for i in range(6):
            session.run(train_op, {ids: [i, i + 1]})
        return _resident_bytes() - before - _TABLE_BYTES


def test_untouched_rows_take_no_memory():
    # A new process, because TensorFlow would reuse memory that this one has freed.
    code = (
        "from tests.estimator_accum import test_graph as tests; "
        "print(tests._bytes_of_accumulating())"
    )
    done = running.run("-c", code, PYTHONPATH=os.pathsep.join(sys.path))
    taken = int(done.stdout.split()[-1])
    assert -_TABLE_BYTES / 2 < taken < _TABLE_BYTES / 2


def test_idle_zeros_are_zeros_where_the_memory_was_in_use():
    shape = [64, 64]  # too small for pages of its own
    with tf.Graph().as_default(), v1.Session() as session:
        used = tf.reduce_sum(tf.random.uniform(shape, 1.0, 2.0))
        values = idle_zeros(shape, tf.float32)
        for _ in range(20):
            session.run(used)
            np.testing.assert_array_equal(session.run(values), np.zeros(shape))


def test_operations_that_one_waits_for_have_one_order(fresh_graph):
    """TensorFlow keeps more than eight by their addresses."""
    others = [tf.no_op(f"waited_for_{i:02}") for i in range(20)]
    with tf.control_dependencies(others[::-1]):
        operation = tf.no_op("waiting")
    assert control_inputs_of(operation) == others


def test_functions_are_read_once_for_all_their_variables(monkeypatch):
    libraries, names = [], []

    def library_of_functions(*graphs):
        libraries.append(functions.library_of_functions(*graphs))
        return libraries[-1]

    def producer_of(name):
        names.append(name)
        return functions.producer_of(name)

    monkeypatch.setattr(writers, "library_of_functions", library_of_functions)
    monkeypatch.setattr(handles, "producer_of", producer_of)
    with tf.Graph().as_default() as graph:
        options = {"initializer": 0.0, "use_resource": True}
        states = [v1.get_variable(f"state_{i}", **options) for i in range(9)]
        results = tf.function(lambda: [state.assign_add(1.0) for state in states])()
        tf.identity(results[0])  # runs with it
        (call,) = (op for op in graph.get_operations() if op.type.endswith("edCall"))
        lookup = writers.MicroStepWriters(graph, [results[0]])
        (function,) = (libraries[0][name] for name in functions.functions_of(call))
        reads = [read for node in function.node_def for read in node.input]
        assert len(names) == len(reads) + len(function.ret)
        for state in states:
            assert lookup.all_of([state.handle.op]) == [call]
            assert lookup.deciding(state.handle.op, call) is not None
    assert len(libraries) == 2
