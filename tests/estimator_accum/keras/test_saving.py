"""Models saved in mid-window resume exactly; optimizers of Estimators."""

import copy
import functools
import importlib
import itertools
import pickle

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.compat import enable_estimator
from estimator_accum.keras import accumulate
from tests.helpers.models.keras_kinds import (
    KINDS,
    Kind,
    dense_data,
    difference,
    fit,
    marks_of,
    sparse_data,
)
from tests.helpers.processes import running

_EVERY_OPTIMIZER = [(pair, name) for pair in KINDS for name in Kind(*pair).names()]
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


def test_an_optimizer_that_is_restored_before_its_build_saves_its_window(tmp_path):
    kind = Kind(*KINDS[0])
    x, y = dense_data(16)

    def restored(path):
        model = kind.dense_model()
        model.compile(_adam(kind), "mse", jit_compile=False)
        if path is not None:
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
        return model

    path, model = None, restored(None)
    for i in range(0, 16, 4):
        part = restored(path)
        for network in (part, model):
            network.train_on_batch(x[i : i + 4], y[i : i + 4])
        checkpoint = tf.train.Checkpoint(model=part, optimizer=part.optimizer)
        path = checkpoint.save(str(tmp_path / "checkpoint"))
    for expected, got in zip(_state(model), _state(part), strict=True):
        np.testing.assert_array_equal(got, expected)


def _why_the_plain_optimizer_does_not_resume(kind, name, file) -> str | None:
    if kind.is_legacy and file == "model.keras":
        return "Keras 2 saves no state of optimizers.legacy in this format"
    if kind.is_3 and file == "model.h5":
        return "Keras 3 builds an optimizer without variables to read h5 files"
    if name == "Nadam" and not kind.is_3 and not kind.is_legacy:
        return "Keras 2 does not save a variable of Nadam, `_u_product`"
    return None


def _state(model) -> list[np.ndarray]:
    variables = model.optimizer.variables
    variables = variables() if callable(variables) else variables
    return [*model.get_weights(), *(v.numpy() for v in variables)]


def _check_that_training_resumes(kind, optimizer, path, **options):
    """Trains half, saves, and trains the other half with and without loading."""
    model = kind.dense_model()
    x, y = dense_data(24)
    loss = kind.keras.losses.MeanSquaredError()
    fit(model, optimizer, (x[:12], y[:12]), 4, loss=loss, run_eagerly=True)
    model.save(path)
    loaded = kind.keras.models.load_model(path, **options)
    loaded.run_eagerly = True
    for network in (model, loaded):
        network.fit(x[12:], y[12:], batch_size=4, shuffle=False, verbose=0)
    for expected, got in zip(_state(model), _state(loaded), strict=True):
        np.testing.assert_array_equal(got, expected)
    return loaded.optimizer


def _every_optimizer():
    """Yields rows; all but those of some optimizers are daily.

    So are those of Keras alone, since they run no line of ours.
    """
    files = ("model.keras", "model.h5")
    for (pair, name), file in itertools.product(_EVERY_OPTIMIZER, files):
        reason = _why_the_plain_optimizer_does_not_resume(Kind(*pair), name, file)
        is_daily = reason or name not in ("Adagrad", "Adam", "LossScaleOptimizer")
        marks = [*marks_of(pair), *[pytest.mark.daily] * bool(is_daily)]
        yield pytest.param(
            pair, name, file, id="-".join([*pair, name, file]), marks=marks
        )


@pytest.mark.parametrize(
    ("kind", "name", "file"), list(_every_optimizer()), indirect=["kind"]
)
def test_every_optimizer_resumes_in_mid_window(kind, name, file, tmp_path):
    reason = _why_the_plain_optimizer_does_not_resume(kind, name, file)
    optimizer = kind.any_optimizer(name)
    if reason:
        with pytest.raises((AssertionError, ValueError)):
            _check_that_training_resumes(kind, optimizer, tmp_path / file)
        pytest.skip(reason)
    optimizer = accumulate(optimizer, 2)
    again = _check_that_training_resumes(kind, optimizer, tmp_path / file)
    assert type(again) is type(optimizer)
    assert type(again.inner_optimizer) is type(optimizer.inner_optimizer)


def _own_objects(kind) -> dict:
    """Returns a user's classes and functions by name."""

    class Adam(type(kind.optimizer("SGD"))):
        """An optimizer that must not be taken for the built-in one of its name."""

    class Decay(kind.keras.optimizers.schedules.ExponentialDecay):
        """A schedule."""

    def two(updates):
        return tf.cast(2 + 0 * updates, tf.int64)

    def half():
        return tf.constant(0.5)

    return {member.__name__: member for member in (Adam, Decay, two, half)}


@pytest.mark.parametrize("is_registered", [True, False])
@pytest.mark.parametrize("file", ["model.keras", "model.h5"])
def test_own_classes_and_functions_are_found(kind, file, is_registered, tmp_path):
    reason = _why_the_plain_optimizer_does_not_resume(kind, "Adam", file)
    if reason:
        pytest.skip(reason)
    objects = _own_objects(kind)
    options = {} if is_registered else {"custom_objects": objects}
    if is_registered:
        register = kind.keras.saving.register_keras_serializable("_".join(kind.name))
        objects = {name: register(member) for name, member in objects.items()}
    sgd = objects["Adam"](objects["Decay"](0.05, 1, 0.5), momentum=0.9)
    optimizer = accumulate(sgd, objects["two"], weight=objects["half"])
    again = _check_that_training_resumes(kind, optimizer, tmp_path / file, **options)
    assert type(again.inner_optimizer) is objects["Adam"]
    # Keras 2 looks for a function's name in all packages.
    assert again.gradient_accumulation_steps.__name__ == "two"
    assert again.weight.__name__ == "half"


def test_a_function_that_no_file_can_hold_is_refused_by_save(kind, tmp_path):
    variable = tf.Variable(1.0)
    optimizer = accumulate(kind.optimizer("SGD", 1.0), 2, weight=variable.read_value)
    model = kind.dense_model()
    model.compile(optimizer, "mse")
    with pytest.raises(
        TypeError, match="`weight` must be a function, or an object with"
    ):
        model.save(tmp_path / "model.keras")


def test_a_loss_scale_around_it_is_found(kind, tmp_path):
    optimizer = accumulate(kind.optimizer("Adam", 0.05), 2)
    optimizer = kind.keras.mixed_precision.LossScaleOptimizer(optimizer)
    path = tmp_path / ("model.h5" if kind.is_legacy else "model.keras")
    again = _check_that_training_resumes(kind, optimizer, path)
    assert again.inner_optimizer.gradient_accumulation_steps == 2


_IN_A_SESSION = """
import numpy as np, sys, tensorflow as tf
from estimator_accum.keras import accumulate
root, behavior, path = sys.argv[1:]
tf.compat.v1.disable_v2_behavior()
if behavior == "graphs":
    tf.compat.v1.enable_v2_behavior()
    tf.compat.v1.disable_eager_execution()
keras = __import__(root)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(accumulate(keras.optimizers.legacy.Adam(0.1), 2), "mse")
data = dict(x=np.ones([12, 1]), y=np.ones([12, 1]), batch_size=4, verbose=0)
model.fit(**data)
model.save(path)
loaded = keras.models.load_model(path)
assert loaded.optimizer.get_weights()[5] == 1  # micro-steps
for each in (model, loaded):
    each.fit(**data)
for ours, theirs in zip(loaded.get_weights(), model.get_weights()):
    np.testing.assert_array_equal(ours, theirs)
"""


@pytest.mark.parametrize("behavior", ["TensorFlow 1", "graphs"])
def test_sessions_resume_too(kind, behavior, tmp_path):
    if not kind.is_legacy:
        pytest.skip("sessions take optimizers.legacy only")
    path = tmp_path / "model.h5"
    done = running.run("-c", _IN_A_SESSION, kind.keras.__name__, behavior, path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_saved_model_folder_keeps_the_weights_only(kind, is_plain, tmp_path):
    if kind.is_3:
        pytest.skip("Keras 3 writes no such models")
    model, adam = kind.dense_model(), kind.optimizer("Adam", 0.05)
    optimizer = adam if is_plain else accumulate(adam, 2)
    fit(model, optimizer, dense_data(24), 4)
    model.save(tmp_path / "folder")
    loaded = kind.keras.models.load_model(tmp_path / "folder")
    assert difference(model, loaded) == 0
    assert type(loaded.optimizer) is type(optimizer)
    assert int(loaded.optimizer.iterations.numpy()) == 0
    loaded.fit(*dense_data(24), batch_size=4, verbose=0)
    assert int(loaded.optimizer.iterations.numpy()) == (6 if is_plain else 3)


def test_weights_are_set_once_there_are_variables_for_them(kind):
    optimizer = accumulate(kind.optimizer("SGD", 0.1), 2)
    weights = [np.zeros([])] * 3
    with pytest.raises(ValueError, match=r"You (are calling|called) `set_weights\("):
        optimizer.set_weights(weights)
    optimizer.build([tf.Variable(1.0)])
    with pytest.raises(ValueError, match="`weights` must hold one array for each"):
        optimizer.set_weights(weights)


def test_an_optimizer_can_be_copied_and_pickled_in_keras_3(kind):
    if not kind.is_3:
        pytest.skip("Keras 2 pickles no optimizers")
    optimizer = accumulate(kind.optimizer("Lamb", 0.125), 3)
    for again in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(again) is type(optimizer)
        assert again.get_config() == optimizer.get_config()


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


@pytest.mark.parametrize("is_open", [False, True])
def test_weights_of_windows_are_read_by_an_optimizer_without_one(
    kind, is_open, tmp_path, caplog
):
    if kind.is_legacy:
        pytest.skip("Keras 2 saves no state of optimizers.legacy in this format")
    file = tmp_path / "only.weights.h5"
    model = kind.dense_model()
    fit(model, _adam(kind), dense_data(24 if is_open else 32), 8)
    model.save_weights(file)
    loaded = kind.dense_model()
    plain = accumulate(kind.optimizer("Adam", 0.05), 1)
    loaded.compile(plain, "mse", jit_compile=False)
    plain.build(loaded.trainable_variables)
    loaded.load_weights(file)
    assert int(plain.iterations.numpy()) == 1 + (not is_open)
    inner = model.optimizer._inner_variables()
    for one, other in zip(inner, plain._inner_variables(), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert ("the open window of the file is left out" in caplog.text) == is_open


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
