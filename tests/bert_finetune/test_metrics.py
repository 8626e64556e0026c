"""GLUE's metrics over batches equal their definitions on the whole set."""

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import metrics

v1 = tf.compat.v1
NAMES = ("accuracy", "f1", "matthews_correlation")


def _evaluate(labels, predicted):
    with tf.Graph().as_default(), v1.Session() as session:
        label = v1.placeholder(tf.int32, [None])
        prediction = v1.placeholder(tf.int32, [None])
        logits, losses = tf.one_hot(prediction, 2), tf.cast(label, tf.float32)
        ops = metrics.eval_metric_ops(NAMES, label, logits, losses)
        session.run(v1.local_variables_initializer())
        for start in range(0, len(labels), 7):
            part = slice(start, start + 7)
            feed = {label: labels[part], prediction: predicted[part]}
            session.run([update for _, update in ops.values()], feed)
        return session.run({name: value for name, (value, _) in ops.items()})


def test_metrics_equal_their_definitions():
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 1043)
    predicted = np.where(random.random(1043) < 0.7, labels, 1 - labels)
    values = _evaluate(labels, predicted)
    tp = np.sum((labels == 1) & (predicted == 1))
    fp = np.sum((labels == 0) & (predicted == 1))
    fn = np.sum((labels == 1) & (predicted == 0))
    correlation = np.corrcoef(labels, predicted)[0, 1]  # the same for two classes
    np.testing.assert_allclose(values["matthews_correlation"], correlation, rtol=1e-5)
    np.testing.assert_allclose(values["f1"], 2 * tp / (2 * tp + fp + fn), rtol=1e-6)
    accuracy = np.mean(labels == predicted)
    np.testing.assert_allclose(values["eval_accuracy"], accuracy, rtol=1e-6)
    np.testing.assert_allclose(values["eval_loss"], labels.mean(), rtol=1e-6)
    assert values["only_class"] == -1


def test_metrics_of_several_labels_equal_their_definitions():
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, [40, 3]).astype(np.int32)
    labels[:, 2] = 1  # which no curve has
    logits = (random.normal(size=[40, 3]) + labels).round(1)
    with tf.Graph().as_default(), v1.Session() as session:
        label = v1.placeholder(tf.int32, [None, 3])
        logit = v1.placeholder(tf.float32, [None, 3])
        ops = metrics.eval_metric_ops(("f1", "roc_auc"), label, logit, logit[:, 0])
        session.run(v1.local_variables_initializer())
        for part in np.split(np.arange(40), [7, 19]):
            feed = {label: labels[part], logit: logits[part]}
            session.run([update for _, update in ops.values()], feed)
        values = session.run({name: value for name, (value, _) in ops.items()})
    is_true, is_predicted = labels == 1, logits > 0
    correct = np.sum(is_true & is_predicted)
    f1 = 2 * correct / (is_true.sum() + is_predicted.sum())
    assert values["f1"] == pytest.approx(f1, 1e-6)
    areas = []
    for column in range(2):
        positive = logits[is_true[:, column], column, None]
        negative = logits[~is_true[:, column], column]
        wins = (positive > negative) + (positive == negative) / 2
        areas.append(np.mean(wins))
    assert values["roc_auc"] == pytest.approx(np.mean(areas), 1e-6)


@pytest.mark.parametrize(("last", "only"), [(1, 1), (0, -1)])
def test_the_only_class_is_that_of_all_batches(last, only):
    predicted = np.array([1] * 9 + [last])
    assert _evaluate(np.arange(10) % 2, predicted)["only_class"] == only


@pytest.mark.parametrize("is_constant", [False, True])
def test_correlations_equal_their_definitions_with_ties_and_are_0_for_a_constant(
    is_constant,
):
    random = np.random.default_rng(0)
    labels = np.round(random.uniform(0, 5, 101), 0).astype(np.float32)
    scores = (np.exp(labels) + random.normal(0, 20, 101)).round(-1).astype(np.float32)
    if is_constant:
        scores[:] = 3
    with tf.Graph().as_default(), v1.Session() as session:
        label, score = (v1.placeholder(tf.float32, [None]) for _ in range(2))
        ops = metrics.eval_metric_ops(
            ("pearson", "spearman"), label, score[:, tf.newaxis], label
        )
        session.run(v1.local_variables_initializer())
        for part in (slice(0, 64), slice(64, 101)):
            feed = {label: labels[part], score: scores[part]}
            session.run([update for _, update in ops.values()], feed)
        results = session.run({name: value for name, (value, _) in ops.items()})
    assert results.keys() == {"eval_loss", "pearson", "spearman"}
    if is_constant:
        assert results["pearson"] == results["spearman"] == 0
        return
    ranks = [
        [np.mean(np.flatnonzero(np.sort(x) == v)) for v in x] for x in (labels, scores)
    ]
    pearson, spearman = (np.corrcoef(*pair)[0, 1] for pair in ((labels, scores), ranks))
    assert results["pearson"] == pytest.approx(pearson, rel=1e-9)
    assert results["spearman"] == pytest.approx(spearman, rel=1e-9)


@pytest.mark.parametrize("predicted", [0, 1])
def test_a_constant_prediction_has_no_correlation(predicted):
    results = _evaluate([0, 1, 1], [predicted] * 3)
    assert results["matthews_correlation"] == 0
