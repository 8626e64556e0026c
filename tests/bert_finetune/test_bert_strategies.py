"""`--strategy`: the weights of one process, real clusters, lost tasks."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from cluster_tasks import environment, tf_configs
from tiny_bert import make_settings

from bert_finetune import run_classifier
from bert_finetune.settings import Settings

pytestmark = pytest.mark.slow

_SCRIPT = pathlib.Path(run_classifier.__file__)
_MIRRORED = pathlib.Path(__file__).with_name("mirrored_program.py")
_LIMITED = pathlib.Path(__file__).with_name("limited_memory.py")
_DEADLINE_SECS = 400


@pytest.fixture
def settings(settings) -> Settings:
    return _in_windows_of_16(settings)


@pytest.fixture(scope="module")
def one(bert_dir, cola_dir, tmp_path_factory) -> dict[str, np.ndarray]:
    """The weights of one process."""
    folder = tmp_path_factory.mktemp("one")
    settings = make_settings(bert_dir, cola_dir, folder / "output")
    return _alone(_in_windows_of_16(settings), folder / "log")


def _in_windows_of_16(settings: Settings) -> Settings:
    """2 x 50 examples: the last window holds 4, for one of two replicas."""
    return dataclasses.replace(
        settings,
        do_train=True,
        num_train_epochs=2.0,
        effective_batch_size=16,
        gradient_accumulation_steps=None,
        watchdog_secs=240,  # a machine under load takes its time to begin
    )


def _flags(settings: Settings, **changes) -> list[str]:
    values = dataclasses.asdict(dataclasses.replace(settings, **changes))
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def _start(flags, log, tf_config=None, script=_SCRIPT, **more) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(script), *flags],
        env=environment(tf_config) | more,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


class _Cluster:
    """Two tasks, ended whatever happens; `fit`: examples, in the memory of each."""

    def __init__(self, flags, log_path, fit=(None, None)):
        self._log_path = log_path
        configs = tf_configs("chief", "worker")
        with log_path.open("w") as log:
            self.tasks = [
                _start(flags, log, task)
                if examples is None
                else _start(flags, log, task, _LIMITED, EXAMPLES_THAT_FIT=str(examples))
                for task, examples in zip(configs, fit, strict=True)
            ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        print(self._log_path.read_text()[-4000:])

    def kill(self):
        for task in self.tasks:
            task.kill()
            task.wait()

    def wait(self) -> list[int]:
        end = time.monotonic() + _DEADLINE_SECS
        return [task.wait(end - time.monotonic()) for task in self.tasks]


def _alone(settings, log_path, script=_SCRIPT):
    with log_path.open("w") as log:
        task = _start(_flags(settings), log, script=script)
        try:
            assert task.wait(_DEADLINE_SECS) == 0
        finally:
            task.kill()
            print(log_path.read_text()[-4000:])
    return _weights(settings.output_dir)


def _weights(folder) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(folder))
    names = reader.get_variable_to_shape_map()
    return {n: reader.get_tensor(n) for n in names if "accumul" not in n}


def _assert_close(ours, theirs):
    assert ours["update_step"] == theirs["update_step"] == 7
    names = theirs.keys() - {"global_step"}
    assert len(names) > 30
    for name in names:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-5, err_msg=name)


def test_two_processes_have_the_weights_of_one_and_the_chief_does_the_rest(
    settings, tmp_path, one
):
    flags = _flags(settings, strategy="multi_worker", do_eval=True, do_predict=True)
    with _Cluster(flags, tmp_path / "cluster_log") as cluster:
        assert cluster.wait() == [0, 0]
    output = (tmp_path / "cluster_log").read_text()
    said = (
        "effective batch 16 = 4 examples x 2 micro-steps x 2 replicas; 13 micro-steps"
    )
    assert output.count(said) == 1
    folder = pathlib.Path(settings.output_dir)
    _assert_close(_weights(folder), one)
    rows = (folder / "train_metrics.csv").read_text().splitlines()[1:]
    assert [row.split(",")[2] for row in rows] == [
        "16",
        "32",
        "48",
        "64",
        "80",
        "96",
        "100",
    ]
    assert "update_step = 7" in (folder / "eval_results.txt").read_text()
    assert len((folder / "CoLA.tsv").read_text().splitlines()) == 11


@pytest.mark.once
def test_tasks_of_different_memory_have_the_weights_of_one_process(
    settings, tmp_path, one
):
    """Shares of 8: in 2 micro-batches where 5 examples fit, in 4 where 3 do."""
    flags = _flags(settings, strategy="multi_worker", train_batch_size="auto")
    flags = [flag.replace("train_batch_size", "micro_batch_size") for flag in flags]
    with _Cluster(flags, tmp_path / "cluster_log", fit=(5, 3)) as cluster:
        assert cluster.wait() == [0, 0]
    assert "micro-batches 2 -> 4: out of" in (tmp_path / "cluster_log").read_text()
    folder = pathlib.Path(settings.output_dir)
    ours = _weights(folder)
    _assert_close(ours, one)
    assert ours["global_step"] == 7
    counts = [
        json.loads((folder / f"micro_batches-{task}-0.json").read_text())
        for task in ("chief", "worker")
    ]
    assert counts == [{"micro_batches": 2}, {"micro_batches": 4}]


@pytest.mark.once
def test_cluster_that_was_killed_goes_on_bit_for_bit(settings, tmp_path):
    """Saved every 3 micro-steps, which is every 2 updates of 2."""
    settings = dataclasses.replace(
        settings,
        strategy="multi_worker",
        num_train_epochs=8.0,
        save_checkpoints_steps=3,
    )
    whole = _flags(settings, output_dir=str(tmp_path / "whole"))
    with _Cluster(whole, tmp_path / "whole_log") as cluster:
        assert cluster.wait() == [0, 0]
    folder = pathlib.Path(settings.output_dir)
    with _Cluster(_flags(settings), tmp_path / "killed_log") as cluster:
        _wait_for(folder / "model.ckpt-8.index", cluster.tasks)
        cluster.kill()
    saved = {int(path.stem.partition("-")[2]) for path in folder.glob("*.index")}
    assert all(step % 4 == 0 for step in saved) and max(saved) < 50
    with _Cluster(_flags(settings), tmp_path / "cluster_log") as cluster:
        assert cluster.wait() == [0, 0]
    assert "going on after micro-step" in (tmp_path / "cluster_log").read_text()
    ours, theirs = _weights(folder), _weights(tmp_path / "whole")
    assert ours.keys() == theirs.keys() and ours["update_step"] == 25
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def _wait_for(path, tasks):
    end = time.monotonic() + _DEADLINE_SECS
    while not path.exists():
        assert time.monotonic() < end and all(t.poll() is None for t in tasks)
        time.sleep(0.01)


@pytest.mark.once
def test_task_that_has_lost_the_other_ends_itself(settings, tmp_path):
    flags = _flags(
        settings, strategy="multi_worker", num_train_epochs=1000.0, watchdog_secs=100
    )
    with _Cluster(flags, tmp_path / "log") as cluster:
        metrics = pathlib.Path(settings.output_dir) / "train_metrics.csv"
        _wait_for(metrics, cluster.tasks)
        time.sleep(1)
        cluster.tasks[1].kill()
        assert cluster.tasks[0].wait(240) == 75


@pytest.mark.once
def test_mirrored_over_two_cpus_has_the_weights_of_one(settings, tmp_path, one):
    settings = dataclasses.replace(settings, strategy="mirrored")
    two = _alone(settings, tmp_path / "log", _MIRRORED)
    said = (
        "effective batch 16 = 4 examples x 2 micro-steps x 2 replicas; 13 micro-steps"
    )
    assert said in (tmp_path / "log").read_text()
    _assert_close(two, one)
