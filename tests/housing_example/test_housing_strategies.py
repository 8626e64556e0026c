"""One command for any hardware: devices, tasks and memory change no weight."""

import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from cluster_tasks import environment, tf_configs

pytestmark = [pytest.mark.slow, pytest.mark.once]

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PROGRAM = pathlib.Path(__file__).with_name("housing_program.py")
_DEADLINE_SECS = 240
_UPDATES = 160
_FLAGS = ("--effective_batch_size=13", f"--train_updates={_UPDATES}")


def _start(csv, folder, *flags, cpus=1, rows_in_memory=0, tf_config=None):
    return subprocess.Popen(
        [
            sys.executable,
            _PROGRAM,
            f"--cpus={cpus}",
            f"--rows_in_memory={rows_in_memory}",
            f"--train_csv={csv}",
            f"--output_dir={folder}",
            *_FLAGS,
            *flags,
        ],
        env=environment(tf_config) | {"PYTHONPATH": str(_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _start_cluster(csv, folder, *flags) -> list[subprocess.Popen]:
    flags = ("--strategy=multi_worker", *flags)
    configs = tf_configs("worker", "worker")
    return [_start(csv, folder, *flags, tf_config=config) for config in configs]


def _end(process: subprocess.Popen) -> str:
    try:
        output, _ = process.communicate(timeout=_DEADLINE_SECS)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    return output


def _weights(folder) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(folder))
    assert reader.get_tensor("update_step") == _UPDATES
    names = reader.get_variable_to_shape_map()
    found = {n: reader.get_tensor(n) for n in names if n.endswith(("/kernel", "/bias"))}
    assert len(found) == 8
    return found


def _assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    for name, value in theirs.items():
        atol = 1e-5 * np.abs(value).max()
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=atol, err_msg=name)


@pytest.fixture(scope="module")
def whole(csv, tmp_path_factory) -> dict[str, np.ndarray]:
    """The weights of one device that takes 13 examples at once."""
    folder = tmp_path_factory.mktemp("one_device") / "whole"
    _end(_start(csv, folder, "--gradient_accumulation_steps=1"))
    return _weights(folder / "without_accumulation")


@pytest.fixture(scope="module")
def cluster(csv, tmp_path_factory) -> tuple[pathlib.Path, str, str]:
    """Of two tasks: the output folder, and what each of them has printed."""
    folder = tmp_path_factory.mktemp("two_tasks") / "output"
    tasks = _start_cluster(csv, folder, "--micro_batch_size=4")
    try:
        chief, worker = map(_end, tasks)
    finally:
        for task in tasks:
            task.kill()
    return folder, chief, worker


def test_memory_and_micro_steps_change_no_weight(csv, tmp_path, whole):
    auto, steps = tmp_path / "auto", tmp_path / "steps"
    tasks = [
        _start(csv, auto, "--micro_batch_size=auto", rows_in_memory=4),
        _start(csv, steps, "--micro_batch_size=5"),
    ]
    in_memory, by_steps = map(_end, tasks)
    assert "13 examples in as many micro-batches as memory asks for x 1" in in_memory
    assert "micro-batches 2 -> 4: out of memory at update 1" in in_memory
    assert "as memory allows (13)" in in_memory and "without" not in in_memory
    assert "13 = at most 5 examples x 3 micro-steps x 1 replica" in by_steps
    for folder in (auto, steps):
        _assert_same(_weights(folder / "with_accumulation"), whole)
        rows = pd.read_csv(folder / "with_accumulation" / "train_metrics.csv")
        assert rows["examples"].tolist() == [13 * (n + 1) for n in range(_UPDATES)]
    # A folder is one run's, whatever cuts its batches: it is trained already.
    again = _end(_start(csv, auto, "--micro_batch_size=5"))
    assert again.count("is trained already") == 1


def test_several_devices_train_as_one(csv, tmp_path, whole):
    folder = tmp_path / "output"
    flags = ("--strategy=mirrored", "--micro_batch_size=4")
    output = _end(_start(csv, folder, *flags, cpus=2))
    assert "13 = at most 4 examples x 2 micro-steps x 2 replicas" in output
    _assert_same(_weights(folder / "with_accumulation"), whole)
    (apart,) = re.findall(r"largest difference of any weight: (\S+) of", output)
    assert float(apart) < 1e-5


def test_tasks_of_a_cluster_train_as_one(cluster, whole):
    folder, chief, worker = cluster
    assert "13 = at most 4 examples x 2 micro-steps x 2 replicas" in chief
    assert "with accumulation (at most 4 x 2 x 2)" in chief and "plot: " in chief
    assert "MAE" not in worker and "UserWarning" not in worker
    _assert_same(_weights(folder / "with_accumulation"), whole)
    _assert_same(_weights(folder / "without_accumulation"), whole)


def test_evaluator_and_cluster_without_strategy_are_refused(csv, tmp_path):
    cluster = {"chief": ["a:1"], "worker": ["b:1"]}
    for flags, task, sentence in (
        (["--strategy=multi_worker"], "evaluator", "Received: an evaluator. Leave it"),
        ([], "worker", "Use --strategy=multi_worker, or unset TF_CONFIG"),
    ):
        config = {"cluster": cluster, "task": {"type": task, "index": 0}}
        process = _start(csv, tmp_path / "output", *flags, tf_config=config)
        output, _ = process.communicate(timeout=_DEADLINE_SECS)
        assert process.returncode == 2
        # TensorFlow greets: the program imports it before main() does.
        assert sentence in output.splitlines()[-1] and "Traceback" not in output
    assert not (tmp_path / "output").exists()


def test_cluster_that_lost_a_task_ends_and_goes_on_bit_for_bit(csv, tmp_path, cluster):
    flags = ("--micro_batch_size=4", "--watchdog_secs=90")
    undisturbed, folder = cluster[0], tmp_path / "output"
    tasks = _start_cluster(csv, folder, *flags)
    try:
        saved = folder / "with_accumulation" / "model.ckpt-80.index"
        end = time.monotonic() + _DEADLINE_SECS
        while not saved.exists():
            assert time.monotonic() < end
            assert all(task.poll() is None for task in tasks)
            time.sleep(0.005)
        tasks[1].kill()
        tasks[0].communicate(timeout=180)
        assert tasks[0].returncode == 75
        checkpoint = tf.train.latest_checkpoint(str(saved.parent))
        again = _start_cluster(csv, folder, *flags)
        tasks += again
        chief, _ = map(_end, again)
    finally:
        for task in tasks:
            task.kill()
    saved_update = int(checkpoint.rpartition("-")[2]) // 2  # of 2 micro-steps each
    assert 40 <= saved_update < _UPDATES
    assert f"going on after update {saved_update}\n" in chief
    ours, theirs = (
        tf.train.load_checkpoint(str(each / "with_accumulation"))
        for each in (folder, undisturbed)
    )
    assert theirs.get_tensor("update_step") == _UPDATES
    for name in theirs.get_variable_to_shape_map():
        value = theirs.get_tensor(name)
        np.testing.assert_array_equal(ours.get_tensor(name), value, err_msg=name)


@pytest.mark.parametrize("strategy", ["none", "multi_worker"])
def test_task_that_is_a_cluster_of_its_own_trains_alone(csv, tmp_path, strategy):
    flags = (f"--strategy={strategy}", "--micro_batch_size=5", "--train_updates=3")
    cluster = {"worker": ["localhost:1"]}
    task = {"type": "worker", "index": 0}
    config = {"cluster": cluster, "task": task}
    output = _end(_start(csv, tmp_path / "output", *flags, tf_config=config))
    assert "13 = at most 5 examples x 3 micro-steps x 1 replica" in output
    assert "largest difference of any weight: " in output
