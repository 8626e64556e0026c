"""Branches without captures: only the right one runs, wherever they are built."""

import pytest
import tensorflow as tf

from estimator_accum import make_accumulating_train_op
from estimator_accum._graph import either, run_either
from tests.helpers.models.interfaces import sgd, start_session

v1 = tf.compat.v1


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
    found = wrap(lambda fed: build(fed, counts))(tf.constant(predicate))
    return found.numpy(), [count.numpy() for count in counts]


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
