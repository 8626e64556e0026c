"""One effective batch in many cuts, also from one to another: the same weights."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.batches import AUTO, Batches
from estimator_accum.watchdog import Watchdog
from housing_example import input_pipeline, jobs, model_fn
from housing_example.results import largest_difference
from housing_example.settings import batches_of, check_output_dir, remember_settings

_UPDATES = 20


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


@pytest.fixture
def limited_memory(monkeypatch):
    """Lets training on more than 30 examples at once run out of memory."""
    training = model_fn._training

    def check(rows):
        if rows > 30:
            raise MemoryError(f"{rows} examples")
        return np.float32(0)

    def limited(head, features, labels, prices, *args):
        zero = tf.numpy_function(check, [tf.shape(labels)[0]], tf.float32)
        zero.set_shape([])
        return training(head, features, labels, prices + zero, *args)

    monkeypatch.setattr(model_fn, "_training", limited)


def _train(settings, name: str, stop_after: int | None = None):
    """Trains one model; returns its results and its folder."""
    if stop_after is not None:
        settings = dataclasses.replace(settings, train_updates=stop_after)
    job = jobs.prepare(settings)
    folder = pathlib.Path(settings.output_dir).parent
    (folder / "train.csv").write_text(input_pipeline.csv_text(job.train))
    (folder / "test.csv").write_text(input_pipeline.csv_text(job.test))
    watchdog = Watchdog(300, "alone")
    result = jobs.train_and_test(job, folder / name, job.batches, watchdog)
    return result, folder / name


def _of_100(settings):
    """100 examples an update, shuffled."""
    changes = {"effective_batch_size": 100, "train_updates": _UPDATES, "shuffle": True}
    return _with(settings, **changes)


@pytest.fixture
def settings(settings):
    return _of_100(settings)


@pytest.fixture(scope="module")
def at_once(settings_in, tmp_path_factory):
    settings = _of_100(settings_in(tmp_path_factory.mktemp("at_once") / "output"))
    return _train(dataclasses.replace(settings, train_batch_size=100), "at_once")[0]


def _assert_same(result, folder, at_once, micro_steps):
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


def test_number_of_examples_at_once_does_not_decide_the_weights(settings, at_once):
    """100 examples as 15 micro-batches of 6 or 7."""
    settings = dataclasses.replace(settings, train_batch_size=7)
    _assert_same(*_train(settings, "seven"), at_once, 15 * _UPDATES)


@pytest.mark.once
def test_a_micro_step_is_one_session_run(settings, count_session_runs):
    settings = dataclasses.replace(settings, train_batch_size=50)
    few, many = (
        count_session_runs(lambda n=n: _train(settings, f"for_{n}", n)) for n in (8, 20)
    )
    assert many - few == (20 - 8) * 2


def test_auto_has_the_weights_of_the_batch_at_once_bit_for_bit(settings, at_once):
    """Where memory is enough."""
    settings = dataclasses.replace(settings, train_batch_size=AUTO)
    result, folder = _train(settings, "auto")
    _assert_same(result, folder, at_once, _UPDATES)
    for name, value in at_once.weights.items():
        np.testing.assert_array_equal(result.weights[name], value, err_msg=name)
    assert not (folder / "micro_batches.json").exists()


def test_auto_that_runs_out_of_memory_has_them_too(settings, at_once, limited_memory):
    settings = dataclasses.replace(settings, train_batch_size=AUTO)
    result, folder = _train(settings, "auto")
    _assert_same(result, folder, at_once, _UPDATES)
    count = json.loads((folder / "micro_batches.json").read_text())
    assert count == {"micro_batches": 4}  # 100, 50 and then 25 at once


def test_plain_training_runs_out_of_that_memory(settings, limited_memory):
    with pytest.raises(tf.errors.ResourceExhaustedError, match="50 examples"):
        _train(dataclasses.replace(settings, train_batch_size=50), "fifty")


@pytest.mark.parametrize(
    "first, then, micro_steps",
    [(AUTO, 30, 8 + 12 * 4), (30, AUTO, 8 * 4 + 12), (30, 100, 8 * 4 + 12)],
)
@pytest.mark.once
def test_run_goes_on_cut_in_another_way(
    settings, at_once, monkeypatch, first, then, micro_steps
):
    # The rate's fall is that of the whole run.
    cosine_decay = tf.compat.v1.train.cosine_decay
    monkeypatch.setattr(
        tf.compat.v1.train,
        "cosine_decay",
        lambda rate, clock, _: cosine_decay(rate, clock, _UPDATES),
    )
    _train(dataclasses.replace(settings, train_batch_size=first), "model", 8)
    result = _train(dataclasses.replace(settings, train_batch_size=then), "model")
    _assert_same(*result, at_once, micro_steps)


@pytest.mark.parametrize("size", [AUTO, 50])
@pytest.mark.once
def test_checkpoints_are_whole_updates_apart(settings, monkeypatch, size):
    monkeypatch.setattr(jobs, "_UPDATES_BETWEEN_CHECKPOINTS", 8)
    settings = dataclasses.replace(settings, train_batch_size=size)
    _, folder = _train(settings, "model")
    steps = 1 if size == AUTO else 2
    saved = {path.name for path in folder.glob("*.index")}
    assert saved == {f"model.ckpt-{n * steps}.index" for n in (0, 8, 16, 20)}
    metrics = tf.io.gfile.glob(str(folder / "eval" / "events*"))
    assert metrics  # evaluated beside training, too


def test_folder_goes_on_in_another_cut_of_the_same_updates_only(settings, tmp_path):
    pathlib.Path(settings.output_dir).mkdir()
    remember_settings(settings, Batches(100, 1, 1), "sum")
    other = dataclasses.replace(settings, train_batch_size=AUTO, strategy="mirrored")
    check_output_dir(other, Batches(100, 3, 2), "sum")
    with pytest.raises(ValueError, match=r"has --effective_batch_size=100, not 177\. "):
        check_output_dir(settings, Batches(177, 1, 1), "sum")
