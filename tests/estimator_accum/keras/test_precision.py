"""Half precision, with a loss scale that is adjusted once per window."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.keras import accumulate
from tests.helpers.models.keras_kinds import apply_each, dense_data, difference, fit


def _loss_scaling(kind, optimizer, **options):
    return kind.keras.mixed_precision.LossScaleOptimizer(optimizer, **options)


def _scale(optimizer) -> float:
    inner = optimizer.inner_optimizer
    scale = inner.loss_scale if hasattr(inner, "loss_scale") else inner.dynamic_scale
    return float(scale)


def test_loss_scaling_on_either_side_gives_the_big_batchs_weights(kind):
    def adam():
        return kind.optimizer("Adam", 0.05)

    big, data = kind.dense_model("float64"), dense_data(64, "float64")
    fit(big, _loss_scaling(kind, adam()), data, 32)
    for optimizer in (
        accumulate(_loss_scaling(kind, adam()), 4),
        _loss_scaling(kind, accumulate(adam(), 4)),
    ):
        ours = kind.dense_model("float64")
        fit(ours, optimizer, data, 8)
        assert difference(big, ours) < 1e-12
        assert int(optimizer.iterations.numpy()) == 2


def test_the_scale_moves_once_per_window(kind):
    options = {"initial_scale": 4.0, "dynamic_growth_steps": 2}
    model = kind.dense_model()
    inner = _loss_scaling(kind, kind.optimizer("SGD", 0.01), **options)
    model.compile(accumulate(inner, 2), "mse", jit_compile=False)
    x, y = dense_data(8)
    # Two finite windows double it; a non-finite one halves it, and is skipped.
    seen = []
    for factor in [1, 1, 1, 1, np.inf, 1, 1, 1]:
        before = model.get_weights()
        model.train_on_batch(x * np.float32(factor), y)
        seen.append(_scale(model.optimizer))
        is_same = all(map(np.array_equal, before, model.get_weights()))
        assert is_same == (len(seen) in (1, 3, 5, 6, 7))
    assert seen == [4, 4, 4, 8, 8, 4, 4, 4]


def test_mixed_float16_puts_the_loss_scale_inside(kind):
    precision = kind.keras.mixed_precision
    precision.set_global_policy("mixed_float16")
    try:
        layers = [kind.keras.Input((5,)), kind.keras.layers.Dense(1)]
        model = kind.keras.Sequential(layers)
        optimizer = accumulate(kind.optimizer("SGD", 0.01), 2)
        fit(model, optimizer, dense_data(32), 8)
        assert model.optimizer is optimizer
        assert _scale(optimizer) >= 2.0**13  # two windows halve it twice at most
        config = optimizer.get_config()
    finally:
        precision.set_global_policy("float32")
    again = type(optimizer).from_config(config)
    assert float(again.inner_optimizer.initial_scale) == 2.0**15


def test_a_fixed_loss_scale_is_taken_out_again(kind):
    variable = tf.Variable(1.0)
    if kind.is_3:
        inner = kind.optimizer("SGD", 1.0, loss_scale_factor=8.0)
        optimizer = accumulate(inner, 2)
        scaled = [optimizer.scale_loss(tf.constant(g)) for g in (1.0, 3.0)]
    else:
        inner = kind.optimizer("SGD", 1.0)
        inner = _loss_scaling(kind, inner, dynamic=False, initial_scale=8.0)
        optimizer = accumulate(inner, 2)
        scaled = [optimizer.get_scaled_loss(tf.constant(g)) for g in (1.0, 3.0)]
        assert [s.numpy() for s in scaled] == [8.0, 24.0]
        scaled = optimizer.get_unscaled_gradients(scaled)
    assert apply_each(optimizer, variable, scaled)[-1] == -1.0


def test_gradients_of_half_precision_are_summed_in_float32(kind):
    """2048 + 1 is 2048 in float16, and 65,536 is infinite."""
    variable = tf.Variable(tf.zeros([], tf.float16))
    if kind.is_3:
        variable = kind.keras.Variable(0.0, dtype="float16")
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 4)
    gradients = np.array([2048, 1, 1, 2], np.float16)
    assert apply_each(optimizer, variable, gradients)[-1] == -513
    options = {"weight": tf.constant(4096.0)}
    values = apply_each(optimizer, variable, gradients, **options)
    assert values[-1] == -1026


def test_skipping_a_micro_batch_would_hide_it_from_the_loss_scale(kind):
    inner = _loss_scaling(kind, kind.optimizer("SGD", 1.0))
    with pytest.raises(ValueError, match="`on_nonfinite` cannot be 'skip_micro_batch'"):
        accumulate(inner, 2, on_nonfinite="skip_micro_batch")
