"""Keras: a non-finite loss with finite gradients; a weight below 0."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.keras import accumulate
from tests.helpers.models.keras_kinds import apply_each


def _loss(y_true, y_pred):
    """Loss whose gradient is finite for any y_true."""
    return tf.reduce_mean(y_pred) + tf.reduce_mean(y_true)


def _model(kind, **options):
    """Returns a model that multiplies by one weight, initially 0."""
    layer = kind.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = kind.keras.Sequential([kind.keras.Input((1,)), layer])
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2, **options)
    model.compile(optimizer, _loss, jit_compile=False)
    return model


def _train(model, *micro_batches) -> float:
    for x, y in micro_batches:
        model.train_on_batch(np.full([4, 1], x), np.full([4, 1], y))
    return float(model.get_weights()[0][0, 0])


@pytest.mark.parametrize(
    ("policy", "weight"), [("skip_micro_batch", -2.0), ("skip_window", -1.0)]
)
def test_a_loss_that_is_not_finite_is_skipped(kind, policy, weight):
    model = _model(kind, on_nonfinite=policy)
    micro_batches = [(1.0, 0.0), (9.0, np.nan), (3.0, 0.0), (-1.0, 0.0), (3.0, 0.0)]
    assert _train(model, *micro_batches[:4]) == weight
    assert int(model.optimizer.micro_steps.numpy()) == (policy == "skip_micro_batch")


def test_a_loss_that_is_not_finite_is_named(kind):
    model = _model(kind, on_nonfinite="raise")
    _train(model, (1.0, 0.0))
    sentence = "NaN or infinity in the loss"
    with pytest.raises(tf.errors.InvalidArgumentError, match=sentence):
        _train(model, (9.0, np.inf))
    assert _train(model, (3.0, 0.0)) == -2.0


def test_a_weight_that_is_not_finite_is_named(kind):
    variable = tf.Variable(0.0)
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2, on_nonfinite="raise")
    apply_each(optimizer, variable, [1.0], weight=tf.constant(1.0))
    sentence = "NaN or infinity in .*the weight"
    with pytest.raises(tf.errors.InvalidArgumentError, match=sentence):
        apply_each(optimizer, variable, [5.0], True, weight=tf.Variable(np.nan))
    assert apply_each(optimizer, variable, [3.0], weight=tf.constant(1.0)) == [-2.0]


def test_a_negative_weight_fails_its_micro_step(kind):
    variable = tf.Variable(0.0)
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2, weight=lambda: 1.0)

    @tf.function
    def step(gradient, weight):
        optimizer.apply_gradients([(gradient, variable)], weight=weight)

    step(tf.constant(1.0), tf.constant(1.0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="`weight` must be >= 0"):
        step(tf.constant(5.0), tf.constant(-1.0))
    step(tf.constant(4.0), tf.constant(2.0))
    assert variable.numpy() == -3.0


@pytest.mark.parametrize("policy", [None, "raise", "skip_micro_batch", "skip_window"])
def test_a_mean_over_nothing_adds_nothing(kind, policy):
    """Its weight is 0 and its mean 0 / 0, as when all tokens are masked."""
    weight = tf.Variable(1.0, trainable=False)
    model = _model(kind, on_nonfinite=policy, weight=weight.read_value)
    for number, x in ((1.0, 2.0), (0.0, np.nan), (0.0, np.nan), (3.0, 4.0)):
        weight.assign(number)
        _train(model, (x, 0.0))
    assert model.get_weights()[0][0, 0] == -6.0
