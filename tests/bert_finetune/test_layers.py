"""The encoder's building blocks, each alone."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import layers
from bert_finetune.bert_config import ACTIVATIONS
from bert_finetune.layers import FixedShape, TokenPacking


@pytest.fixture
def session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.set_random_seed(5)
        yield session


def test_packing_keeps_the_real_tokens_in_order(session):
    mask = tf.constant([[1, 1, 0], [0, 0, 0], [1, 0, 1]])
    padded = tf.reshape(tf.range(18.0), [3, 3, 2])
    packing = TokenPacking(mask, 2)
    packed = packing.pack(padded)
    expected = [[0, 1], [2, 3], [12, 13], [16, 17]]
    np.testing.assert_array_equal(session.run(packed), expected)
    unpacked = session.run(packing.unpack(packed))
    np.testing.assert_array_equal(unpacked[[0, 0, 2, 2], [0, 1, 0, 2]], expected)
    assert np.count_nonzero(unpacked) == 7  # the first number is a 0


@pytest.mark.parametrize("packing", [TokenPacking, FixedShape])
def test_heads_are_split_and_joined_as_by_a_reshape_and_a_transpose(packing, session):
    mask = tf.constant([[1, 1, 0], [0, 0, 0], [1, 0, 1]])
    packing = packing(mask, 2)
    packed = packing.pack(tf.reshape(1.0 + tf.range(54.0), [3, 3, 6]))
    split = packing.split_heads(packed)
    by_hand = tf.reshape(packing.unpack(packed), [3, 3, 2, 3])
    by_hand = tf.transpose(by_hand, [0, 2, 1, 3])
    assert split.shape.as_list()[1::2] == [2, 3]
    for pair in ((split, by_hand), (packing.join_heads(split), packed)):
        np.testing.assert_array_equal(*session.run(pair))


def test_gradient_of_a_dense_layers_input_goes_by_a_batch_of_one(session):
    """A product of matrices that transposes its second factor is slow in oneDNN."""
    x = tf.random.normal([5, 6])
    for is_training, kind in ((True, "BatchMatMulV2"), (False, "MatMul")):
        options = {"initializer_range": 1.0, "is_training": is_training}
        with tf.compat.v1.variable_scope("", reuse=tf.compat.v1.AUTO_REUSE):
            y = layers.dense(x, 4, "dense", **options)
        (dx,) = tf.gradients(y, x)
        product = _first_product(dx.op)
        assert (product.type, product.inputs[1].shape[-2:]) == (kind, [6, 4])


def _first_product(operation: tf.Operation) -> tf.Operation:
    while "MatMul" not in operation.type:
        operation = operation.inputs[0].op
    return operation


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_has_the_same_values_and_gradients_in_training(name, session):
    x = tf.linspace(-6.0, 6.0, 401)
    results = []
    for is_training in (True, False):
        y = layers.activation(name, is_training=is_training)(x)
        results.append(session.run([y, tf.gradients(y, x)[0]]))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)


def test_dropout_depends_on_seed_step_and_layer_alone():
    def masks(seed, step):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            tf.compat.v1.set_random_seed(seed)
            global_step = tf.compat.v1.train.get_or_create_global_step()
            outputs = []
            for scope in ("layer_0", "layer_1"):
                with tf.compat.v1.variable_scope(scope):
                    outputs.append(layers.dropout(tf.ones([50, 40]), 0.25))
            session.run(global_step.initializer, {global_step.initial_value: step})
            again = session.run(outputs)
            for first, second in zip(session.run(outputs), again, strict=True):
                np.testing.assert_array_equal(first, second)
            return again

    first, second = masks(3, 2**40), masks(3, 2**40)
    np.testing.assert_array_equal(first, second)
    others = [*first, *masks(3, 2**40 + 1), *masks(4, 2**40)]
    for number, one in enumerate(others):
        assert set(np.unique(one)) == {np.float32(0), np.float32(1 / 0.75)}
        assert np.mean(one == 0) == pytest.approx(0.25, abs=0.05)
        for other in others[:number]:
            assert np.mean((one == 0) & (other == 0)) == pytest.approx(1 / 16, abs=0.03)


@pytest.mark.parametrize(
    ("rate", "levels"), [(0.1, 6554), (2**-17, 0), (0.9999, 65529)]
)
def test_dropouts_rate_is_one_of_65536(rate, levels):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.set_random_seed(7)
        step = tf.compat.v1.train.get_or_create_global_step()
        y = layers.dropout(tf.ones([1001, 999]), rate)
        session.run(step.initializer)
        values = session.run(y)
    exact = levels / 65536
    assert np.unique(values)[-1] == np.float32(1 / (1 - exact))
    deviation = (exact * (1 - exact) / values.size) ** 0.5
    assert abs(np.mean(values == 0) - exact) <= 4 * deviation


def test_a_graph_that_nobody_needs_is_not_kept_by_its_gradients():
    def make() -> weakref.ref:
        with tf.Graph().as_default() as graph:
            x = layers.dense(
                tf.ones([2, 3]), 4, "d", initializer_range=1.0, is_training=True
            )
            x = layers.layer_norm(x, 1e-6, is_training=True)
            x = layers.activation("gelu", is_training=True)(x)
            assert tf.gradients(x, tf.compat.v1.trainable_variables())[0] is not None
            return weakref.ref(graph)

    graph = make()
    gc.collect()
    assert graph() is None
