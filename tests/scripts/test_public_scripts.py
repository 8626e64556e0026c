"""public_scripts.py without the network: what it compares, runs and reports."""

import itertools
import re
import sys

import numpy as np
import pytest
import tensorflow as tf

from scripts.experiments import public_scripts
from scripts.experiments.public import bench, removed

pytestmark = pytest.mark.once

v1 = tf.compat.v1


def _weights(shift=0.0, steps=20):
    return {"steps": np.int64(steps), "w": np.array([1.0, -4.0 + shift, 2.0])}


@pytest.mark.parametrize(
    ("left_out", "expected"), [({}, 0.5), ({"w$": slice(1, 2)}, 0), ({"v": [1]}, 0.5)]
)
def test_difference_is_relative_to_the_largest_element(left_out, expected):
    found = public_scripts.largest_difference(_weights(2.0), _weights(), left_out)
    assert found == expected


@pytest.mark.parametrize(
    ("cut", "code", "cells"),
    [
        (_weights(4e-5), 0, "| 1.0e-05 | 2.5e-01 | yes |"),
        (_weights(8.8e-5), 1, "| 2.2e-05 | 2.5e-01 | no |"),
        (_weights(steps=19), 1, "| 0.0e+00 | 2.5e-01 | no |"),
        (None, 1, "| - | - | no |"),
    ],
)
def test_the_table_holds_its_bound(cut, code, cells, monkeypatch, tmp_path, capsys):
    def runs(name, folder, run, micro_batches=None, driver_flags=()):
        assert name == "tfgan"
        assert (run == "cut") == (micro_batches == "--micro_batches=4")
        assert (run == "reverse") == (list(driver_flags) == ["--in_reverse"])
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


def _updates(memory):
    """Returns each update's final number of micro-batches, and all errors' counts."""
    finals, errors = [], []
    for update in range(bench.UPDATES):
        while memory._pending:
            index, where = memory._pending[0]
            assert 0 <= index < memory.value
            while (memory._index, where) != (index, where):
                memory._may_fail("end")
            with pytest.raises(MemoryError, match=f"{where} of micro-batch {index}"):
                memory._may_fail(where)
            errors.append(memory.value)
            memory.increase(bench.BATCH, "somewhere")
        finals.append(memory.value)
        memory.count_update(update)
    return finals, errors


@pytest.mark.parametrize("errors", [1, 50, 80])
def test_a_calm_run_is_cut_as_the_disturbed_one(errors):
    finals, found = _updates(bench.Memory(errors, True))
    assert len(found) == errors
    assert all(1 <= count <= bench.BATCH for count in finals + found)
    assert _updates(bench.Memory(errors, False)) == (finals, [])


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


def test_the_conditional_random_field_is_that_of_all_paths():
    chance = np.random.default_rng(0)
    scores = chance.normal(size=[3, 4, 2]).astype(np.float32)
    moves = chance.normal(size=[2, 2]).astype(np.float32)
    lengths, tags = [4, 2, 1], chance.integers(0, 2, [3, 4])

    def score(row, path):
        found = sum(scores[row, i, tag] for i, tag in enumerate(path))
        return found + sum(moves[pair] for pair in itertools.pairwise(path))

    with tf.Graph().as_default(), v1.Session() as session:
        likelihood, _ = removed.log_likelihood(
            tf.constant(scores), tf.constant(tags), tf.constant(lengths), moves
        )
        best = removed.decode(tf.constant(scores), moves, tf.constant(lengths))
        likelihood, paths, totals = session.run([likelihood, *best])
    for row, length in enumerate(lengths):
        every = {
            path: score(row, path) for path in itertools.product((0, 1), repeat=length)
        }
        total = np.log(sum(map(np.exp, every.values())))
        expected = every[tuple(tags[row, :length])] - total
        np.testing.assert_allclose(likelihood[row], expected, rtol=1e-5)
        best_path = max(every, key=every.get)
        assert tuple(paths[row]) == best_path + (0,) * (4 - length)
        np.testing.assert_allclose(totals[row], every[best_path], rtol=1e-5)
