"""Cases from the tests of other Keras accumulators, with their numbers."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.keras import accumulate
from tests.helpers.models.keras_kinds import apply_each


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
    optimizers = [kind.optimizer(name, 0.1, weight_decay=0.05) for _ in range(2)]
    ours, theirs = tf.Variable(start), tf.Variable(start)
    apply_each(accumulate(optimizers[0], 3), ours, windows.reshape([24, 2, 2]))
    apply_each(optimizers[1], theirs, windows.mean(1))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert np.all(np.abs(ours - start) > 1e-3)
