"""One command for any hardware, which does not change the weights."""

import dataclasses
import json
import os
import pathlib
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from estimator_accum.programs import job as shared_job
from estimator_accum.programs.cluster import Cluster, enter
from estimator_accum.programs.watchdog import ProgressHook
from housing_example import demo_data, input_pipeline, inputs, jobs
from housing_example.table import csv_text
from tests.helpers.processes import running

pytestmark = [pytest.mark.slow, pytest.mark.once]

_PROGRAM = running.PROGRAMS / "housing_program.py"
_UPDATES = 6
_FLAGS = {"effective_batch_size": 13, "train_updates": _UPDATES}
_FLAGS |= {"watchdog_secs": 1_000_000}  # never on a clock


def _weights(folder) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(folder))
    assert reader.get_tensor("update_step") == _UPDATES
    names = reader.get_variable_to_shape_map()
    arrays = {
        n: reader.get_tensor(n) for n in names if n.endswith(("/kernel", "/bias"))
    }
    assert len(arrays) == 8
    return arrays


def _assert_same(folder: pathlib.Path, whole: dict[str, np.ndarray]) -> None:
    ours = _weights(folder)
    for name, value in whole.items():
        atol = 1e-5 * np.abs(value).max()
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=atol, err_msg=name)


def _assert_all_seen(folder: pathlib.Path) -> None:
    rows = pd.read_csv(folder / "train_metrics.csv")
    assert rows["examples"].tolist() == [13 * (n + 1) for n in range(_UPDATES)]


@pytest.fixture(scope="module")
def two_devices(csv, tmp_path_factory) -> pathlib.Path:
    """Output folder of a run on two devices of a process, compared with one device."""
    folder = tmp_path_factory.mktemp("two_devices") / "output"
    flags = {"train_csv": csv, "output_dir": folder, "strategy": "mirrored"} | _FLAGS
    words = (f"--{name}={value}" for name, value in flags.items())
    command = (_PROGRAM, "--cpus=2", "--dies_after=0", *words, "--micro_batch_size=4")
    done = running.run(*command, PYTHONPATH=str(running.ROOT))
    assert done.returncode == 0
    assert "13 = at most 4 examples x 2 micro-steps x 2 replicas" in done.output
    (apart,) = re.findall(r"largest difference of any weight: (\S+) of", done.output)
    assert float(apart) < 1e-5
    return folder


@pytest.fixture(scope="module")
def whole(two_devices) -> dict[str, np.ndarray]:
    """Weights of a run on one device with 13 examples at once."""
    return _weights(two_devices / "without_accumulation")


@pytest.fixture
def killed(two_devices, tmp_path) -> pathlib.Path:
    """Copy of `two_devices` as after a kill after update 4, of 2 micro-steps each."""
    folder = pathlib.Path(shutil.copytree(two_devices, tmp_path / "output"))
    state = 'model_checkpoint_path: "model.ckpt-8"\n'
    (folder / "with_accumulation" / "checkpoint").write_text(state)
    return folder


def test_several_devices_train_as_one(two_devices, whole):
    _assert_same(two_devices / "with_accumulation", whole)
    _assert_all_seen(two_devices / "with_accumulation")


def test_memory_or_devices_move_no_weight(csv, killed, whole, run_main, limited_memory):
    flags = {"train_csv": csv, "output_dir": killed} | _FLAGS
    with limited_memory(3):
        done = run_main(flags | {"micro_batch_size": "auto"})
    assert done.returncode == 0
    assert (
        "13 examples with the number of micro-batches chosen by memory x 1"
        in done.stderr
    )
    assert "resuming after update 4" in done.stderr
    assert "micro-batches 2 -> 4: out of memory at update 5" in done.stderr
    assert "as memory allows (13)" in done.stdout and "without" not in done.output
    folder = killed / "with_accumulation"
    count = json.loads((folder / "micro_batches.json").read_text())
    assert count == {"micro_batches": 8}  # 13, 7, 4, and then 2 at once
    for job in ("eval", "predict"):  # of 4 examples, whose results are those of all
        count = json.loads((folder / f"micro_batches-{job}.json").read_text())
        assert count == {"micro_batches": 2}
        (folder / f"micro_batches-{job}.json").unlink()
    again = run_main(flags | {"micro_batch_size": "auto"})
    assert again.stdout == done.stdout
    _assert_same(folder, whole)
    _assert_all_seen(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_task_of_a_cluster_trains_its_share_under_a_watchdog(
    csv, killed, settings_in, monkeypatch, rank
):
    """For real clusters see tests/distributed and tests/bert_finetune."""
    cluster = Cluster(workers=("a:1", "b:1"), task_type="worker", task_index=rank)
    calls, train_input_fn = [], input_pipeline.train_input_fn

    class NotedWatchdog(shared_job.Watchdog):
        def start(self):
            calls.append(("start", self._deadline_secs, self._task))
            assert self._find_reason() is None  # nobody listens

        def stop(self):
            calls.append("stop")

    def make_strategy(*values):
        assert values == ("multi_worker", cluster)
        enter(cluster)
        return tf.distribute.OneDeviceStrategy("CPU:0")

    def noted_input_fn(*arguments, **options):
        calls.append((options["replicas"], options["first_update"]))
        return train_input_fn(*arguments, **options)

    def train_and_evaluate(estimator, train_spec, eval_spec):
        (hook,) = (hook for hook in train_spec.hooks if isinstance(hook, ProgressHook))
        steps = hook._first_global_step, train_spec.max_steps
        calls.append((*steps, json.loads(os.environ["TF_CONFIG"])["task"]["index"]))

    monkeypatch.setenv("TF_CONFIG", "")  # restored after the test
    monkeypatch.setattr(shared_job, "Watchdog", NotedWatchdog)
    monkeypatch.setattr(jobs, "make_strategy", make_strategy)
    monkeypatch.setattr(input_pipeline, "train_input_fn", noted_input_fn)
    _ = tf.estimator.Estimator  # loads the module, which would undo the next line
    monkeypatch.setattr(tf.estimator, "train_and_evaluate", train_and_evaluate)
    changes = {"train_csv": str(csv), "shuffle": True, "strategy": "multi_worker"}
    sizes = {"micro_batch_size": 4}
    settings = dataclasses.replace(settings_in(killed), **changes, **sizes, **_FLAGS)
    told = jobs.execute(jobs.prepare(inputs.read(settings, cluster)))
    assert calls[:3] == [
        ("start", 1_000_000, f"worker {rank}"),
        (range(rank, rank + 1), 4),
        (8, 8 + 2 * 2, rank),
    ]
    assert calls[3] == "stop"
    if rank == 0:
        assert "with accumulation (at most 4 x 2 x 2)" in told and "plot: " in told
        assert "TF_CONFIG" not in os.environ  # other tasks may have ended
    else:
        assert told is None


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


def test_a_cluster_of_one_task_trains_alone(csv, tmp_path, run_main, monkeypatch):
    """With K = 1 and its own test set: there is nothing to compare with."""
    task = {"type": "worker", "index": 0}
    config = {"cluster": {"worker": ["localhost:1"]}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    path = tmp_path / "test.csv"
    path.write_text(csv_text(demo_data.generate(3, seed=5)))
    flags = {"train_csv": csv, "test_csv": path, "output_dir": tmp_path / "output"}
    flags |= {"strategy": "multi_worker", "effective_batch_size": 13}
    flags |= {"train_updates": 1, "gradient_accumulation_multiplier": 1}
    done = run_main(flags)
    assert done.returncode == 0
    assert "13 = 13 examples x 1 micro-step x 1 replica" in done.stderr
    assert "test examples (3) " in done.stdout and "without (13)" in done.stdout
    assert "with acc" not in done.stdout and "largest difference" not in done.stdout
    assert not (flags["output_dir"] / "with_accumulation").exists()
    for name in ("test", "train"):
        used = pd.read_csv(flags["output_dir"] / f"{name}.csv")
        table = pd.read_csv(flags[f"{name}_csv"])
        pd.testing.assert_frame_equal(used, table, check_dtype=False)
