"""One effective batch in many cuts, also from one to another: the same weights."""

import dataclasses
import functools
import json
import pathlib
import shutil
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.batches import AUTO, Batches
from estimator_accum.watchdog import Watchdog
from housing_example import input_pipeline, jobs
from housing_example.results import largest_difference
from housing_example.settings import batches_of, check_output_dir, remember_settings

_UPDATES = 6


def _with(settings, **changes):
    """Only the sizes that are named."""
    names = ("effective_batch_size", "train_batch_size", "gradient_accumulation_steps")
    return dataclasses.replace(settings, **dict.fromkeys(names) | changes)


@pytest.mark.parametrize("replicas", [1, 2])
def test_effective_batch_grows_with_the_replicas_unless_it_is_given(settings, replicas):
    assert batches_of(_with(settings), replicas) == Batches(177 * replicas, 3, replicas)
    other = _with(settings, train_batch_size=10, gradient_accumulation_steps=2)
    assert batches_of(other, replicas) == Batches(20 * replicas, 2, replicas)


@pytest.mark.parametrize(
    "sizes, replicas, steps",
    [
        ({}, 1, 2),
        ({}, 2, 1),
        ({"train_batch_size": 8}, 1, 13),
        ({"train_batch_size": 8}, 2, 7),
        ({"gradient_accumulation_steps": 4}, 2, 4),
        ({"train_batch_size": 10, "gradient_accumulation_steps": 5}, 2, 5),
    ],
)
def test_given_effective_batch_decides_the_rest(settings, sizes, replicas, steps):
    given = _with(settings, effective_batch_size=100, **sizes)
    assert batches_of(given, replicas) == Batches(100, steps, replicas)


def _train(settings, model_dir: pathlib.Path):
    """Trains one model; returns its results."""
    job = jobs.prepare(settings)
    (model_dir.parent / "train.csv").write_text(input_pipeline.csv_text(job.train))
    (model_dir.parent / "test.csv").write_text(input_pipeline.csv_text(job.test))
    return jobs.train_and_test(job, model_dir, job.batches, Watchdog(300, "alone"))


def _counted(settings, model_dir: pathlib.Path):
    """Trains one model; returns its results and the number of its `session.run`s."""
    run = tf.compat.v1.Session.run
    with mock.patch.object(tf.compat.v1.Session, "run", autospec=True) as noted:
        noted.side_effect = run
        return _train(settings, model_dir), noted.call_count


def _of_100(settings):
    """100 examples an update, shuffled."""
    changes = {"effective_batch_size": 100, "train_updates": _UPDATES, "shuffle": True}
    return _with(settings, **changes)


@pytest.fixture
def settings(settings):
    return _of_100(settings)


@pytest.fixture(scope="module")
def trained(settings_in, tmp_path_factory):
    """Makes the run of a micro-batch size.

    Its settings, its folder, its results and how many `session.run`s it made.
    """

    @functools.cache
    def train(size: int | str):
        folder = tmp_path_factory.mktemp("trained")
        settings = _of_100(settings_in(folder / "output"))
        settings = dataclasses.replace(settings, train_batch_size=size)
        with mock.patch.object(jobs, "_UPDATES_BETWEEN_CHECKPOINTS", 4):
            return settings, folder / "model", *_counted(settings, folder / "model")

    return train


def _assert_same(result, at_once, micro_steps):
    assert len(result.weights) == 8
    assert largest_difference(result.weights, at_once.weights) < 1e-5
    assert result.metrics["global_step"] == micro_steps
    assert result.losses["update_step"].tolist() == list(range(1, _UPDATES + 1))
    assert result.losses["examples"].tolist() == [
        100 * (n + 1) for n in range(_UPDATES)
    ]
    np.testing.assert_allclose(result.losses["loss"], at_once.losses["loss"], rtol=1e-5)
    rmse = at_once.metrics["rmse"]
    np.testing.assert_allclose(result.metrics["rmse"], rmse, rtol=1e-5)


def test_number_of_examples_at_once_does_not_decide_the_weights(trained):
    """100 examples as 15 micro-batches of 6 or 7."""
    _assert_same(trained(7)[2], trained(100)[2], 15 * _UPDATES)


def test_a_micro_step_is_one_session_run(trained):
    """Both save equally often; the end of the data looks for an open window once."""
    assert trained(7)[3] - trained(100)[3] == (15 - 1) * _UPDATES + 1


def test_auto_has_the_weights_of_the_batch_at_once_bit_for_bit(trained):
    """Where memory is enough."""
    _, folder, result, _ = trained(AUTO)
    at_once = trained(100)[2]
    _assert_same(result, at_once, _UPDATES)
    for name, value in at_once.weights.items():
        np.testing.assert_array_equal(result.weights[name], value, err_msg=name)
    assert not (folder / "micro_batches.json").exists()


def test_run_goes_on_cut_in_another_way(trained, tmp_path, limited_memory):
    """Where memory is too small for the batch at once."""
    settings, folder, *_ = trained(7)
    folder = pathlib.Path(shutil.copytree(folder, tmp_path / "model"))
    # As if it had been killed after update 4.
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-60"')
    with limited_memory(30):
        result = _train(dataclasses.replace(settings, train_batch_size=AUTO), folder)
    _assert_same(result, trained(100)[2], 4 * 15 + 2)
    # 100, 50 and then 25 at once
    count = json.loads((folder / "micro_batches.json").read_text())
    assert count == {"micro_batches": 4}


@pytest.mark.parametrize("size, steps", [(AUTO, 1), (7, 15)])
def test_checkpoints_are_whole_updates_apart(trained, size, steps):
    folder = trained(size)[1]
    saved = {path.name for path in folder.glob("*.index")}
    assert saved == {f"model.ckpt-{n * steps}.index" for n in (0, 4, 6)}
    metrics = tf.io.gfile.glob(str(folder / "eval" / "events*"))
    assert metrics  # evaluated beside training, too


def test_folder_goes_on_in_another_cut_of_the_same_updates_only(settings, tmp_path):
    pathlib.Path(settings.output_dir).mkdir()
    remember_settings(settings, Batches(100, 1, 1), "sum")
    other = dataclasses.replace(settings, train_batch_size=AUTO, strategy="mirrored")
    check_output_dir(other, Batches(100, 3, 2), "sum")
    with pytest.raises(ValueError, match=r"has --effective_batch_size=100, not 177\. "):
        check_output_dir(settings, Batches(177, 1, 1), "sum")
