"""Real clusters on this machine: the weights of one worker, even if a task is lost.

For tasks that are killed and restarted see tests/scripts/test_disturb_runs.py.
"""

import pathlib
import sys

import numpy as np
import pytest

from distributed import inputs, jobs
from estimator_accum.programs.cluster import Cluster
from tests.helpers.models.short_run import (
    FLAGS,
    assert_same_weights,
    examples_seen,
    short_settings,
    values,
)
from tests.helpers.processes import running

pytestmark = pytest.mark.slow

_PROGRAM = running.PROGRAMS / "short_of_memory.py"
_SIZES = "effective batch 203 = at most 51 examples x 2 micro-steps x 2 replicas"


def _flags(folder) -> tuple:
    return (f"--output_dir={folder}", "--micro_batch_size=51", *FLAGS)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory) -> pathlib.Path:
    """Output folder of a run of two workers, started by the launcher."""
    folder = tmp_path_factory.mktemp("two_workers") / "output"
    launcher = ("-m", "distributed.launch_local", "--workers=2")
    done = running.run(*launcher, *_flags(folder))
    assert done.returncode == 0 and _SIZES in done.output
    return folder


def test_workers_that_accumulate_have_the_weights_of_one(two_workers, one_worker):
    assert_same_weights(two_workers, one_worker)
    assert examples_seen(two_workers) == [203 * (n + 1) for n in range(6)]
    assert "accuracy = " in (two_workers / "eval_results.txt").read_text()
    assert len(list((two_workers / "export" / "final").iterdir())) == 1
    assert not list(two_workers.glob("tmp_*"))  # of the other worker


@pytest.mark.once
def test_cluster_that_lost_a_task_ends_and_goes_on_bit_for_bit(tmp_path, two_workers):
    # Without a launcher, as under Kubernetes or Slurm.
    folder = tmp_path / "output"
    command = (_PROGRAM, "--rows_in_memory=1000")
    flags = ("--save_checkpoints_updates=3", *_flags(folder))
    options = {"jobs": ("chief", "worker"), "cwd": tmp_path}
    # Dies in mid-window, and after an update without a checkpoint.
    lives, dies = ((*command, f"--micro_steps={n}", *flags) for n in (0, 9))
    with running.cluster(lives, dies, **options) as tasks:
        chief, worker = (task.wait() for task in tasks)
    assert (chief.returncode, worker.returncode) == (75, 9)
    # TensorFlow creates a new session, or waits for ever.
    new_session = "after another task was lost. Start all tasks again."
    waits = "chief 0 has made no progress for 1e+06 seconds, and ends itself."
    assert new_session in chief.output or waits in chief.output
    (scratch,) = folder.glob("tmp_*")  # of the worker, which could not remove it
    assert not list(scratch.glob("model.ckpt*"))
    (tmp_path / "died").unlink()
    with running.cluster(lives, **options) as tasks:
        chief, worker = (task.wait() for task in tasks)
    assert chief.returncode == worker.returncode == 0
    assert "resuming after update 3" in chief.output
    _assert_same(folder, two_workers)


def test_a_chief_with_a_server_has_the_weights_of_one_task(tmp_path, one_worker):
    folder = tmp_path / "output"
    launcher = ("-m", "estimator_accum", "launch", "--workers=1", "--ps=1")
    program = (sys.executable, "-m", "distributed.main", "--strategy=parameter_server")
    done = running.run(*launcher, *program, *_flags(folder))
    assert done.returncode == 0
    assert "24 micro-steps = 6 updates of 1 worker" in done.output
    assert_same_weights(folder, one_worker)
    assert examples_seen(folder) == [203 * (n + 1) for n in range(6)]
    assert "accuracy = " in (folder / "eval_results.txt").read_text()


def _assert_same(folder: pathlib.Path, undisturbed: pathlib.Path) -> None:
    ours, theirs = values(folder), values(undisturbed)
    assert ours.keys() == theirs.keys() and ours["update_step"] == 6
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    assert examples_seen(folder) == examples_seen(undisturbed)


@pytest.mark.once
def test_a_signal_stops_all_after_the_same_update_and_one_goes_on(tmp_path, one_worker):
    folder = tmp_path / "output"
    command, flags = (_PROGRAM, "--rows_in_memory=1000"), _flags(folder)
    options = {"jobs": ("chief", "worker"), "cwd": tmp_path}
    # The signal comes in the first micro-step of the third update.
    lives, stops = ((*command, f"--micro_steps={n}", *flags) for n in (0, -4))
    with running.cluster(lives, stops, **options) as tasks:
        chief, worker = (task.wait() for task in tasks)
    assert (chief.returncode, worker.returncode) == (75, 143)
    for task in (chief, worker):
        assert "saved at update 3; the same command resumes." in task.output
    assert not list(folder.glob("tmp_*"))
    jobs.execute(jobs.prepare(inputs.read(short_settings(folder), Cluster())))
    assert_same_weights(folder, one_worker)
    assert examples_seen(folder) == [203 * (n + 1) for n in range(6)]
