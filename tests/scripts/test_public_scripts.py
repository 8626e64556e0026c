"""public_scripts.py without the network: what it compares, runs and reports."""

import argparse
import itertools
import re
import sys
import zipfile

import numpy as np
import pytest
import tensorflow as tf

from scripts.experiments import public_scripts
from scripts.experiments.public import bench, removed
from tests.helpers import programs

v1 = tf.compat.v1


def _weights(shift=0.0, steps=20):
    return {"steps": np.int64(steps), "w": np.array([1.0, -4.0 + shift, 2.0])}


@pytest.mark.parametrize(
    ("left_out", "expected"), [({}, 0.5), ({"w$": slice(1, 2)}, 0), ({"v": [1]}, 0.5)]
)
def test_difference_is_relative_to_the_largest_element(left_out, expected):
    found = public_scripts.largest_difference(_weights(2.0), _weights(), left_out)
    assert found == expected


def test_weights_must_have_the_same_names():
    with pytest.raises(ValueError, match=r"the same weights\. Received: \['w'\]"):
        public_scripts.largest_difference({"steps": 1}, _weights(), {})


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Runs the script with given runs in place of real ones; returns code, stdout."""

    def run(runs, *flags):
        monkeypatch.setattr(public_scripts, "fetch", lambda *arguments: None)
        monkeypatch.setattr(public_scripts, "_run", runs)
        code = public_scripts.main([f"--work_dir={tmp_path}", *flags])
        return code, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("cut", "code", "cells"),
    [
        (_weights(4e-5), 0, "| 1.0e-05 | 2.5e-01 | yes |"),
        (_weights(8.8e-5), 1, "| 2.2e-05 | 2.5e-01 | no |"),
        (_weights(steps=19), 1, "| 0.0e+00 | 2.5e-01 | no |"),
        (None, 1, "| - | - | no |"),
    ],
)
def test_the_table_holds_its_bound(call, cut, code, cells):
    def runs(name, folder, run, micro_batches=None, driver_flags=()):
        assert name == "tfgan"
        assert (run == "cut") == (micro_batches == "--micro_batches=4")
        assert (run == "reverse") == (list(driver_flags) == ["--in_reverse"])
        return {"whole": _weights(), "reverse": _weights(1.0), "cut": cut}[run]

    found, printed = call(runs, "--scripts=tfgan")
    assert found == code
    assert printed.startswith(f"TensorFlow {tf.__version__}, Python 3.")
    assert printed.splitlines()[-1].endswith(f"| Adam and Adam | none {cells}")
    assert "tensorflow/gan: gan_model, gan_loss (tensorflow-gan 2.1.0)" in printed


@pytest.mark.parametrize(
    ("lost", "shift", "code"), [(0, 0.0, 0), (1, 0.0, 1), (0, 1e-15, 1)]
)
def test_errors_are_shared_out_and_weights_must_be_the_same(call, lost, shift, code):
    shares = []

    def runs(name, folder, run, micro_batches, driver_flags):
        assert micro_batches == "--micro_batches=auto"
        assert (run == "calm") == ("--without_errors" in driver_flags)
        errors = int(re.fullmatch(r"--errors=(\d+)", driver_flags[0])[1])
        if run == "disturbed":
            shares.append(errors)
            (folder / "disturbed.log").write_text(f"errors: {errors - lost}\n")
        return _weights(shift if run == "disturbed" else 0.0)

    found, printed = call(runs, "--errors=201")
    assert found == code
    assert shares == [50, 50, 50, 51]
    assert printed.count("to the bit | yes |") == (0 if code else 4)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--scripts=tfgan,gpt", r"among bert_classifier, .*Received: gpt\. Leave"),
        ("--errors=0", r"from 1 to 80 for each of .*Received: 0, and 4 of them"),
        ("--errors=81 --scripts=tfgan", r"Received: 81, and 1 of them"),
        ("--errors=1 --scripts=bert_ner", r"Received: 1, and 0 of them"),
    ],
)
def test_unfit_flags_are_refused(flags, sentence, tmp_path, capsys):
    arguments = [f"--work_dir={tmp_path / 'new'}", *flags.split()]
    assert public_scripts.main(arguments) == 2
    assert re.search(sentence, capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


def test_each_script_has_a_driver_and_a_hash():
    for name, project in public_scripts.PROJECTS.items():
        assert (public_scripts._DRIVERS / f"{name}.py").exists()
        assert re.fullmatch(r"[0-9a-f]{64}", public_scripts._HASHES[project.package])
    assert len({each.repository for each in public_scripts.PROJECTS.values()}) == 9
    assert set(public_scripts._DISTURBED) <= public_scripts.PROJECTS.keys()
    assert bench.UPDATES == public_scripts._UPDATES


def test_a_wheel_is_extracted_without_pips_traces(tmp_path):
    with zipfile.ZipFile(tmp_path / "a-1.whl", "w") as wheel:
        for name in ("a/b.py", "a-1.dist-info/RECORD", "a-1.data/scripts/run"):
            wheel.writestr(name, "")
    public_scripts.extract(tmp_path / "a-1.whl", tmp_path / "to")
    found = [path.name for path in (tmp_path / "to").rglob("*") if path.is_file()]
    assert found == ["b.py"]


def test_a_package_that_cannot_be_fetched_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", "false")
    flags = argparse.Namespace(work_dir=tmp_path, scripts="tfgan", errors=None)
    fails = pytest.raises(
        public_scripts.FetchError, match="must be on PyPI with the ha"
    )
    with programs.real_starts(), fails:
        public_scripts.compare(flags)
    assert (
        "tensorflow-gan==2.1.0 --hash=sha256:"
        in (tmp_path / "downloads" / "requirements.txt").read_text()
    )


def test_a_run_that_fails_shows_the_end_of_its_log(tmp_path, monkeypatch, capsys):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nseq 20\necho "$@"\necho "$PYTHONPATH"\nexit 3\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    folder = tmp_path / "runs" / "tfgan"
    folder.mkdir(parents=True)
    with programs.real_starts():
        assert public_scripts._run("tfgan", folder, "cut", "--micro_batches=4") is None
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tfgan: cut ended with 3:"
    assert len(lines) == 1 + public_scripts._LINES
    assert lines[-2].startswith("-m estimator_accum.run --v1 --micro_batches=4 ")
    assert f"public/tfgan.py --output_dir={folder / 'cut'} --first_w" in lines[-2]
    assert lines[-1].endswith(f":{tmp_path / 'scripts'}:{tmp_path / 'libraries'}")


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
