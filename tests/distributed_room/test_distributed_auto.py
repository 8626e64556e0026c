"""--micro_batch_size=auto: as many micro-batches as memory asks for, the same weights."""

import pathlib

import pytest
import running
from short_run import FLAGS, assert_same_weights, examples_seen, values

pytestmark = [pytest.mark.slow, pytest.mark.once]

_PROGRAM = pathlib.Path(__file__).with_name("short_of_memory.py")


def _command(folder, rows_in_memory: int, updates=0) -> tuple:
    return (
        _PROGRAM,
        f"--rows_in_memory={rows_in_memory}",
        f"--updates={updates}",
        f"--output_dir={folder}",
        "--micro_batch_size=auto",
        "--save_checkpoints_updates=3",
        *FLAGS,
    )


def test_memory_decides_and_micro_steps_go_on_with_the_same_weights(
    tmp_path, one_worker, run_main
):
    folder = tmp_path / "output"
    done = running.run(*_command(folder, 51, updates=4), cwd=tmp_path)
    assert done.returncode == 9
    assert "203 examples in as many micro-batches as memory asks for" in done.output
    for change in ("1 -> 2", "2 -> 4"):
        assert f"micro-batches {change}: out of memory at update 1" in done.output
    assert values(folder)["update_step"] == values(folder)["global_step"] == 3
    # The folder is one run's, whatever cuts its batches.
    code, output = run_main(f"--output_dir={folder}", "--micro_batch_size=60", *FLAGS)
    assert code == 0 and "going on after update 3" in output
    assert_same_weights(folder, one_worker)
    # The fourth update was done twice.
    assert examples_seen(folder) == [203 * (n + 1) for n in range(6)]


def test_each_worker_has_a_count_of_its_own_and_the_evaluator_the_last_word(
    tmp_path, one_worker
):
    folder = tmp_path / "output"
    commands = [_command(folder, rows) for rows in (1000, 26, 1000)]
    jobs = ("chief", "worker", "evaluator")
    with running.cluster(*commands, jobs=jobs, cwd=tmp_path) as tasks:
        chief, worker, evaluator = (task.wait() for task in tasks)
    for done in (chief, worker, evaluator):
        assert done.returncode == 0
    assert "out of memory" not in chief.output
    assert "micro-batches 2 -> 4: out of memory at update 1" in worker.output
    assert_same_weights(folder, one_worker)
    assert "accuracy = " in evaluator.output and "accuracy = " not in chief.output
    assert len(list((folder / "export" / "final").iterdir())) == 1
