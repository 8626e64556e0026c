"""Walks through chains that are longer than Python's stack."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import AccumulatingOptimizer
from estimator_accum.core.linear import products_of
from estimator_accum.graph.lookups import joined_tensors
from estimator_accum.graph.writers import MicroStepWriters
from estimator_accum.rows.analysis import Analysis
from tests.helpers.models.interception import build

v1 = tf.compat.v1
_LENGTH = 3000
pytestmark = pytest.mark.once


def _chain(tensor, step, length=_LENGTH):
    assert length == 25 or 3 * length > sys.getrecursionlimit()
    for _ in range(length):
        tensor = step(tensor)
    return tensor


@pytest.fixture(autouse=True)
def _graph():
    with tf.Graph().as_default():
        yield


@pytest.mark.parametrize(
    ("step", "length", "factors"),
    [(lambda g: g * 2.0, _LENGTH, _LENGTH), (lambda g: g + 2.0 * g, 25, 25)],
)
def test_a_gradient_that_is_scaled_again_and_again_is_linear(step, length, factors):
    gradient = v1.placeholder(tf.float32, [2])
    scaled = _chain(gradient, step, length)
    gradients, scales = products_of(scaled, lambda tensor: tensor is gradient)
    assert gradients == [gradient] and len(scales) == factors
    squared = _chain(scaled * scaled, step, 25)
    assert products_of(squared, lambda tensor: tensor is gradient) is None


def test_gradients_that_are_scaled_again_and_again_are_applied():
    weights = v1.get_variable("weights", initializer=[1.0, 2.0])
    v1.train.get_or_create_global_step()
    sgd = AccumulatingOptimizer(v1.train.GradientDescentOptimizer(1.0), 1)
    ((gradient, _),) = sgd.compute_gradients(tf.reduce_mean(weights), [weights])
    halved = _chain(gradient * 0.5, lambda tensor: tensor * 1.0, 1500)
    sgd.apply_gradients([(halved, weights)], v1.train.get_global_step())


def test_lookups_behind_a_long_chain_are_found_in_their_order():
    a, b, c = (tf.constant([i]) for i in range(3))
    joined = tf.concat([_chain(a, tf.identity), tf.concat([b, c], 0)], 0)
    assert joined_tensors(_chain(joined, tf.identity)) == [a, b, c]


def test_a_number_behind_a_long_chain_has_a_value():
    x = v1.placeholder(tf.float32, [None, 2])
    number = v1.get_variable("number", [], tf.int32, v1.zeros_initializer())
    size = _chain(tf.identity(number), lambda tensor: tensor * 1)
    analysis = Analysis([x])
    rows = tf.reshape(tf.tile(x, [1, size]), [tf.shape(x)[0], 2 * size])
    analysis.analyze([rows])
    assert analysis.state(rows).kind == "rows"
    assert analysis.value(size) == analysis.value(tf.identity(size))


def test_variables_that_set_each_other_in_a_long_chain_settle():
    names = [f"v{i:04}" for i in range(400)]
    variables = [
        v1.get_variable(name, [], initializer=v1.zeros_initializer()) for name in names
    ]
    source = v1.get_variable("source", [], initializer=v1.zeros_initializer())
    boundary = tf.identity(tf.constant(True))
    assigned = [
        v.assign(w) for v, w in zip(variables, [*variables[1:], source], strict=True)
    ]
    counted = source.assign_add(1.0)
    tf.group(boundary, *assigned)
    writers = MicroStepWriters(tf.compat.v1.get_default_graph(), [boundary])
    assert writers.of(variables[0].op) == []
    tf.group(boundary, counted)
    writers = MicroStepWriters(tf.compat.v1.get_default_graph(), [boundary])
    assert len(writers.of(variables[0].op)) == 1


def test_a_gradient_of_zero_behind_a_long_chain_is_a_sum():
    @tf.custom_gradient
    def layer(x, weights):
        def gradient(d):
            zeros = _chain(tf.zeros([3, 1]), tf.negative, 1200)
            return tf.matmul(d, weights, transpose_b=True), zeros + tf.matmul(
                x, d, transpose_a=True
            )

        return tf.matmul(x, weights), gradient

    def model_fn(features, labels, mode):
        weights = v1.get_variable("weights", [3, 1], initializer=v1.ones_initializer())
        loss = tf.reduce_mean(tf.square(layer(features, weights) - labels))
        sgd, step = v1.train.GradientDescentOptimizer(0.1), v1.train.get_global_step()
        train_op = sgd.minimize(loss, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    build(model_fn, (np.ones([8, 3], np.float32), np.ones([8, 1], np.float32)))
