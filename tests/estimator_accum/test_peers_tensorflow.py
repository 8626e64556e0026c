"""Cases from the tests of TensorFlow projects that accumulate, with their numbers.

Where a project sums the window, its case is restated for the mean.
"""

import numpy as np
import pytest
import tensorflow as tf
from interfaces import (
    ALL,
    by_apply_gradients,
    by_minimize,
    by_train_op,
    fed_gradients,
    start_session,
)

from estimator_accum import get_or_create_update_step

pytestmark = pytest.mark.once
v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def _fresh_graph():
    with tf.Graph().as_default():
        yield


@pytest.mark.parametrize("accumulate", ALL)
def test_delayed_update_sparse_gradients(accumulate):
    """OpenNMT-tf, opennmt/tests/optim_test.py, testDelayedUpdateSparseGradients."""
    table = v1.get_variable("table", initializer=[[1.0, 2.0], [3.0, 4.0]])
    found = tf.nn.embedding_lookup(table, [0])
    loss = v1.losses.mean_squared_error([[1.1, 2.1]], found)
    train_op = accumulate(loss, v1.train.GradientDescentOptimizer(1.0), 3)
    with start_session() as session:
        for expected in ([1, 2], [1, 2], [1.1, 2.1]):
            session.run(train_op)
            values = session.run(table)
            np.testing.assert_allclose(values[0], expected, rtol=1e-6)
            np.testing.assert_array_equal(values[1], [3, 4])


@pytest.mark.parametrize(
    ("accumulate", "steps"),
    [(by_train_op, 1), (by_train_op, 4), (by_minimize, 3), (by_apply_gradients, 2)],
)
def test_multistep(accumulate, steps):
    """tensor2tensor, utils/multistep_optimizer_test.py, testMultistep."""
    micro_batches = [
        ([0.1, 0.1], [0.01, 0.01]),
        ([0.2, -0.1], [0.02, 0.02]),
        ([0.3, 0.1], [-0.04, 0.04]),
        ([0.4, -0.1], [-0.04, 0.06]),
    ][:steps]
    mean = np.mean(micro_batches, axis=0)

    def train(make_train_op, rounds):
        with tf.Graph().as_default():
            gradients, variables, loss = fed_gradients([1.0, 2.0], [3.0, 4.0])
            optimizer = v1.train.AdamOptimizer(10.0, beta1=0.2, beta2=0.99)
            train_op = make_train_op(loss, optimizer)
            table = []
            with start_session() as session:
                for _ in range(3):
                    for fed in rounds:
                        session.run(train_op, dict(zip(gradients, fed, strict=True)))
                    powers = optimizer._get_beta_accumulators()
                    table.append(session.run([*powers, *variables]))
            return table

    ours = train(lambda *arguments: accumulate(*arguments, steps), micro_batches)
    theirs = train(lambda loss, optimizer: optimizer.minimize(loss), [mean])
    for our_round, their_round in zip(ours, theirs, strict=True):
        assert our_round[:2] == their_round[:2]  # the beta powers
        np.testing.assert_allclose(our_round[2:], their_round[2:], 1e-6, 1e-6)


def test_accumulator():
    """lingvo, lingvo/core/optimizer_test.py, testAccumulator.

    There the accumulator is 0 after an update. Here the sum stays until the next
    window's first micro-step overwrites it.
    """
    first = np.random.RandomState(12345).normal(0.1, 0.5, [2, 4, 3])
    second = np.random.RandomState(12346).normal(0.1, 0.5, [2, 4, 3])
    inputs = v1.placeholder(tf.float64, [2, 4, 3])
    start = np.random.RandomState(123456).normal(0.0, 0.01, [3, 2])
    weights = v1.get_variable("w", initializer=start)
    loss = tf.reduce_sum(tf.nn.relu(tf.tensordot(inputs, weights, 1)))
    (gradient,) = tf.gradients(loss, weights)
    rate = tf.constant(0.1, tf.float64)  # of a Python float it makes float32's 0.1
    train_op = by_minimize(loss, v1.train.GradientDescentOptimizer(rate), 2)
    accumulator = next(v for v in v1.global_variables() if v.op.name == "w/accumulator")
    with start_session() as session:
        gradients = [session.run(gradient, {inputs: x}) for x in (first, second)]
        assert not np.any(session.run(accumulator))
        session.run(train_op, {inputs: first})
        np.testing.assert_allclose(session.run(accumulator), gradients[0], rtol=1e-14)
        np.testing.assert_array_equal(session.run(weights), start)
        session.run(train_op, {inputs: second})
        expected = start - 0.5 * 0.1 * (gradients[0] + gradients[1])
        updated = session.run(weights)
        np.testing.assert_allclose(updated, expected, rtol=1e-14)
        assert not np.any(updated == start)
        again = session.run(gradient, {inputs: second})
        session.run(train_op, {inputs: second})
        np.testing.assert_allclose(session.run(accumulator), again, rtol=1e-14)


class _Adding(v1.train.Optimizer):
    """Adds the gradient to the variable, so that a value tells what was applied."""

    def __init__(self):
        super().__init__(False, "Adding")

    def _resource_apply_dense(self, grad, var):
        return var.assign_add(grad, read_value=False)

    def _resource_apply_sparse(self, grad, var, indices):
        return tf.raw_ops.ResourceScatterAdd(
            resource=var.handle, indices=indices, updates=grad
        )


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("accumulate", ALL)
def test_local_gradient_aggregation(accumulate, is_sparse):
    """Horovod, test/parallel/test_tensorflow.py, test_local_gradient_aggregation.

    And test_local_gradient_aggregation_sparse: the same through `IndexedSlices`.
    """
    variable = v1.get_variable("x", initializer=[0.0, 0.0, 7.0])
    found = tf.gather(variable, [0, 1]) if is_sparse else variable[:2]
    train_op = accumulate(3 * tf.reduce_sum(found), _Adding(), 4)
    global_step = v1.train.get_global_step()
    with start_session() as session:
        for micro_step in range(10):
            assert session.run(global_step) == micro_step
            session.run(train_op)
            expected = 3 * ((micro_step + 1) // 4)
            assert session.run(variable).tolist() == [expected, expected, 7]


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
    found = tf.gather(variable, [0]) if is_sparse else variable[:1]
    optimizer = v1.train.GradientDescentOptimizer(0.01)
    loss = gradient * tf.reduce_sum(found)
    train_op = accumulate(loss, optimizer, 2, on_nonfinite=on_nonfinite)
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
    variables = [
        v1.get_variable("var0", initializer=[[1.0, 2.0]]),
        v1.get_variable("var1", initializer=[3.0]),
    ]
    predicted = tf.matmul(variables[0], x, transpose_b=True) + variables[1]
    loss = tf.reduce_mean(predicted)
    train_op = by_minimize(loss, v1.train.GradientDescentOptimizer(1.0), 2)
    state = [*variables, get_or_create_update_step()]
    first, second = [[2, 0], [0, 1]], [[4, 2], [2, 1]]
    table = [
        (first, [[1, 2]], 3, 0),
        (second, [[-1, 1]], 2, 1),
        (second, [[-1, 1]], 2, 1),
        (second, [[-4, -0.5]], 1, 2),
    ]
    with start_session() as session:
        for fed, var0, var1, updates in table:
            session.run(train_op, {x: fed})
            values = session.run(state)
            assert [v.tolist() for v in values] == [var0, [var1], updates]
