"""Real clusters on this machine: the weights of one worker, and a task that is lost.

Tasks that are killed and started again: tests/scripts/test_kill_tasks.py.
"""

import subprocess
from functools import partial

import numpy as np
import pytest
from cluster_tasks import environment
from local_cluster import (
    run,
    start,
    values,
    wait_until,
)

from distributed.launch_local import _tf_configs

pytestmark = pytest.mark.slow

_UPDATES = 10


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory):
    """One process alone, 200 examples at once, in the files' order."""
    folder = tmp_path_factory.mktemp("alone") / "output"
    code, _ = run("main", f"--output_dir={folder}", *_flags("--micro_batch_size=200"))
    assert code == 0
    return folder


def _flags(*more: str) -> list[str]:
    return [f"--train_updates={_UPDATES}", "--noshuffle", *more]


def _assert_close(ours: dict, theirs: dict) -> None:
    weights = [name for name in theirs if name.endswith(("/kernel", "/bias"))]
    assert len(weights) == 8
    for name in weights:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-5)
    assert ours["update_step"] == theirs["update_step"] == _UPDATES


def _has(path, text: str) -> bool:
    return path.exists() and text in path.read_text()


def _rows(folder) -> list[list[str]]:
    lines = (folder / "train_metrics.csv").read_text().splitlines()
    return [line.split(",") for line in lines[1:]]


@pytest.mark.parametrize(
    "workers, micro_batch, steps",
    [
        pytest.param(1, 100, 2, marks=pytest.mark.once),
        pytest.param(2, 100, 1, marks=pytest.mark.once),
        (2, 50, 2),
    ],
)
def test_original_runs_have_the_weights_of_one_worker(
    tmp_path, one_worker, workers, micro_batch, steps
):
    folder = tmp_path / "output"
    sizes = (
        f"--micro_batch_size={micro_batch}",
        f"--gradient_accumulation_steps={steps}",
    )
    where = ["launch_local", f"--workers={workers}"] if workers > 1 else ["main"]
    code, output = run(*where, f"--output_dir={folder}", *_flags(*sizes))
    assert code == 0
    assert f"effective batch 200 = {micro_batch} examples x {steps} micro" in output
    _assert_close(values(folder), values(one_worker))
    assert [row[2] for row in _rows(folder)] == [
        str(200 * (n + 1)) for n in range(_UPDATES)
    ]
    assert "accuracy = " in (folder / "eval_results.txt").read_text()
    assert len(list((folder / "export" / "final").iterdir())) == 1


@pytest.mark.once
@pytest.mark.parametrize("workers, steps", [(1, 4), (4, 1)])
def test_number_of_workers_changes_no_weight(tmp_path, one_worker, workers, steps):
    folder = tmp_path / "output"
    same = [f"--output_dir={folder}", *_flags("--micro_batch_size=50")]
    code, output = run("launch_local", f"--workers={workers}", *same)
    assert code == 0
    assert f"effective batch 200 = 50 examples x {steps} micro-steps x" in output
    _assert_close(values(folder), values(one_worker))


@pytest.mark.once
def test_shares_that_differ_and_an_evaluator_have_the_weights_of_one_worker(
    tmp_path, one_worker
):
    folder = tmp_path / "output"
    code, output = run(
        "launch_local",
        "--workers=3",
        "--evaluator",
        f"--output_dir={folder}",
        *_flags("--save_checkpoints_updates=5"),
    )
    assert code == 0
    assert (
        "effective batch 200 = at most 67 examples x 1 micro-steps x 3 replicas"
        in output
    )
    _assert_close(values(folder), values(one_worker))
    assert "[evaluator 0] accuracy = " in output
    assert "[chief 0] accuracy" not in output
    assert len(list((folder / "export" / "final").iterdir())) == 1


@pytest.mark.once
def test_task_that_has_lost_the_other_ends_itself(tmp_path):
    # Without a launcher, as under Kubernetes or Slurm. To begin takes time as well.
    flags = ["--train_updates=100000", "--watchdog_secs=60"]
    folder = tmp_path / "output"
    tasks = []
    with (tmp_path / "log").open("w+") as log:
        try:
            for tf_config in _tf_configs(2, has_evaluator=False).values():
                own, flag = environment(tf_config), f"--output_dir={folder}"
                tasks.append(start("main", flag, *flags, env=own, stdout=log))
            metrics = folder / "train_metrics.csv"
            wait_until(partial(_has, metrics, "\n3,"))
            tasks[1].kill()
            code = tasks[0].wait(180)
        except subprocess.TimeoutExpired:
            code = "it waits"
        finally:
            for task in tasks:
                task.kill()
                task.wait()
            log.seek(0)
            output = log.read()
            print(output[-4000:])
    assert code == 75
    assert "after another task was lost. Start all tasks again." in output
