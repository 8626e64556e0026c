"""Real clusters on this machine: the weights of one worker, and a task that is lost.

Tasks that are killed and started again: tests/scripts/test_kill_tasks.py.
"""

import pathlib

import pytest
import running
from short_run import FLAGS, assert_same_weights, examples_seen

pytestmark = pytest.mark.slow

_LAUNCHER = ("-m", "distributed.launch_local")
_PROGRAM = pathlib.Path(__file__).with_name("short_of_memory.py")


def test_workers_that_accumulate_have_the_weights_of_one(
    tmp_path, one_worker, real_starts
):
    folder = tmp_path / "output"
    flags = (f"--output_dir={folder}", "--micro_batch_size=51", *FLAGS)
    done = running.run(*_LAUNCHER, "--workers=2", *flags)
    assert done.returncode == 0
    sizes = "effective batch 203 = at most 51 examples x 2 micro-steps x 2 replicas"
    assert sizes in done.output
    assert_same_weights(folder, one_worker)
    assert examples_seen(folder) == [203 * (n + 1) for n in range(6)]
    assert "accuracy = " in (folder / "eval_results.txt").read_text()
    assert len(list((folder / "export" / "final").iterdir())) == 1


@pytest.mark.once
def test_cluster_that_lost_a_task_ends_and_one_worker_goes_on(
    tmp_path, one_worker, run_main
):
    # Without a launcher, as under Kubernetes or Slurm.
    folder = tmp_path / "output"
    flags = (f"--output_dir={folder}", "--save_checkpoints_updates=3", *FLAGS)
    command = (_PROGRAM, "--rows_in_memory=1000")
    commands = (*command, "--updates=0", *flags), (*command, "--updates=4", *flags)
    with running.cluster(*commands, jobs=("chief", "worker"), cwd=tmp_path) as tasks:
        chief, worker = (task.wait() for task in tasks)
    sizes = "effective batch 203 = at most 102 examples x 1 micro-steps x 2 replicas"
    assert sizes in chief.output
    assert (chief.returncode, worker.returncode) == (75, 9)
    # TensorFlow's session is made anew, or waits for ever.
    new_session = "after another task was lost. Start all tasks again."
    waits = "chief 0 has made no progress for 1e+06 seconds, and ends itself."
    assert new_session in chief.output or waits in chief.output
    code, output = run_main(*flags)
    assert code == 0 and "going on after update 3" in output
    assert_same_weights(folder, one_worker)
