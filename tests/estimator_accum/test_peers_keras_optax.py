"""Cases from the tests of Keras and optax, with their numbers."""

import numpy as np
import pytest
import tensorflow as tf
from interfaces import ALL, by_minimize, fed_gradients, start_session

from estimator_accum import (
    AccumulatingOptimizer,
    get_or_create_update_step,
    get_windows,
)

pytestmark = pytest.mark.once
v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def _fresh_graph():
    with tf.Graph().as_default():
        yield


def _with_weight_decay(base, decay):
    """A v1 optimizer that shrinks a dense variable by `decay` before each update."""

    class Decaying(base):
        def _resource_apply_dense(self, grad, var):
            shrink = var.assign_sub(decay * var.read_value(), read_value=False)
            with tf.control_dependencies([shrink]):
                return super()._resource_apply_dense(grad, var)

    return Decaying


@pytest.mark.parametrize("accumulate", ALL)
def test_gradient_accumulation(accumulate):
    """Keras, optimizer_test.py, test_gradient_accumulation.

    `iterations` there is `global_step` or, since it has `_iterations`, `update_step`;
    the sum that it clears at the boundary stays here until it is overwritten.
    """
    (gradient,), (variable,), loss = fed_gradients([[1.0, 2.0], [3.0, 4.0]])
    train_op = accumulate(loss, v1.train.GradientDescentOptimizer(1.0), 3)
    sums = next(v for v in v1.global_variables() if "/accumulator" in v.name)
    clocks = [v1.train.get_global_step(), get_or_create_update_step()]
    table = [
        ([[1, 2], [3, 4]], 1, 1, 0),
        ([[1, 2], [3, 4]], 2, 2, 0),
        ([[0, 1], [2, 3]], 3, 3, 1),
        ([[0, 1], [2, 3]], 1, 4, 1),
    ]
    with start_session() as session:
        for expected, total, global_step, update_step in table:
            session.run(train_op, {gradient: np.ones([2, 2])})
            assert session.run(variable).tolist() == expected
            assert session.run(sums).tolist() == [[total] * 2] * 2
            assert session.run(clocks) == [global_step, update_step]


@pytest.mark.parametrize(
    "name", ["Adam", "GradientDescent", "Adagrad", "RMSProp", "Adadelta", "Ftrl"]
)
def test_gradient_accumulation_with_weight_decay(name):
    """Keras, optimizer_test.py, test_gradient_accumulation_with_weigth_decay.

    Of its eleven optimizers those that tf.compat.v1.train has: 8 windows of 3 random
    gradients against 8 updates by their mean, to 1e-6.
    """
    windows = np.random.default_rng(0).normal(size=[8, 3, 2, 2])
    start = [[1.0, 2.0], [3.0, 4.0]]
    base = getattr(v1.train, f"{name}Optimizer")
    rate = 100.0 if name == "Adadelta" else 0.1

    def train(make_train_op, gradients):
        with tf.Graph().as_default():
            (gradient,), (variable,), loss = fed_gradients(start)
            train_op = make_train_op(loss, _with_weight_decay(base, 0.05)(rate))
            with start_session() as session:
                for fed in gradients:
                    session.run(train_op, {gradient: fed})
                return session.run(variable)

    ours = train(
        lambda *arguments: by_minimize(*arguments, 3), windows.reshape([24, 2, 2])
    )
    theirs = train(lambda loss, optimizer: optimizer.minimize(loss), windows.mean(1))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert np.all(np.abs(ours - start) > 1e-2)


def test_multi_steps():
    """optax, _accumulation_test.py, test_multi_steps.

    Adam with weight decay, K = 4, twenty micro-steps: parameters and loss are bitwise
    the same between updates, and at each update the loss falls.
    """
    weights = v1.get_variable(
        "w", initializer=np.linspace(-1, 1, 7, dtype="f")[:, None]
    )
    bias = v1.get_variable("b", initializer=[0.5])
    data = tf.ones([32, 7])
    loss = tf.reduce_mean(tf.square(tf.matmul(data, weights) + bias))
    optimizer = _with_weight_decay(v1.train.AdamOptimizer, 1e-6)(1e-4)
    train_op = by_minimize(loss, optimizer, 4)
    has_updated = get_windows()[0].has_updated
    with start_session() as session:
        before = session.run([loss, weights, bias])
        for micro_step in range(20):
            _, updated = session.run([train_op, has_updated])
            after = session.run([loss, weights, bias])
            assert updated == (micro_step % 4 == 3)
            if updated:
                assert after[0] < before[0]
            else:
                for old, new in zip(before, after, strict=True):
                    np.testing.assert_array_equal(new, old)
            before = after


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

    Whatever the gradients' dtype, variables and slots keep theirs. Five micro-steps of
    one gradient are one update by it. The numbers are ones that bfloat16 holds exactly.
    """
    gradient = [0.5, -0.25, 3.0]

    def train(make_train_op, micro_steps):
        with tf.Graph().as_default():
            variable = v1.get_variable(
                "x", initializer=tf.constant([1.0, -1.0, 2.0], dtype)
            )
            optimizer = v1.train.AdamOptimizer(0.125, 0.75, 0.875)
            train_op = make_train_op(optimizer, variable)
            dtypes = {v.op.name: v.dtype.base_dtype for v in v1.global_variables()}
            with start_session() as session:
                for _ in range(micro_steps):
                    session.run(train_op)
                return dtypes, session.run(tf.cast(variable, tf.float32))

    def accumulating(optimizer, variable):
        pairs = [(tf.constant(gradient, gradient_dtype), variable)]
        return AccumulatingOptimizer(
            optimizer, 4, accumulator_dtype=accumulator_dtype
        ).apply_gradients(pairs)

    def plain(optimizer, variable):
        return optimizer.apply_gradients([(tf.constant(gradient, dtype), variable)])

    our_dtypes, ours = train(accumulating, 5)
    their_dtypes, theirs = train(plain, 1)
    assert set(their_dtypes.items()) <= set(our_dtypes.items())
    assert our_dtypes["x/accumulator"] == (accumulator_dtype or dtype)
    np.testing.assert_array_equal(ours, theirs)
    assert np.all(ours != [1, -1, 2])


def test_multi_steps_zero_nans():
    """optax, _accumulation_test.py, test_multi_steps_zero_nans.

    Code that replaces NaN between `compute_gradients` and `apply_gradients` goes on to:
    the window takes the zeros.
    """
    x = v1.placeholder(tf.float32, [])
    variable = v1.get_variable("x", initializer=4.0)
    loss = tf.sqrt(variable * x)  # the gradient of 0 * sqrt(0) is NaN
    optimizer = AccumulatingOptimizer(v1.train.GradientDescentOptimizer(1.0), 2)
    ((gradient, _),) = optimizer.compute_gradients(loss)
    zeroed = tf.where(tf.math.is_nan(gradient), 0.0, gradient)
    global_step = v1.train.get_or_create_global_step()
    train_op = optimizer.apply_gradients([(zeroed, variable)], global_step)
    with start_session() as session:
        assert np.isnan(session.run(gradient, {x: 0.0}))
        session.run(train_op, {x: 0.0})
        session.run(train_op, {x: 16.0})
        assert session.run(variable) == 4 - (0 + 1) / 2
