"""One command for any hardware: devices, tasks and memory change no weight."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pandas as pd
import pytest
import running
import tensorflow as tf

from housing_example import jobs

pytestmark = [pytest.mark.slow, pytest.mark.once]

_PROGRAM = pathlib.Path(__file__).with_name("housing_program.py")
_UPDATES = 6
_FLAGS = {"effective_batch_size": 13, "train_updates": _UPDATES}
_FLAGS |= {"watchdog_secs": 1_000_000}  # no clock decides
_PATH = {"PYTHONPATH": str(running.ROOT)}


def _command(csv, folder, *flags, cpus=1, dies_after=0) -> tuple:
    files = {"train_csv": csv, "output_dir": folder}
    given = (f"--{name}={value}" for name, value in (files | _FLAGS).items())
    return (_PROGRAM, f"--cpus={cpus}", f"--dies_after={dies_after}", *given, *flags)


def _run_cluster(csv, folder, dies_after=0) -> list[running.Done]:
    """Runs two tasks; the second may die."""
    options = {"jobs": ("worker", "worker"), "cwd": folder.parent} | _PATH
    flags = ("--strategy=multi_worker", "--micro_batch_size=4")
    chief = _command(csv, folder, *flags)
    worker = _command(csv, folder, *flags, dies_after=dies_after)
    with running.cluster(chief, worker, **options) as tasks:
        return [task.wait() for task in tasks]


def _weights(folder) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(folder))
    assert reader.get_tensor("update_step") == _UPDATES
    names = reader.get_variable_to_shape_map()
    found = {n: reader.get_tensor(n) for n in names if n.endswith(("/kernel", "/bias"))}
    assert len(found) == 8
    return found


def _assert_same(folder: pathlib.Path, whole: dict[str, np.ndarray]) -> None:
    ours = _weights(folder)
    for name, value in whole.items():
        atol = 1e-5 * np.abs(value).max()
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=atol, err_msg=name)


def _assert_all_seen(folder: pathlib.Path) -> None:
    rows = pd.read_csv(folder / "train_metrics.csv")
    assert rows["examples"].tolist() == [13 * (n + 1) for n in range(_UPDATES)]


@pytest.fixture(scope="module")
def by_steps(csv, settings_in, tmp_path_factory) -> jobs.Job:
    """A run on one device that takes 5 examples at once."""
    folder = tmp_path_factory.mktemp("by_steps")
    settings = dataclasses.replace(
        settings_in(folder),
        train_csv=str(csv),
        effective_batch_size=13,
        train_batch_size=5,
        gradient_accumulation_steps=None,
        train_updates=_UPDATES,
        shuffle=True,
    )
    job = jobs.prepare(settings)
    jobs.execute(job)
    return job


@pytest.fixture(scope="module")
def whole(by_steps) -> dict[str, np.ndarray]:
    """The weights of one device that takes 13 examples at once."""
    folder = pathlib.Path(by_steps.settings.output_dir)
    return _weights(folder / "without_accumulation")


@pytest.fixture(scope="module")
def two_devices(csv, tmp_path_factory) -> tuple[pathlib.Path, running.Done]:
    """Output folder of two devices of one process, and what it said."""
    folder = tmp_path_factory.mktemp("two_devices") / "output"
    flags = ("--strategy=mirrored", "--micro_batch_size=4")
    done = running.run(*_command(csv, folder, *flags, cpus=2), **_PATH)
    assert done.returncode == 0
    return folder, done


def test_micro_steps_change_no_weight(csv, by_steps, whole, run_main):
    sizes = "13 = at most 5 examples x 3 micro-steps x 1 replica"
    assert sizes in str(by_steps.batches)
    folder = pathlib.Path(by_steps.settings.output_dir)
    _assert_same(folder / "with_accumulation", whole)
    _assert_all_seen(folder / "with_accumulation")
    # A folder is one run's, whatever cuts its batches: it is trained already.
    flags = {"train_csv": csv, "output_dir": folder, "micro_batch_size": "auto"}
    again = run_main(flags | _FLAGS)
    assert again.returncode == 0 and again.stderr.count("is trained already") == 1


def test_memory_changes_no_weight(csv, tmp_path, whole, run_main, limited_memory):
    flags = {"train_csv": csv, "output_dir": tmp_path / "output"} | _FLAGS
    with limited_memory(4):
        done = run_main(flags | {"micro_batch_size": "auto"})
    assert done.returncode == 0
    assert "13 examples in as many micro-batches as memory asks for x 1" in done.stderr
    assert "micro-batches 2 -> 4: out of memory at update 1" in done.stderr
    assert "as memory allows (13)" in done.stdout and "without" not in done.output
    _assert_same(tmp_path / "output" / "with_accumulation", whole)
    _assert_all_seen(tmp_path / "output" / "with_accumulation")


def test_several_devices_train_as_one(two_devices, whole):
    folder, done = two_devices
    assert "13 = at most 4 examples x 2 micro-steps x 2 replicas" in done.output
    _assert_same(folder / "with_accumulation", whole)
    (apart,) = re.findall(r"largest difference of any weight: (\S+) of", done.output)
    assert float(apart) < 1e-5


def test_cluster_that_lost_a_task_ends_and_goes_on_as_one_bit_for_bit(
    csv, tmp_path, two_devices, whole
):
    folder = tmp_path / "output"
    chief, worker = _run_cluster(csv, folder, dies_after=5)
    assert (chief.returncode, worker.returncode) == (75, 9)
    (tmp_path / "died").unlink()
    checkpoint = tf.train.latest_checkpoint(str(folder / "with_accumulation"))
    assert checkpoint.endswith("-8")  # 4 updates of 2 micro-steps
    chief, worker = _run_cluster(csv, folder)
    assert chief.returncode == worker.returncode == 0
    assert "13 = at most 4 examples x 2 micro-steps x 2 replicas" in chief.output
    assert "going on after update 4\n" in chief.output
    assert "with accumulation (at most 4 x 2 x 2)" in chief.output
    assert "plot: " in chief.output
    assert "MAE" not in worker.output and "UserWarning" not in worker.output
    _assert_same(folder / "without_accumulation", whole)
    _assert_same(folder / "with_accumulation", whole)
    # Two replicas have one sum, wherever they are.
    ours, theirs = (
        tf.train.load_checkpoint(str(each / "with_accumulation"))
        for each in (folder, two_devices[0])
    )
    assert theirs.get_tensor("update_step") == _UPDATES
    for name in theirs.get_variable_to_shape_map():
        value = theirs.get_tensor(name)
        np.testing.assert_array_equal(ours.get_tensor(name), value, err_msg=name)


@pytest.mark.parametrize(
    "strategy, task, sentence",
    [
        ("multi_worker", "evaluator", "Received: an evaluator. Leave it"),
        ("none", "worker", "Use --strategy=multi_worker, or unset TF_CONFIG"),
    ],
)
def test_evaluator_and_cluster_without_strategy_are_refused(
    csv, tmp_path, run_main, monkeypatch, strategy, task, sentence
):
    cluster = {"chief": ["a:1"], "worker": ["b:1"]}
    config = {"cluster": cluster, "task": {"type": task, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    flags = {"train_csv": csv, "output_dir": tmp_path / "output", "strategy": strategy}
    done = run_main(flags | _FLAGS)
    assert done.returncode == 2 and done.output.count("\n") == 1
    assert sentence in done.stderr
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("strategy", ["none", "multi_worker"])
def test_task_that_is_a_cluster_of_its_own_trains_alone(
    csv, tmp_path, run_main, monkeypatch, strategy
):
    task = {"type": "worker", "index": 0}
    config = {"cluster": {"worker": ["localhost:1"]}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    flags = {"train_csv": csv, "output_dir": tmp_path / "output", "strategy": strategy}
    flags |= {"effective_batch_size": 13, "train_updates": 1}
    done = run_main(flags | {"gradient_accumulation_steps": 1})
    assert done.returncode == 0
    assert "13 = 13 examples x 1 micro-steps x 1 replica" in done.stderr
    assert "without (13)" in done.stdout
