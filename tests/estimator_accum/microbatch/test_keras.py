"""TensorFlow 2's canned estimators, whose optimizers are Keras's, in micro-batches."""

import pytest
import tensorflow as tf

from estimator_accum import microbatch_model_fn
from tests.helpers.models import microbatch_runs
from tests.helpers.models.microbatch_runs import (
    variables_of,
    word_columns,
    words_input_fn,
)

_BATCHES = 3  # the batches of words_input_fn


def _deep(optimizer):
    numeric, _, embedded = word_columns()
    return lambda folder, config: tf.estimator.DNNClassifier(
        [4], [numeric, embedded], optimizer=optimizer, model_dir=folder, config=config
    )


def _wide_and_deep(folder, config):
    numeric, words, _ = word_columns()
    return tf.estimator.DNNLinearCombinedRegressor(
        linear_feature_columns=[words],
        linear_optimizer=lambda: tf.keras.optimizers.legacy.SGD(0.01),
        dnn_feature_columns=[numeric],
        dnn_hidden_units=[4],
        dnn_optimizer=lambda: tf.keras.optimizers.legacy.Adam(0.01),
        loss_reduction=tf.keras.losses.Reduction.SUM,
        model_dir=folder,
        config=config,
    )


_SGD = tf.keras.optimizers.legacy.SGD
_ESTIMATORS = {
    "adam": (_deep(lambda: tf.keras.optimizers.legacy.Adam(0.01)), "mean"),
    "default": (_deep("Adagrad"), "mean"),
    "clipped": (_deep(lambda: _SGD(0.5, global_clipnorm=0.1)), "mean"),
    "wide_and_deep": (_wide_and_deep, "sum"),
}


@pytest.mark.parametrize("name", _ESTIMATORS)
def test_canned_estimators_of_tensorflow_2_train_in_micro_batches(name, tmp_path):
    make, reduction = _ESTIMATORS[name]
    config = tf.estimator.RunConfig(tf_random_seed=3)
    plain = make(str(tmp_path / "plain"), config)
    # Stops before the end of the data, where TensorFlow's Adam decays an embedding's
    # slots once more.
    plain.train(words_input_fn, max_steps=_BATCHES)
    expected = variables_of(plain)
    # One micro-batch is exact, except for the order in which an embedding's rows sum.
    count, tolerance = (1, 1e-7) if name == "default" else (4, 1e-6)
    folder = str(tmp_path / "ours")
    model_fn = make(folder, config).model_fn
    model_fn = microbatch_model_fn(model_fn, count, reduction=reduction)
    ours = tf.estimator.Estimator(model_fn, folder, config)
    ours.train(words_input_fn, max_steps=_BATCHES)
    values = variables_of(ours)
    added = values.keys() - expected.keys()
    assert all("update_step" in name for name in added)
    assert values["global_step"] == _BATCHES
    assert microbatch_runs.difference(values, expected) <= tolerance
    if name == "default":  # ours evaluates like the plain one
        assert ours.evaluate(words_input_fn)["global_step"] == _BATCHES
