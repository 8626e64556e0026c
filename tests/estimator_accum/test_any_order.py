"""Micro-steps, failures, restores, other K or partial windows in any order.

After each step the graph must have the values of NumPy. To run more cases than the
suite:

    HYPOTHESIS_CASES=2000 python -m pytest tests/estimator_accum/test_any_order.py
"""

import functools
import os
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from estimator_accum import (
    get_or_create_update_step,
    get_windows,
    make_accumulating_train_op,
)

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("graph_optimizer")]
v1 = tf.compat.v1
RATE, MOMENTUM, CLIP_NORM, ROWS = 0.5, 0.5, 2.0, 4
_numbers = st.integers(-8, 8).map(float)
_weights = st.sampled_from([0.0, 1.0, 2.0, 3.0])
_BAD = st.sampled_from([float("nan"), float("inf")])


class _Graph:
    """A train op over a scalar and an embedding, whose gradients are fed."""

    def __init__(self, policy):
        with tf.Graph().as_default():
            self.dense = v1.placeholder(tf.float64, [])
            self.slices = v1.placeholder(tf.float64, [2])
            self.ids = v1.placeholder(tf.int64, [2])
            self.weight = v1.placeholder(tf.float64, [])
            two = tf.constant(2, tf.int64)
            self.steps = v1.get_variable("k", initializer=two, trainable=False)
            self.new_steps = v1.placeholder(tf.int64, [])
            self.set_steps = self.steps.assign(self.new_steps)
            x = v1.get_variable("x", initializer=tf.constant(0.0, tf.float64))
            zeros = tf.zeros([ROWS], tf.float64)
            table = v1.get_variable("table", initializer=zeros)
            loss = self.dense * x
            loss += tf.reduce_sum(self.slices * tf.gather(table, self.ids))
            clock = tf.cast(get_or_create_update_step(), tf.float64)
            optimizer = v1.train.MomentumOptimizer(RATE / (1.0 + clock), MOMENTUM)
            options = {"weight": self.weight, "on_nonfinite": policy}
            self.train_op = make_accumulating_train_op(
                loss, optimizer, lambda _: self.steps.read_value(), CLIP_NORM, **options
            )
            (self.window,) = get_windows()
            counters = [self.window.update_step, self.window.micro_steps]
            self.state = [x, table, v1.train.get_global_step(), *counters]
            self.saver = v1.train.Saver()
            self.start = v1.global_variables_initializer()
            self.session = v1.Session()


_graph = functools.cache(_Graph)


class _Machine(RuleBasedStateMachine):
    """The graph and a NumPy model that take the same steps."""

    policy = None

    @initialize()
    def begin(self):
        self.graph = _graph(self.policy)
        self.session = self.graph.session
        self.session.run(self.graph.start)
        self.values = np.zeros(1 + ROWS)  # x, then the table
        self.slots = np.zeros(1 + ROWS)
        self.sums, self.total = np.zeros(1 + ROWS), 0.0
        self.held = self.updates = self.micro_steps = 0
        self.steps, self.saved = 2, None
        self.touched = set()
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self):
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def _run(self, dense, slices, ids, weight):
        graph = self.graph
        feeds = {graph.dense: dense, graph.slices: slices, graph.ids: ids}
        self.session.run(graph.train_op, feeds | {graph.weight: weight})

    def _add(self, dense, slices, ids, weight):
        gradient = np.zeros(1 + ROWS)
        gradient[0] = dense
        np.add.at(gradient, 1 + np.array(ids), slices)
        self.sums += weight * gradient
        self.total += weight
        if weight:
            self.touched.update(ids)

    def _close(self, is_forced=False):
        if self.held < self.steps and not is_forced:
            return
        is_applied = np.isfinite(self.sums).all() and np.isfinite(self.total)
        if self.policy != "raise":
            is_applied &= self.total > 0
        if is_applied:
            mean = self.sums / self.total if self.total else np.zeros(1 + ROWS)
            norm = np.linalg.norm(mean)
            mean *= min(1.0, CLIP_NORM / norm) if norm else 1.0
            rows = [0, *(1 + i for i in self.touched)]  # sparse: other rows do not move
            self.slots[rows] = MOMENTUM * self.slots[rows] + mean[rows]
            rate = RATE / (1.0 + self.updates)
            self.values[rows] -= rate * self.slots[rows]
            self.updates += 1
        self.sums, self.total, self.held = np.zeros(1 + ROWS), 0.0, 0
        self.touched = set()

    _ids = st.lists(st.integers(0, ROWS - 1), min_size=2, max_size=2)
    _slices = st.lists(_numbers, min_size=2, max_size=2)

    @rule(dense=_numbers, slices=_slices, ids=_ids, weight=_weights)
    def micro_step(self, dense, slices, ids, weight):
        self._run(dense, slices, ids, weight)
        self._add(dense, slices, ids, weight)
        self.held += 1
        self.micro_steps += 1
        self._close()

    @rule(bad=_BAD, place=st.integers(0, 1), ids=_ids, weight=_weights)
    def bad_micro_step(self, bad, place, ids, weight):
        batch = (bad, [1.0, 1.0], ids) if place else (1.0, [1.0, bad], ids)
        if self.policy == "raise" and weight:
            with pytest.raises(tf.errors.InvalidArgumentError, match="must be finite"):
                self._run(*batch, weight)
            return
        self._run(*batch, weight)
        self.micro_steps += 1
        if self.policy != "skip_micro_batch" or not weight:
            self.held += 1
            if weight:
                self._add(*batch, weight)
        self._close()

    @rule()
    def micro_step_that_does_not_come(self):
        with pytest.raises(tf.errors.InvalidArgumentError):
            self._run(1.0, [1.0, 1.0], [0, ROWS], 1.0)  # there is no such row

    @rule(steps=st.integers(1, 4))
    def change_k(self, steps):
        self.session.run(self.graph.set_steps, {self.graph.new_steps: steps})
        self.steps = steps

    @rule()
    def apply_partial_window(self):
        if self.held:
            feeds = {self.graph.window.is_boundary: True}
            self.session.run(self.graph.window.of_partial, feeds)
            self._close(is_forced=True)

    @rule()
    def save(self):
        with self.session.graph.as_default():
            self.graph.saver.save(self.session, os.path.join(self.folder.name, "c"))
        self.saved = {
            name: value.copy() if hasattr(value, "copy") else value
            for name, value in vars(self).items()
            if name in _STATE
        }

    @rule()
    def restore(self):
        if self.saved is not None:
            self.session.run(self.graph.start)
            path = os.path.join(self.folder.name, "c")
            with self.session.graph.as_default():
                self.graph.saver.restore(self.session, path)
            for name, value in self.saved.items():
                setattr(self, name, value.copy() if hasattr(value, "copy") else value)

    @invariant()
    def stands_where_numpy_says(self):
        if not hasattr(self, "held"):
            return
        x, table, *counters = self.session.run(self.graph.state)
        np.testing.assert_allclose([x, *table], self.values, rtol=1e-12, atol=1e-12)
        assert counters == [self.micro_steps, self.updates, self.held]


_STATE = ("values", "slots", "sums", "total", "held", "updates", "micro_steps", "steps")
_STATE += ("touched",)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("raise", marks=pytest.mark.core),
        *(
            pytest.param(name, marks=pytest.mark.once)
            for name in ("skip_micro_batch", "skip_window")
        ),
    ],
)
def test_any_order_of_steps_is_what_numpy_says(policy):
    machine = type("Machine", (_Machine,), {"policy": policy})
    options = {"stateful_step_count": 25, "deadline": None, "database": None}
    options["max_examples"] = int(os.environ.get("HYPOTHESIS_CASES", "30"))
    options["derandomize"] = "HYPOTHESIS_CASES" not in os.environ
    chosen = settings(suppress_health_check=list(HealthCheck), **options)
    run_state_machine_as_test(machine, settings=chosen)
