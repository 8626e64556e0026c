"""Cases from the tests of PyTorch trainers, with their numbers."""

import numpy as np
import pytest
import tensorflow as tf
from interfaces import (
    ALL,
    apply_partial_window,
    by_minimize,
    fed_gradients,
    start_session,
)

from estimator_accum import get_or_create_update_step, get_windows

pytestmark = pytest.mark.once
v1 = tf.compat.v1

_VOCABULARY, _TOKENS = 30, 16


@pytest.fixture(autouse=True)
def _fresh_graph():
    with tf.Graph().as_default():
        yield


def _make_text():
    """Token ids [5, 8, _TOKENS] and their mask: of five batches of 8 lines.

    In each batch four lines are one token long, as headings and empty lines of a corpus,
    and four are full.
    """
    random = np.random.default_rng(42)
    start = random.integers(0, _VOCABULARY, [5, 8, 1])
    ids = (start + np.arange(_TOKENS)) % _VOCABULARY
    lengths = np.array([2] * 4 + [_TOKENS] * 4)
    ids[:, :4, 1] = random.integers(0, _VOCABULARY, [5, 4])
    return ids, np.broadcast_to(np.arange(_TOKENS) < lengths[:, None], ids.shape)


def _train_language_model(steps, is_weighted=True, is_summed=False):
    """Returns the loss of each update of a bigram model, as a log of it would be."""
    ids, mask = _make_text()
    with tf.Graph().as_default():
        fed_ids = v1.placeholder(tf.int64, [None, _TOKENS])
        fed_mask = v1.placeholder(tf.float32, [None, _TOKENS])
        follows = 5 * np.roll(np.eye(_VOCABULARY, dtype=np.float32), 1, axis=1)
        table = v1.get_variable("table", initializer=follows)
        token_losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=fed_ids[:, 1:], logits=tf.gather(table, fed_ids[:, :-1])
        )
        tokens = tf.reduce_sum(fed_mask[:, 1:])
        loss = tf.reduce_sum(token_losses * fed_mask[:, 1:])
        train_op = by_minimize(
            loss if is_summed else loss / tokens,
            v1.train.AdamOptimizer(0.1),
            steps,
            weight=tokens if is_weighted else None,
        )
        window = get_windows()[0]
        losses = []
        with start_session() as session:
            for batch in zip(ids, mask, strict=True):
                for part in np.split(np.arange(8), steps):
                    fed = {fed_ids: batch[0][part], fed_mask: batch[1][part]}
                    _, window_loss = session.run([train_op, window.loss], fed)
                losses.append(window_loss)
        return np.array(losses)


def test_gradient_accumulation_loss_alignment():
    """transformers, test_trainer.py, ..._loss_alignment_with_model_loss, _with_loss_func.

    Five updates of a language model, 8 x 1 against 4 x 2: the logged losses are within
    0.01 with the number of tokens for weight. The deliberately broken runs are not: the
    unweighted mean of means is more than 0.7 off, a sum for a mean more than 3.
    """
    whole = _train_language_model(1)
    ours = _train_language_model(2)
    means = _train_language_model(2, is_weighted=False)
    sums = _train_language_model(2, is_weighted=False, is_summed=True)
    assert np.max(np.abs(ours - whole)) < 0.01
    assert np.max(np.abs(means - whole)) > 0.7
    assert np.max(np.abs(sums - whole)) > 3
    assert whole[-1] < whole[0]


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
    """transformers and Lightning: the last window of an epoch may be short."""
    (gradient,), (variable,), loss = fed_gradients(0.0)
    train_op = by_minimize(loss, v1.train.GradientDescentOptimizer(1.0), steps)
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

    Parameters change every second micro-batch and after the last one; the learning rate
    is that of training on the joined batches, after each micro-step.
    """
    (gradient,), (variable,), loss = fed_gradients(0.0)
    rate = v1.train.exponential_decay(1.0, get_or_create_update_step(), 1, 0.5)
    train_op = accumulate(loss, v1.train.GradientDescentOptimizer(rate), 2)
    values = [4.0, 2.0, 8.0, 0.0, 16.0]
    expected_value, expected_rate = 0.0, 1.0
    with start_session() as session:
        for index, value in enumerate(values):
            session.run(train_op, {gradient: value})
            is_last = index == len(values) - 1
            if is_last:
                apply_partial_window(session)
            if is_last or index % 2 == 1:
                window = values[index - index % 2 : index + 1]
                expected_value -= expected_rate * np.mean(window)
                expected_rate /= 2
            assert session.run([variable, rate]) == [expected_value, expected_rate]
    assert expected_value == -(3.0 + 2.0 + 4.0)
