"""The gradient noise scale against its analytic value."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import get_windows, make_accumulating_train_op
from tests.helpers.models.interfaces import (
    after_each,
    by_apply_gradients,
    by_minimize,
    sgd,
    start_session,
)

pytestmark = pytest.mark.once

v1 = tf.compat.v1

# Every example's gradient is SIGNAL + noise of covariance NOISE**2 * identity, whatever
# the weights are: a loss that is linear in them. tr(Sigma) / |G|^2 is known.
SIGNAL = np.array([0.3, -0.4, 1.2])  # |G| = 1.3
NOISE = 2.0
EXPECTED = 3 * NOISE**2 / np.sum(SIGNAL**2)  # 7.1 examples


def _noise_scales(train_op, feeds):
    """Returns the noise scale after each micro-step."""
    fetches = [get_windows()[0].noise_scale, train_op]
    with start_session() as session:
        return [session.run(fetches, feed)[0] for feed in feeds]


def _estimate(sizes, weigh_examples=True, sparse=False, seed=0):
    """Returns the noise scale after 300 windows of micro-batches of `sizes`."""
    random = np.random.default_rng(seed)
    with tf.Graph().as_default():
        examples = v1.placeholder(tf.float32, [None, 3])
        x = v1.get_variable("x", initializer=np.zeros([3, 1], np.float32))
        # Rows 0, 1 and 2, each looked up twice: the norm is that of the summed rows.
        rows = (tf.gather(x, [0, 1, 2] * 2) if sparse else tf.concat([x, x], 0)) / 2
        loss = tf.reduce_mean(tf.matmul(tf.concat([examples, examples], 1), rows))
        weight = tf.shape(examples)[0] if weigh_examples else None
        options = {"weight": weight, "noise_scale": True}
        train_op = make_accumulating_train_op(loss, sgd(1e-3), len(sizes), **options)
        noise_scale = get_windows()[0].noise_scale
        with start_session() as session:
            run = session.make_callable([noise_scale, train_op], [examples])
            for size in sizes * 300:
                scale, _ = run(SIGNAL + NOISE * random.normal(size=[size, 3]))
    return float(scale)


@pytest.mark.parametrize(
    ("sizes", "sparse"),
    [([2, 10, 20], True), ([8] * 4, False)],
)
def test_it_is_the_analytic_value_in_examples(sizes, sparse):
    # The estimator averages over about a hundred updates of 32 examples each.
    scale = np.mean([_estimate(sizes, sparse=sparse, seed=i) for i in range(4)])
    assert scale == pytest.approx(EXPECTED, rel=0.1)


def _of_slopes(weights, slopes, make=make_accumulating_train_op):
    """Returns the noise scale of one window of micro-batches."""
    with tf.Graph().as_default():
        weight, slope = (v1.placeholder(tf.float32, []) for _ in range(2))
        loss = v1.get_variable("x", initializer=0.0) * slope
        options = {"weight": weight, "noise_scale": True}
        train_op = make(loss, sgd(), len(weights), **options)
        pairs = zip(weights, slopes, strict=True)
        feeds = [{weight: w, slope: g} for w, g in pairs]
        return _noise_scales(train_op, feeds)[-1]


def test_a_micro_batch_of_weight_zero_does_not_count():
    scale = _of_slopes([1, 0, 1], [2, 7, 3])
    assert scale == pytest.approx(_of_slopes([1, 1], [2, 3]))


@pytest.mark.parametrize("make", [by_minimize, by_apply_gradients])
def test_it_is_the_same_by_every_interface(make):
    expected = _of_slopes([2, 5], [3, 4])
    assert _of_slopes([2, 5], [3, 4], make) == pytest.approx(expected)


def test_without_weights_its_unit_is_the_micro_batch():
    scale = np.mean([_estimate([8] * 4, False, seed=i) for i in range(4)])
    assert scale == pytest.approx(EXPECTED / 8, rel=0.1)


def test_it_is_off_by_far_if_micro_batches_were_one_batch():
    """The control: two copies of one micro-batch have no noise between them."""
    with tf.Graph().as_default():
        loss = tf.reduce_sum(v1.get_variable("x", initializer=[1.0, 2.0]))
        train_op = make_accumulating_train_op(loss, sgd(), 2, noise_scale=True)
        assert _noise_scales(train_op, [{}, {}])[-1] == pytest.approx(0.0, abs=1e-6)


def test_it_moves_no_weight():
    def train(noise_scale):
        with tf.Graph().as_default():
            x = v1.get_variable("x", initializer=[1.0, 2.0])
            adam, more = v1.train.AdamOptimizer(), {"noise_scale": noise_scale}
            train_op = make_accumulating_train_op(tf.reduce_sum(x**2), adam, 3, **more)
            return after_each(train_op, [{}] * 9, x)[-1]

    np.testing.assert_array_equal(train(True), train(False))


def test_one_micro_batch_a_window_has_no_noise_to_compare():
    sentence = r"there must be two\. Received: .*=1 on one rep"
    with tf.Graph().as_default(), pytest.raises(ValueError, match=sentence):
        x = v1.get_variable("x", initializer=1.0)
        make_accumulating_train_op(x * x, sgd(), 1, noise_scale=True)


def test_a_window_of_one_micro_batch_changes_nothing():
    with tf.Graph().as_default():
        slope = v1.placeholder(tf.float32, [])
        loss = v1.get_variable("x", initializer=0.0) * slope

        def steps(update_step):
            return tf.where(update_step < 1, 2, 1)

        train_op = make_accumulating_train_op(loss, sgd(0.1), steps, noise_scale=True)
        scales = _noise_scales(train_op, [{slope: value} for value in (1, 3, 5)])
    assert scales[1] == scales[2] > 0
