"""Micro-batches that end with examples without entries train as the batch does."""

import itertools
import json

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import make_accumulating_train_op, microbatch_model_fn
from tests.helpers.models.interception import cut, train
from tests.helpers.tables import rows

v1 = tf.compat.v1
_IDS = np.tile(np.arange(6)[None], [8, 1]) * (np.arange(6) < 3)
_IDS[[1, 3, 4]] = 0  # the last ones of pairs, and a whole pair's first
_BATCH = (
    {"ids": _IDS.astype(np.int32)},
    np.linspace(-1, 1, 8, dtype=np.float32)[:, None],
)


def _weighted(table, words):
    weights = words.with_values(tf.cast(words.values, tf.float32) / 5)
    return tf.nn.embedding_lookup_sparse(table, words, weights, combiner="mean")


def _segments(reduce):
    return lambda table, words: reduce(
        tf.gather(table, words.values), words.indices[:, 0]
    )


_LOOKUPS = {
    "sum": lambda *args: tf.nn.embedding_lookup_sparse(*args, None, combiner="sum"),
    "weighted": _weighted,
    "means": _segments(tf.math.segment_mean),
    "products": _segments(tf.math.segment_prod),
}


def _model_fn(name, minimize):
    def model_fn(features, labels, mode):
        start = np.linspace(-1, 1, 18, dtype=np.float32).reshape(6, 3)
        table = v1.get_variable("table", initializer=start)
        rows = _LOOKUPS[name](table, tf.sparse.from_dense(features["ids"]))
        start = np.linspace(1, -1, 3, dtype=np.float32)[:, None]
        weights = v1.get_variable("weights", initializer=start)
        predicted = tf.matmul(tf.tanh(rows) + 0.1, weights)
        loss = tf.reduce_mean(tf.square(predicted - labels))
        if mode != tf.estimator.ModeKeys.TRAIN:
            metrics = {"mean": v1.metrics.mean(predicted)}
            return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=minimize(loss))

    return model_fn


def _optimizer():
    return v1.train.AdamOptimizer(0.01)


def _minimize(loss):
    return _optimizer().minimize(loss, v1.train.get_global_step())


def _declared(loss):
    return make_accumulating_train_op(loss, _optimizer(), 1, clip_norm=None)


_DAILY = {*itertools.product(["sum", "weighted"], [_declared])}
_DAILY |= {*itertools.product(["means", "products"], [_minimize])}


@pytest.mark.parametrize(
    ("name", "minimize"),
    rows(itertools.product(_LOOKUPS, [_minimize, _declared]), _DAILY),
)
def test_a_micro_batch_may_end_with_an_example_without_entries(name, minimize):
    theirs, plain = train(_model_fn(name, _minimize), _BATCH, 2)
    ours, losses = train(cut(_model_fn(name, minimize)), _BATCH, 2)
    np.testing.assert_allclose(losses, plain, 1e-5)
    for variable, value in theirs.items():
        np.testing.assert_allclose(ours[variable], value, 1e-5, 1e-6)


def test_an_evaluation_knows_examples_without_entries(tmp_path):
    def input_fn():
        return tf.data.Dataset.from_tensors(_BATCH)

    model_fn = _model_fn("sum", _minimize)
    plain = tf.estimator.Estimator(model_fn, tmp_path)
    plain.train(input_fn)
    (tmp_path / "micro_batches-eval.json").write_text(json.dumps({"micro_batches": 4}))
    ours = tf.estimator.Estimator(microbatch_model_fn(model_fn), tmp_path)
    received, expected = ours.evaluate(input_fn), plain.evaluate(input_fn)
    assert received == pytest.approx(expected, 1e-5)
