"""public_scripts.py without the network."""

import importlib
import re
import sys

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.microbatch.own_optimizer.activations import SHARE
from scripts.experiments import public_scripts
from scripts.experiments.public import bench

pytestmark = pytest.mark.once

v1 = tf.compat.v1


def _weights(shift=0.0, steps=20):
    return {"steps": np.int64(steps), "w": np.array([1.0, -4.0 + shift, 2.0])}


@pytest.mark.parametrize(
    ("left_out", "expected"), [({}, 0.5), ({"w$": slice(1, 2)}, 0), ({"v": [1]}, 0.5)]
)
def test_difference_is_relative_to_the_largest_element(left_out, expected):
    difference = public_scripts.largest_difference(_weights(2.0), _weights(), left_out)
    assert difference == expected


@pytest.mark.parametrize(
    ("cut", "code", "cells"),
    [
        (_weights(4e-5), 0, "| 1.0e-05 | 2.5e-01 | 1.5 % | yes |"),
        (_weights(8.8e-5), 1, "| 2.2e-05 | 2.5e-01 | 1.5 % | no |"),
        (_weights(steps=19), 1, "| 0.0e+00 | 2.5e-01 | 1.5 % | no |"),
        (None, 1, "| - | - | - | no |"),
    ],
)
def test_the_table_holds_its_bound(cut, code, cells, monkeypatch, tmp_path, capsys):
    def runs(name, folder, run, micro_batches=None, driver_flags=()):
        assert name == "tfgan"
        assert (run == "cut") == (micro_batches == "--micro_batches=4")
        assert (run == "reverse") == (list(driver_flags) == ["--in_reverse"])
        (folder / f"{run}.log").write_text(SHARE % 1.5 + "\n")
        return {"whole": _weights(), "reverse": _weights(1.0), "cut": cut}[run]

    monkeypatch.setattr(public_scripts, "fetch", lambda *arguments: None)
    monkeypatch.setattr(public_scripts, "_run", runs)
    flags = [f"--work_dir={tmp_path}", "--scripts=tfgan"]
    assert public_scripts.main(flags) == code
    printed = capsys.readouterr().out
    assert printed.startswith(f"TensorFlow {tf.__version__}, Python 3.")
    assert printed.splitlines()[-1].endswith(f"| Adam and Adam {cells}")
    assert "tensorflow/gan: gan_model, gan_loss (tensorflow-gan 2.1.0)" in printed


def test_each_script_has_a_driver_and_a_hash():
    for name, project in public_scripts.PROJECTS.items():
        assert (public_scripts._DRIVERS / f"{name}.py").exists()
        assert re.fullmatch(r"[0-9a-f]{64}", project.sha256)
    assert set(public_scripts._DISTURBED) <= public_scripts.PROJECTS.keys()
    assert bench.UPDATES == public_scripts._UPDATES


@pytest.mark.parametrize("name", ["deepctr_wide_deep", "deepctr_deepfm"])
def test_a_driver_of_tensorflow_2_splits_by_itself(name, monkeypatch, tmp_path):
    def run_program(command, log):
        (tmp_path / "cut.npz").touch()
        commands.append([str(part) for part in command])
        return 1

    commands = []
    monkeypatch.setattr(public_scripts, "_run_program", run_program)
    (tmp_path / "cut.log").touch()
    public_scripts._run(name, tmp_path, "cut", "--micro_batches=4", ["--in_reverse"])
    (command,) = commands
    driver = command.index(str(public_scripts._DRIVERS / f"{name}.py"))
    is_v2 = public_scripts.PROJECTS[name].is_v2
    assert ("estimator_accum" in command[:driver]) == (not is_v2)
    assert ("--micro_batches=4" in command[driver:]) == is_v2
    assert command[-1 - is_v2] == "--in_reverse"


@pytest.mark.parametrize("is_in_reverse", [False, True])
def test_models_begin_with_the_first_ones_weights(is_in_reverse, tmp_path, monkeypatch):
    first, last = tmp_path / "first.npz", tmp_path / "last.npz"
    np.savez(first, **{"0/w:0": np.float32(5)})
    flags = [f"--first_weights={first}", f"--last_weights={last}", "--micro_batches=4"]
    flags += ["--in_reverse"] * is_in_reverse
    monkeypatch.setattr(sys, "argv", ["driver.py", f"--output_dir={tmp_path}", *flags])
    monkeypatch.syspath_prepend(public_scripts._DRIVERS)
    keras_bench = importlib.import_module("keras_bench")
    variable = tf.Variable(1.0, name="w")
    optimizer = tf.keras.optimizers.SGD()
    rows = np.arange(bench.UPDATES * bench.BATCH)
    batches = []

    def fit(data, count):
        batches.extend(data.as_numpy_iterator())
        variable.assign_add(count)

    keras_bench.train([variable], optimizer, rows, fit)
    expected = rows[: bench.BATCH]
    np.testing.assert_array_equal(
        batches[0], expected[::-1] if is_in_reverse else expected
    )
    assert len(batches) == bench.UPDATES
    assert np.load(last)["0/w:0"] == 9


def _train(folder, run, *, seed, in_reverse=False, monkeypatch):
    """Trains a small model_fn under the bench; returns its last weights."""
    seen = []

    def model_fn(features, labels, mode):
        seen.append((features.shape, labels))
        weight = v1.get_variable("weight", [2])
        v1.get_variable("other", [2], trainable=False)
        loss = tf.reduce_sum(weight * features[0])
        step = v1.train.get_global_step()
        train_op = v1.train.GradientDescentOptimizer(0.5).minimize(loss, step)
        return v1.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    first, last = folder / "first.npz", folder / f"{run}.npz"
    flags = [f"--first_weights={first}", f"--last_weights={last}"]
    flags += ["--in_reverse"] * in_reverse
    kind = v1.estimator.Estimator
    monkeypatch.setattr(sys, "argv", ["driver.py", f"--output_dir={folder}", *flags])
    monkeypatch.setattr(kind, "train", kind.train)
    assert bench.begin() == folder
    config = v1.estimator.RunConfig(str(folder / run), tf_random_seed=seed)
    examples = np.arange(4, dtype=np.float32).reshape([2, 2])
    estimator = kind(model_fn, config=config)
    data = tf.data.Dataset
    estimator.train(lambda: data.from_tensors(examples).repeat(), max_steps=2)
    monkeypatch.undo()
    assert seen == [((2, 2), None)]
    return dict(np.load(first)), dict(np.load(last))


def test_all_runs_begin_with_the_first_ones_weights(tmp_path, monkeypatch):
    options = {"monkeypatch": monkeypatch}
    first, last = _train(tmp_path, "a", seed=1, **options)
    assert first.keys() == {"weight", "other", "global_step"}
    np.testing.assert_allclose(last["weight"], first["weight"] - [0, 1])
    assert last.keys() == {"steps", "weight"}
    assert last["steps"] == 2
    again, other = _train(tmp_path, "b", seed=2, **options)
    np.testing.assert_array_equal(again["weight"], first["weight"])
    np.testing.assert_array_equal(other["weight"], last["weight"])
    _, reversed_ = _train(tmp_path, "c", seed=3, in_reverse=True, **options)
    np.testing.assert_allclose(reversed_["weight"], first["weight"] - [2, 3])
