"""Cases from the tests of TensorFlow projects that accumulate, with their numbers.

Where a project sums the window, its case is restated for the mean.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import get_or_create_update_step
from tests.helpers.models.interfaces import (
    ALL,
    after_each,
    by_apply_gradients,
    by_minimize,
    by_train_op,
    sgd,
    start_session,
)
from tests.helpers.tables import first

pytestmark = [
    pytest.mark.once,
    pytest.mark.usefixtures("fresh_graph", "graph_optimizer"),
]
v1 = tf.compat.v1


def test_accumulator():
    """lingvo, lingvo/core/optimizer_test.py, testAccumulator.

    There the accumulator is 0 after an update. Here the sum stays until the next
    window's first micro-step overwrites it.
    """
    first = np.random.RandomState(12345).normal(0.1, 0.5, [8, 3])
    second = np.random.RandomState(12346).normal(0.1, 0.5, [8, 3])
    inputs = v1.placeholder(tf.float64, [8, 3])
    start = np.random.RandomState(123456).normal(0.0, 0.01, [3, 2])
    weights = v1.get_variable("w", initializer=start)
    loss = tf.reduce_sum(tf.nn.relu(tf.matmul(inputs, weights)))
    rate = tf.constant(0.1, tf.float64)  # a Python float would become float32's 0.1
    train_op = by_minimize(loss, sgd(rate), 2)
    total = next(v for v in v1.global_variables() if v.op.name == "w/accumulator")
    feeds = [{inputs: x} for x in (first, second, second)]
    sums, values = zip(*after_each(train_op, feeds, [total, weights]), strict=True)

    def gradient(x, w):
        return x.T @ (x @ w > 0)

    updated = start - 0.5 * 0.1 * (gradient(first, start) + gradient(second, start))
    np.testing.assert_array_equal(values[0], start)
    np.testing.assert_allclose(values[1], updated, rtol=1e-14)
    assert not np.any(updated == start)
    np.testing.assert_allclose(sums[0], gradient(first, start), rtol=1e-14)
    np.testing.assert_allclose(sums[2], gradient(second, updated), rtol=1e-14)


_BAD_MICRO_BATCHES = {"skip_window": 2, "skip_micro_batch": 1, "raise": 1}
_FIRST = {("skip_window", by_apply_gradients, False), ("raise", by_minimize, True)}
_FIRST |= {("skip_window", by_train_op, True), ("skip_micro_batch", by_train_op, False)}


@pytest.mark.parametrize(
    ("on_nonfinite", "accumulate", "is_sparse"),
    first(itertools.product(_BAD_MICRO_BATCHES, ALL, [False, True]), _FIRST),
)
def test_grad_aggregation_with_inf_grad(on_nonfinite, accumulate, is_sparse):
    """Horovod, test_tensorflow2_keras.py, test_grad_aggregation_with_inf_grad.

    Four micro-steps, K = 2, the first one's gradient infinite: it must not reach the
    next window, whose gradients are 1.
    """
    gradient = v1.placeholder(tf.float32, [])
    variable = v1.get_variable("x", initializer=[0.0, 5.0])
    rows = tf.gather(variable, [0]) if is_sparse else variable[:1]
    loss = gradient * tf.reduce_sum(rows)
    train_op = accumulate(loss, sgd(0.01), 2, on_nonfinite=on_nonfinite)
    update_step = get_or_create_update_step()
    fed, bad = [np.inf, 1, 1, 1], _BAD_MICRO_BATCHES[on_nonfinite]
    with start_session() as session:
        for value in fed[:bad]:
            if on_nonfinite == "raise":
                with pytest.raises(tf.errors.InvalidArgumentError, match=r" in x"):
                    session.run(train_op, {gradient: value})
            else:
                session.run(train_op, {gradient: value})
        assert session.run(variable).tolist() == [0, 5]
        assert session.run(update_step) == 0
        for value in fed[bad:]:
            session.run(train_op, {gradient: value})
        np.testing.assert_allclose(session.run(variable), [-0.01, 5], rtol=1e-6)
        assert session.run(update_step) == (4 - bad) // 2
