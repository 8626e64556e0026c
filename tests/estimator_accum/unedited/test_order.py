"""Reads before writes of a variable, where the graph has no order."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from tests.helpers.models.interception import cut, train

v1 = tf.compat.v1
_BATCH = np.ones([4, 1]), np.zeros(4)
_UPDATES = 6


def _value(clock, loss):
    return tf.identity(clock)


def _branch(clock, loss):
    return v1.cond(tf.constant(True), lambda: clock + 0.0, lambda: clock + 100.0)


def _function(clock, loss):
    return tf.function(lambda: clock + 0.0)()


def _view(clock, loss):
    """A reference variable's memory, not a copy of it."""
    return tf.squeeze(tf.reshape(clock, [1, 1]))


def _after_the_loss(clock, loss):
    with tf.control_dependencies([loss]):
        return v1.convert_to_tensor(clock) + 0.0


def _assign(clock):
    return v1.assign(clock, clock + 1.0)


def _add(clock):
    return v1.assign_add(clock, 1.0)


def _assign_in_a_branch(clock):
    return v1.cond(tf.constant(True), lambda: _assign(clock), lambda: clock + 0.0)


def _sum_of_rates(read, write, *, is_resource: bool, updates=_UPDATES) -> float:
    """Returns the sum of `read` at each of the updates, of a clock that `write` moves."""

    def model_fn(features, labels, mode):
        weight = v1.get_variable("weight", [1, 1], tf.float64, tf.zeros_initializer())
        clock = v1.get_variable(
            "clock",
            [],
            initializer=tf.zeros_initializer(),
            trainable=False,
            use_resource=is_resource,
        )
        loss = tf.reduce_mean(tf.matmul(features, weight)[:, 0] - labels)
        rate = tf.cast(read(clock, loss), tf.float64)
        (gradient,) = tf.gradients(loss, weight)  # 1
        updates = [v1.assign_sub(weight, rate * gradient), write(clock)]
        train_op = tf.group(*updates, v1.train.get_global_step().assign_add(1))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    variables, _ = train(cut(model_fn, 2), _BATCH, updates)
    assert variables["clock"] == updates
    return -variables["weight"].item()


@pytest.mark.parametrize(
    ("read", "write", "is_resource", "control_flow"),
    [
        (_value, _assign, True, 2),
        (_value, _assign, False, 2),
        (_value, _add, True, 2),
        (_branch, _assign, True, 1),
        (_branch, _assign, True, 2),
        (_branch, _assign, False, 1),
        (_function, _assign, True, 2),
        (_value, _assign_in_a_branch, True, 1),
        (_value, _assign_in_a_branch, True, 2),
        (_value, _assign_in_a_branch, False, 1),
        (_view, _assign, False, 2),
    ],
)
def test_a_variable_is_read_before_it_is_written(
    read, write, is_resource, control_flow, monkeypatch
):
    monkeypatch.setattr(control_flow_util, "ENABLE_CONTROL_FLOW_V2", control_flow == 2)
    total = _sum_of_rates(read, write, is_resource=is_resource)
    assert total == sum(range(_UPDATES))


def test_a_branch_that_reads_comes_before_the_write_in_each_of_many_updates(
    monkeypatch,
):
    """TensorFlow runs operations in another order when it has seen how long they take."""
    monkeypatch.setattr(control_flow_util, "ENABLE_CONTROL_FLOW_V2", True)
    total = _sum_of_rates(_branch, _assign, is_resource=True, updates=300)
    assert total == sum(range(300))


def test_a_read_that_waits_for_the_forward_pass_comes_after_the_write():
    total = _sum_of_rates(_after_the_loss, _assign, is_resource=False)
    assert total == sum(range(_UPDATES)) + _UPDATES
