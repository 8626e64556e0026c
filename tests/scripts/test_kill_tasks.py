"""The comparison of a run that loses tasks with one that does not."""

import argparse
import contextlib
import os

import psutil
import pytest

from scripts.experiments import kill_tasks
from tests.helpers import running

_FLAGS = argparse.Namespace(workers=2, train_updates=20, data_dir=None)
_SIZE = 2000  # generated digits: half of the examples of 20 updates


def _write_logs(folder, *, repeated=0, changed=None):
    """Writes logs of two workers; the last micro-steps are repeated, first wrong."""
    folder.mkdir()
    for rank in range(2):
        lines = []
        for micro_step in range(1, 41):
            first = (micro_step - 1) * 100 + rank * 50
            numbers = [n % _SIZE for n in range(first, first + 50)]
            lines.append(f"{micro_step} {' '.join(map(str, numbers))}")
        before = [f"{line.split()[0]} 7 7 7" for line in lines[40 - repeated :]]
        lines[40 - repeated : 40 - repeated] = before
        if changed is not None and rank == 1:
            lines[-1] = changed(lines[-1])
        (folder / f"examples-{rank}.log").write_text("\n".join(lines) + "\n")


def _are_used_once(folder, capsys, **options) -> tuple[bool, str]:
    quiet, killed = folder / "undisturbed", folder / "killed"
    _write_logs(quiet)
    _write_logs(killed, **options)
    is_so = kill_tasks._are_used_once(_FLAGS, quiet, killed)
    return is_so, capsys.readouterr().out


def test_micro_steps_that_were_repeated_count_once(tmp_path, capsys):
    is_so, output = _are_used_once(tmp_path, capsys, repeated=3)
    assert is_so
    assert "killed: 6 micro-steps of one worker were repeated" in output
    assert "4,000 examples in 2 epochs of 2,000, each once an epoch: yes" in output


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        (lambda line: line.rpartition(" ")[0], "each once an epoch: NO"),  # lost
        (lambda line: f"{line} 1999", "each once an epoch: NO"),
        (lambda line: line.replace("1999", "1998"), "each once an epoch: NO"),
        (lambda line: line.replace("1998 1999", "1999 1998"), "updates: NO"),
    ],
)
def test_example_lost_or_counted_twice_is_found(tmp_path, capsys, changed, word):
    is_so, output = _are_used_once(tmp_path, capsys, changed=changed)
    assert not is_so and word in output


@pytest.mark.parametrize(("last", "word"), [("2,0.5,77.0", "yes"), ("2,0.6,9.0", "NO")])
def test_metrics_may_differ_in_the_speed_only(tmp_path, capsys, last, word):
    folders = tmp_path / "undisturbed", tmp_path / "killed"
    for folder, line in zip(folders, ("2,0.5,9.0", last), strict=True):
        folder.mkdir()
        table = f"update_step,loss,examples_per_sec\n1,0.7,8.0\n{line}\n"
        (folder / "train_metrics.csv").write_text(table)
    assert kill_tasks._is_told_alike(*folders) == (word == "yes")
    assert f"2 rows of train_metrics.csv, the same: {word}" in capsys.readouterr().out


def test_tasks_are_found_by_their_command_line_and_environment(tmp_path):
    # With an interpreter flag it is really started, so /proc shows its own command.
    command = ("-S", "-c", "import signal; signal.pause()", "main.py")
    command += (f"--output_dir={tmp_path}", "--workers=2")
    with running.cluster(command, jobs=("chief", "worker")) as tasks:
        names = {tasks[0].process.pid: "chief 0", tasks[1].process.pid: "worker 0"}
        running.wait_until(lambda: kill_tasks._tasks(tmp_path) == names, *tasks)
        assert kill_tasks._tasks(tmp_path / "other") == {}


def _forked_tasks(_) -> dict[int, str]:
    """Returns forked tasks: they have their server's command line, but own sessions."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            if os.getsid(process.pid) == process.pid and not is_zombie:
                found[process.pid] = "chief 0"
    return found


@pytest.mark.once
@pytest.mark.slow
def test_a_kill_changes_no_bit_and_loses_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kill_tasks, "_tasks", _forked_tasks)
    monkeypatch.setattr(kill_tasks, "_EFFECTIVE_BATCH", 20)
    monkeypatch.setattr(kill_tasks, "_LONGEST_PAUSE_SECS", 0.0)
    monkeypatch.setattr(kill_tasks, "_DEADLINE_SECS", running.DEADLINE_SECS)
    # A cluster of one task; test_launch_local.py kills one of two.
    flags = ["--workers=1", "--kills=1", "--seed=14"]
    flags += ["--train_updates=200", "--save_checkpoints_updates=25"]
    code = kill_tasks.main([f"--output_dir={tmp_path / 'kills'}", *flags])
    output = capsys.readouterr().out
    print(output)
    assert code == 0
    assert output.count("\nkilled ") == 1
    assert "variables, bit for bit the same: yes" in output
    assert "4,000 examples in 2 epochs of 2,000, each once an epoch: yes" in output
