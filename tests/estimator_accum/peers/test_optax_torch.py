"""Cases from the tests of optax or PyTorch trainers, with their numbers."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import AccumulatingOptimizer, get_or_create_update_step
from tests.helpers.models.interfaces import (
    ALL,
    after_each,
    apply_partial_window,
    by_minimize,
    fed_gradients,
    sgd,
    start_session,
)

pytestmark = [
    pytest.mark.once,
    pytest.mark.usefixtures("fresh_graph", "graph_optimizer"),
]
v1 = tf.compat.v1


@pytest.mark.parametrize(
    ("dtype", "gradient_dtype", "accumulator_dtype"),
    [
        (tf.float32, tf.float16, None),
        (tf.float32, tf.bfloat16, tf.float32),
        (tf.float16, tf.float32, None),
        (tf.float16, tf.float16, tf.float32),
        (tf.bfloat16, tf.float16, None),
        (tf.bfloat16, tf.float32, tf.float32),
        (tf.bfloat16, tf.bfloat16, None),
    ],
)
def test_multi_steps_mixed_precision(dtype, gradient_dtype, accumulator_dtype):
    """optax, _accumulation_test.py, test_multi_steps_mixed_precision.

    Whatever the gradients' dtype, variables and slots keep theirs. Five micro-steps
    with one gradient are one update with it. All numbers are exact in bfloat16.
    """
    gradient = [0.5, -0.25, 3.0]

    def train(make_train_op, micro_steps):
        with tf.Graph().as_default():
            start = tf.constant([1.0, -1.0, 2.0], dtype)
            variable = v1.get_variable("x", initializer=start)
            optimizer = v1.train.AdamOptimizer(0.125, 0.75, 0.875)
            train_op = make_train_op(optimizer, variable)
            dtypes = {v.op.name: v.dtype.base_dtype for v in v1.global_variables()}
            value = tf.cast(variable, tf.float32)
            return dtypes, after_each(train_op, [{}] * micro_steps, value)[-1]

    def accumulating(optimizer, variable):
        pairs = [(tf.constant(gradient, gradient_dtype), variable)]
        options = {"accumulator_dtype": accumulator_dtype}
        return AccumulatingOptimizer(optimizer, 4, **options).apply_gradients(pairs)

    def plain(optimizer, variable):
        return optimizer.apply_gradients([(tf.constant(gradient, dtype), variable)])

    our_dtypes, ours = train(accumulating, 5)
    their_dtypes, theirs = train(plain, 1)
    assert set(their_dtypes.items()) <= set(our_dtypes.items())
    assert our_dtypes["x/accumulator"] == (accumulator_dtype or tf.float32)
    np.testing.assert_array_equal(ours, theirs)
    assert np.all(ours != [1, -1, 2])


@pytest.mark.parametrize(
    ("on_nonfinite", "expected"),
    [("skip_window", [4, 4, 4, 2]), ("skip_micro_batch", [4, 4, 3, 3])],
)
def test_multi_steps_zero_nans(on_nonfinite, expected):
    """optax, _accumulation_test.py, test_multi_steps_zero_nans.

    Code that replaces NaN between `compute_gradients` and `apply_gradients` does so in
    the window's mean, as in a big batch, unless the micro-batch is left out before.
    """
    x = v1.placeholder(tf.float32, [])
    variable = v1.get_variable("x", initializer=4.0)
    loss = tf.sqrt(variable * x)  # the gradient of 0 * sqrt(0) is NaN
    optimizer = AccumulatingOptimizer(sgd(), 2, on_nonfinite=on_nonfinite)
    ((gradient, _),) = optimizer.compute_gradients(loss)
    zeroed = tf.where(tf.math.is_nan(gradient), 0.0, gradient)
    global_step = v1.train.get_or_create_global_step()
    train_op = optimizer.apply_gradients([(zeroed, variable)], global_step)
    with start_session() as session:
        assert np.isnan(session.run(gradient, {x: 0.0}))
    feeds = [{x: value} for value in (0.0, 16.0, 16.0, 144.0)]
    np.testing.assert_allclose(after_each(train_op, feeds, variable), expected)


@pytest.mark.parametrize(
    ("micro_batches", "steps", "updates"),
    [
        # transformers, test_num_batches_in_training_with_gradient_accumulation
        *((123, 5, 25), (120, 5, 24)),
        (20, 1, 20),  # Lightning, test_trainer_accumulate_grad_batches_zero_grad
        (64, 3, 22),  # Lightning, test_estimated_stepping_batches.py
    ],
)
def test_no_micro_batch_is_lost(micro_batches, steps, updates):
    """transformers and Lightning: an epoch's last window may be short."""
    (gradient,), (variable,), loss = fed_gradients(0.0)
    train_op = by_minimize(loss, sgd(), steps)
    update_step = get_or_create_update_step()
    values = np.arange(1.0, micro_batches + 1)
    with start_session() as session:
        for value in values:
            session.run(train_op, {gradient: value})
        apply_partial_window(session)
        windows = np.split(values, range(steps, micro_batches, steps))
        assert session.run(update_step) == len(windows) == updates
        expected = -sum(np.mean(window) for window in windows)
        np.testing.assert_allclose(session.run(variable), expected, rtol=1e-6)


@pytest.mark.parametrize("accumulate", ALL)
def test_sync_at_the_boundary_and_after_the_last_batch_only(accumulate):
    """accelerate, test_sync.py, test_gradient_accumulation_with_opt_and_scheduler.

    Parameters change every second micro-batch and after the last one; after each
    micro-step the learning rate is that of training on the joined batches.
    """
    (gradient,), (variable,), loss = fed_gradients(0.0)
    rate = v1.train.exponential_decay(1.0, get_or_create_update_step(), 1, 0.5)
    train_op = accumulate(loss, sgd(rate), 2)
    table = {4: [0, 1], 2: [-3, 0.5], 8: [-3, 0.5], 0: [-5, 0.25], 16: [-9, 0.125]}
    with start_session() as session:
        for value, expected in table.items():
            session.run(train_op, {gradient: value})
            if value == 16:
                apply_partial_window(session)
            assert session.run([variable, rate]) == expected
