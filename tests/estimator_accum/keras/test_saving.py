"""Models saved in mid-window resume exactly; optimizers of Estimators."""

import functools
import importlib

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.compat import enable_estimator
from estimator_accum.keras import accumulate
from tests.helpers.models.keras_kinds import (
    Kind,
    dense_data,
    difference,
    fit,
    sparse_data,
)
from tests.helpers.processes import running

_FORMATS = ["model.keras", "model.h5", "only.weights.h5", "checkpoint"]


def _adam(kind):
    return accumulate(kind.optimizer("Adam", 0.05), 2)


def _save_and_load(kind, model, path, make):
    """Saves a model; returns a new one that accumulates, loaded from the file."""
    if path.name.startswith("model"):
        model.save(path)
        custom = {"Summing": type(model)}
        return kind.keras.models.load_model(path, custom_objects=custom)
    loaded = make()
    loaded.compile(_adam(kind), "mse", jit_compile=False)
    loaded.optimizer.build(loaded.trainable_variables)
    if path.name == "checkpoint":
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        written = checkpoint.write(str(path))
        checkpoint = tf.train.Checkpoint(model=loaded, optimizer=loaded.optimizer)
        checkpoint.read(written).assert_nontrivial_match()
    else:
        model.save_weights(path)
        loaded.load_weights(path)
    return loaded


@functools.cache
def _weights_of_one_run(root, kind_name):
    """Returns the weights after all 8 batches in one `fit`, in windows of 2."""
    kind = Kind(root, kind_name)
    model = kind.sparse_model()
    fit(model, _adam(kind), sparse_data(64), 8)
    return model.get_weights()


@pytest.mark.parametrize("file", _FORMATS)
def test_training_goes_on_in_mid_window(kind, file, tmp_path):
    if kind.is_legacy and file in ("model.keras", "only.weights.h5"):
        pytest.skip("Keras 2 saves no state of optimizers.legacy in these formats")
    if kind.is_3 and file == "model.h5":
        pytest.skip("Keras 3 builds an optimizer without variables to read h5 files")
    x, y = sparse_data(64)
    expected = _weights_of_one_run(*kind.name)
    model = kind.sparse_model()
    fit(model, _adam(kind), (x[:24], y[:24]), 8)
    loaded = _save_and_load(kind, model, tmp_path / file, kind.sparse_model)
    assert int(loaded.optimizer.micro_steps.numpy()) == 1
    loaded.fit(x[24:], y[24:], batch_size=8, shuffle=False, verbose=0)
    for theirs, ours in zip(expected, loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("file", ["checkpoint", "only.weights.h5"])
def test_state_of_the_plain_optimizer_can_be_read(kind, file, tmp_path):
    """Training then resumes with accumulation."""
    if kind.is_legacy and file != "checkpoint":
        pytest.skip("Keras 2 saves no state of optimizers.legacy in this format")
    x, y = dense_data(64)
    reference, model = kind.dense_model(), kind.dense_model()
    fit(reference, kind.optimizer("Adam", 0.05), (x, y), 32)
    fit(model, kind.optimizer("Adam", 0.05), (x[:32], y[:32]), 32)
    loaded = _save_and_load(kind, model, tmp_path / file, kind.dense_model)
    loaded.optimizer.gradient_accumulation_steps = 4
    loaded.fit(x[32:], y[32:], batch_size=8, shuffle=False, verbose=0)
    assert difference(reference, loaded) < 1e-6


def test_config_makes_the_same_optimizer(kind):
    optimizer = accumulate(
        kind.optimizer("Adam", 0.125, clipnorm=2.0), 3, on_nonfinite="skip_window"
    )
    keras = kind.keras
    config = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(config)
    assert type(again) is type(optimizer)
    assert again.gradient_accumulation_steps == 3
    assert again.on_nonfinite == "skip_window"
    assert again.clipnorm == 2.0
    assert float(again.learning_rate) == 0.125


def test_a_new_process_needs_one_import_to_load_a_model(kind, tmp_path):
    model = kind.dense_model()
    fit(model, _adam(kind), dense_data(24), 8)
    model.save(tmp_path / "model.h5" if kind.is_legacy else tmp_path / "model.keras")
    path = next(tmp_path.iterdir())
    code = (
        f"import estimator_accum.keras, {kind.keras.__name__} as keras\n"
        f"model = keras.models.load_model({str(path)!r})\n"
        "print(int(model.optimizer.micro_steps.numpy()))"
    )
    assert running.run("-c", code).stdout.split()[-1] == "1"


def test_model_to_estimator_counts_micro_steps_and_updates_by_windows(kind, tmp_path):
    if not kind.is_legacy:
        pytest.skip("model_to_estimator takes optimizers.legacy only")
    enable_estimator()
    name = "tensorflow_estimator.python.estimator.keras_lib"
    keras_lib = importlib.import_module(name)
    x, y = dense_data(96)

    def train(optimizer, name, batch, calls):
        model = kind.dense_model()
        model.compile(optimizer, "mse")
        config = tf.estimator.RunConfig(log_step_count_steps=None)
        folder = str(tmp_path / name)
        estimator = keras_lib.model_to_estimator(model, model_dir=folder, config=config)
        features = {model.input_names[0]: x}

        def input_fn(first):
            data = tf.data.Dataset.from_tensor_slices((features, y))
            return data.batch(batch).skip(first)

        for first, steps in enumerate(calls):
            estimator.train(functools.partial(input_fn, first * steps), steps=steps)
        return estimator

    whole = train(kind.optimizer("Adam", 0.05), "whole", 32, [3])
    ours = train(accumulate(kind.optimizer("Adam", 0.05), 4), "ours", 8, [6, 6])
    plain = train(accumulate(kind.optimizer("Adam", 0.05), 1), "plain", 32, [3])
    names = [n for n in whole.get_variable_names() if "layer_with_weights" in n]
    assert len(names) == 12  # four variables, two slots each
    for name in names:
        value = whole.get_variable_value(name)
        np.testing.assert_array_equal(plain.get_variable_value(name), value)
        got = ours.get_variable_value(name)
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-7)
    step = "estimator_global_step/.ATTRIBUTES/VARIABLE_VALUE"
    assert ours.get_variable_value(step) == 12
