"""Cases from the tests of other Keras accumulators, with their numbers."""

import numpy as np
import pytest
import tensorflow as tf
from keras_kinds import dense_data, difference, fit

from estimator_accum.keras import accumulate


def _steps(optimizer, variable, gradients):
    """Applies them one by one; returns the variable's values after each."""
    values = []
    for gradient in gradients:
        optimizer.apply_gradients([(tf.constant(gradient), variable)])
        values.append(variable.numpy().tolist())
    return values


def test_gradient_accumulation(kind):
    """Keras, optimizer_test.py, test_gradient_accumulation."""
    variable = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 3)
    ones = np.ones([2, 2], "f")
    iterations = []
    start, moved = [[1, 2], [3, 4]], [[0, 1], [2, 3]]
    for expected in (start, start, moved, moved):
        assert _steps(optimizer, variable, [ones]) == [expected]
        iterations.append(int(optimizer.iterations.numpy()))
    assert iterations == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "name",
    ["Adam", "SGD", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "Lion"]
    + ["Nadam", "Ftrl", "Adafactor"],
)
def test_gradient_accumulation_with_weight_decay(kind, name):
    """Keras, optimizer_test.py, test_gradient_accumulation_with_weigth_decay."""
    if kind.is_legacy:
        pytest.skip("optimizers.legacy have no weight decay")
    windows = np.random.default_rng(0).normal(size=[8, 3, 2, 2]).astype("f")
    start = [[1.0, 2.0], [3.0, 4.0]]
    ours, theirs = tf.Variable(start), tf.Variable(start)
    optimizer = kind.optimizer(name, 0.1, weight_decay=0.05)
    _steps(accumulate(optimizer, 3), ours, windows.reshape([24, 2, 2]))
    _steps(kind.optimizer(name, 0.1, weight_decay=0.05), theirs, windows.mean(1))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert np.all(np.abs(ours - start) > 1e-3)


def test_aggregation_of_slices_leaves_other_rows(kind):
    """Horovod, test_tensorflow2_keras.py, test_gradient_aggregation: row 1 stays."""
    table = tf.Variable([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    optimizer = accumulate(kind.optimizer("SGD", 1.0, momentum=0.5), 2)
    for _ in range(4):
        slices = tf.IndexedSlices([[1.0, 1.0], [1.0, 1.0]], [0, 2], [3, 2])
        optimizer.apply_gradients([(slices, table)])
    assert table.numpy().tolist() == [[-2.5, -2.5], [1, 1], [-0.5, -0.5]]


def test_no_zero_gradients_between_updates(kind):
    """andreped/GradientAccumulator, issue 92: three updates of Adam by ones, K = 4."""
    plain, ours = tf.Variable(1.0), tf.Variable(1.0)
    _steps(kind.optimizer("Adam", 0.1), plain, [1.0] * 3)
    _steps(accumulate(kind.optimizer("Adam", 0.1), 4), ours, [1.0] * 12)
    assert ours.numpy() == plain.numpy()
    np.testing.assert_allclose(ours.numpy(), 0.7, rtol=1e-5)


def test_optimizer_wrapper(kind):
    """andreped, test_optimizer_wrapper.py: 500x1 and 125x4; weights, not accuracy."""
    whole, ours = kind.dense_model("float64"), kind.dense_model("float64")
    data = dense_data(1000, "float64")
    fit(whole, kind.optimizer("RMSprop", 0.01), data, 500)
    fit(ours, accumulate(kind.optimizer("RMSprop", 0.01), 4), data, 125)
    tolerance = 1e-6 if kind.is_3 else 1e-12  # Keras 3 has float32 in its loss
    assert difference(whole, ours) < tolerance
