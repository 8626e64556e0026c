"""Cases from the tests of TensorFlow projects that accumulate, with their numbers.

Where a project sums the window, its case is restated for the mean.
"""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import get_or_create_update_step
from tests.helpers.models.interfaces import (
    ALL,
    after_each,
    by_minimize,
    by_train_op,
    fed_gradients,
    sgd,
    start_session,
)

pytestmark = [
    pytest.mark.once,
    pytest.mark.usefixtures("fresh_graph", "graph_optimizer"),
]
v1 = tf.compat.v1


@pytest.mark.parametrize("accumulate", ALL)
def test_delayed_update_sparse_gradients(accumulate):
    """OpenNMT-tf, opennmt/tests/optim_test.py, testDelayedUpdateSparseGradients."""
    table = v1.get_variable("table", initializer=[[1.0, 2.0], [3.0, 4.0]])
    rows = tf.nn.embedding_lookup(table, [0])
    loss = v1.losses.mean_squared_error([[1.1, 2.1]], rows)
    values = np.array(after_each(accumulate(loss, sgd(), 3), [{}] * 3, table))
    np.testing.assert_allclose(values[:, 0], [[1, 2], [1, 2], [1.1, 2.1]], rtol=1e-6)
    np.testing.assert_array_equal(values[:, 1], [[3, 4]] * 3)


@pytest.mark.parametrize("steps", [1, 4])
def test_multistep(steps):
    """tensor2tensor, utils/multistep_optimizer_test.py, testMultistep."""
    micro_batches = [
        ([0.1, 0.1], [0.01, 0.01]),
        ([0.2, -0.1], [0.02, 0.02]),
        ([0.3, 0.1], [-0.04, 0.04]),
        ([0.4, -0.1], [-0.04, 0.06]),
    ][:steps]

    def train(make_train_op, micro_batches):
        with tf.Graph().as_default():
            gradients, variables, loss = fed_gradients([1.0, 2.0], [3.0, 4.0])
            optimizer = v1.train.AdamOptimizer(10.0, beta1=0.2, beta2=0.99)
            train_op = make_train_op(loss, optimizer)
            feeds = [dict(zip(gradients, fed, strict=True)) for fed in micro_batches]
            state = [*optimizer._get_beta_accumulators(), *variables]
            return after_each(train_op, feeds * 3, state)[len(feeds) - 1 :: len(feeds)]

    ours = train(lambda *arguments: by_train_op(*arguments, steps), micro_batches)
    mean = np.mean(micro_batches, axis=0)
    theirs = train(lambda loss, optimizer: optimizer.minimize(loss), [mean])
    for our_round, their_round in zip(ours, theirs, strict=True):
        assert our_round[:2] == their_round[:2]  # the beta powers
        np.testing.assert_allclose(our_round[2:], their_round[2:], 1e-6, 1e-6)


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


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("accumulate", ALL)
@pytest.mark.parametrize(
    ("on_nonfinite", "bad_micro_batches", "good_micro_batches"),
    [("skip_window", 2, 2), ("skip_micro_batch", 1, 3), ("raise", 1, 3)],
)
def test_grad_aggregation_with_inf_grad(
    on_nonfinite, bad_micro_batches, good_micro_batches, accumulate, is_sparse
):
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
    fed = [np.inf, 1, 1, 1]
    with start_session() as session:
        for value in fed[:bad_micro_batches]:
            if on_nonfinite == "raise":
                with pytest.raises(tf.errors.InvalidArgumentError, match=r" in x"):
                    session.run(train_op, {gradient: value})
            else:
                session.run(train_op, {gradient: value})
        assert session.run(variable).tolist() == [0, 5]
        assert session.run(update_step) == 0
        for value in fed[bad_micro_batches:]:
            session.run(train_op, {gradient: value})
        np.testing.assert_allclose(session.run(variable), [-0.01, 5], rtol=1e-6)
        assert session.run(update_step) == good_micro_batches // 2


def test_large_batch_emulation_no_noise():
    """TF Privacy, dp_optimizer_keras_sparse_test.py, testLargeBatchEmulationNoNoise."""
    x = v1.placeholder(tf.float32, [2, 2])
    var0 = v1.get_variable("var0", initializer=[[1.0, 2.0]])
    var1 = v1.get_variable("var1", initializer=[3.0])
    predicted = tf.matmul(var0, x, transpose_b=True) + var1
    loss = tf.reduce_mean(predicted)
    train_op = by_minimize(loss, sgd(), 2)
    state = [var0, var1, get_or_create_update_step()]
    first, second = [[2, 0], [0, 1]], [[4, 2], [2, 1]]
    feeds = [{x: fed} for fed in (first, second, second, second)]
    table = after_each(train_op, feeds, state)
    assert [[value.tolist() for value in row] for row in table] == [
        [[[1, 2]], [3], 0],
        [[[-1, 1]], [2], 1],
        [[[-1, 1]], [2], 1],
        [[[-4, -0.5]], [1], 2],
    ]
