"""The encoder's building blocks, each alone."""

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune.layers import ACTIVATIONS, TokenPacking, activation


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


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activation_has_the_same_values_and_gradients_in_training(name, session):
    x = tf.linspace(-6.0, 6.0, 401)
    results = []
    for is_training in (True, False):
        y = activation(name, is_training=is_training)(x)
        results.append(session.run([y, tf.gradients(y, x)[0]]))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)
