"""The encoder's building blocks, each alone."""

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune.layers import ACTIVATIONS, TokenPacking, activation, dropout


@pytest.fixture
def session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.set_random_seed(5)
        yield session


def test_packing_keeps_the_real_tokens_in_order(session):
    mask = tf.constant([[1, 1, 0], [0, 0, 0], [1, 0, 1]])
    padded = tf.reshape(tf.range(18.0), [3, 3, 2])
    packing = TokenPacking(mask)
    packed = packing.pack(padded)
    expected = [[0, 1], [2, 3], [12, 13], [16, 17]]
    np.testing.assert_array_equal(session.run(packed), expected)
    unpacked = session.run(packing.unpack(packed))
    np.testing.assert_array_equal(unpacked[[0, 0, 2, 2], [0, 1, 0, 2]], expected)
    assert np.count_nonzero(unpacked) == 7  # the first number is a 0


def test_dropout_drops_at_its_rate_and_keeps_the_mean(session):
    x = session.run(dropout(tf.ones([200, 500]), 0.1))
    kept = x[x != 0.0]
    # 0.1 is rounded to 6554 / 65536.
    np.testing.assert_allclose(kept, 65536 / (65536 - 6554), rtol=1e-6)
    assert (x == 0.0).mean() == pytest.approx(0.1, abs=0.004)  # 4 deviations
    assert x.mean() == pytest.approx(1.0, abs=0.005)


def test_dropout_draws_anew_for_every_element_and_run(session):
    dropped = tf.equal(dropout(tf.ones([40, 1001]), 0.5), 0.0)  # an odd size
    first, second = session.run(dropped), session.run(dropped)
    for other in (second, first[::-1], np.roll(first, 1, axis=1)):
        assert (first == other).mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("shape", [[1], [3], [2, 3, 5], [0, 4]])
def test_dropout_keeps_the_shape(shape, session):
    assert session.run(dropout(tf.ones(shape), 0.3)).shape == tuple(shape)


def test_gradient_of_dropout_is_its_own_mask(session):
    x = tf.ones([1000])
    y = dropout(x, 0.25)
    y_value, gradient = session.run([y, tf.gradients(y, x)[0]])
    assert 0 < np.count_nonzero(y_value) < 1000
    np.testing.assert_array_equal(gradient, y_value)


def test_dropout_at_rate_0_is_nothing(session):
    x = tf.ones([3])
    assert dropout(x, 0.0) is x


def test_dropout_just_below_rate_1_stays_finite(session):
    assert np.isfinite(session.run(dropout(tf.ones([70000]), 0.999999))).all()


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activation_has_the_same_values_and_gradients_in_training(name, session):
    x = tf.linspace(-6.0, 6.0, 401)
    results = []
    for is_training in (True, False):
        y = activation(name, is_training=is_training)(x)
        results.append(session.run([y, tf.gradients(y, x)[0]]))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)
