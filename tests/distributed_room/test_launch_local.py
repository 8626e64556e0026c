"""What the launcher does with tasks that end, hang, or speak.

The tasks here are a small program in TensorFlow's place; test_clusters.py has real ones.
"""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios

import pytest
from cluster_tasks import environment
from local_cluster import ROOT, processes_with, wait_until

from distributed import launch_local

# Each start of each task is a line in the file `starts`.
_TASK = """
import json, os, pathlib, sys, time
flags = dict(each[2:].split("=", 1) for each in sys.argv[1:])
folder = pathlib.Path(flags["output_dir"])
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]["type"]
with open(folder / "starts", "a") as file:
    print(task, json.dumps(config["cluster"]), file=file)
starts = (folder / "starts").read_text().count(task + " ")
def rows(updates):
    text = "update_step\\n" + "".join(f"{{n}},\\n" for n in range(1, updates + 1))
    (folder / "train_metrics.csv").write_text(text)
def saved(number):
    text = f'model_checkpoint_path: "model.ckpt-{{number}}"\\n'
    (folder / "checkpoint").write_text(text)
{body}
"""


# Processes are found by their command lines, which a forked one does not have.
pytestmark = pytest.mark.usefixtures("real_starts")


class _Launcher:
    """A launcher whose tasks are `_TASK` with a body of the test's."""

    def __init__(self, folder, body: str, *flags: str, **options):
        self.output_dir = folder / "output"
        self.output_dir.mkdir()
        self.task = folder / "task.py"
        self.task.write_text(_TASK.format(body=body))
        program = (
            "import pathlib, sys\n"
            "from distributed import launch_local\n"
            f"launch_local._MAIN = pathlib.Path({str(self.task)!r})\n"
            "launch_local._GRACE_SECS = 1\n"
            "sys.exit(launch_local.main(sys.argv))\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, f"--output_dir={self.output_dir}", *flags],
            cwd=ROOT,
            env=environment(),
            **{"stdout": subprocess.PIPE, "text": True, **options},
        )

    def finish(self) -> tuple[int, str]:
        """Returns (exit code, stdout), with no process left."""
        try:
            output, _ = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        print(output)
        wait_until(lambda: not processes_with(str(self.task)), 10)
        return self.process.returncode, output

    def starts(self) -> list[str]:
        path = self.output_dir / "starts"
        return path.read_text().splitlines() if path.exists() else []


def test_all_tasks_done_is_0_and_their_lines_have_their_names(tmp_path):
    launcher = _Launcher(
        tmp_path,
        "print('out'); print('error', file=sys.stderr); print('no end', end='')",
        "--workers=2",
        "--evaluator",
    )
    code, output = launcher.finish()
    assert code == 0
    tasks = ("chief 0", "evaluator 0", "worker 0")
    assert sorted(output.splitlines()) == sorted(
        f"[{task}] {line}" for task in tasks for line in ("out", "error", "no end")
    )
    clusters = {line.partition(" ")[2] for line in launcher.starts()}
    assert len(launcher.starts()) == 3 and len(clusters) == 1


def test_flags_reach_the_tasks(tmp_path):
    body = "print(sorted(flags.items()))"
    flags = ["--workers=1", "--micro_batch_size=7", "--noshuffle", "--verbosity=0"]
    code, output = _Launcher(tmp_path, body, *flags).finish()
    assert code == 0
    for pair in (("micro_batch_size", "7"), ("shuffle", "False"), ("verbosity", "0")):
        assert str(pair) in output
    assert "workers" not in output and "effective_batch_size" not in output


def test_one_lost_task_starts_all_again_on_other_ports(tmp_path):
    body = """
rows(3 * starts); saved(3 * starts)
if starts == 1 and task == "worker": os.kill(os.getpid(), 9)
if starts == 1: time.sleep(60)
"""
    launcher = _Launcher(tmp_path, body, "--train_updates=6")
    code, output = launcher.finish()
    assert code == 0
    assert "[launcher] worker 0 ended with SIGKILL" in output
    assert "[launcher] starts all tasks again, from model.ckpt-3" in output
    assert len(launcher.starts()) == 4
    assert len({line.partition(" ")[2] for line in launcher.starts()}) == 2


def test_launcher_gives_up_where_no_checkpoint_comes(tmp_path):
    launcher = _Launcher(tmp_path, "sys.exit(75)", "--workers=1", "--max_restarts=2")
    code, output = launcher.finish()
    assert code == 1
    assert "chief 0 ended with exit code 75" in output
    assert "gives up: 2 restarts without a new checkpoint" in output
    assert len(launcher.starts()) == 3


def test_launcher_goes_on_as_long_as_checkpoints_come(tmp_path):
    body = "saved(starts)\nsys.exit(starts < 5)"
    launcher = _Launcher(tmp_path, body, "--workers=1", "--max_restarts=1")
    assert launcher.finish()[0] == 0
    assert len(launcher.starts()) == 5


def test_what_does_not_fit_is_not_tried_again(tmp_path):
    body = "print('a sentence')\nsys.exit(2) if task == 'worker' else time.sleep(60)"
    launcher = _Launcher(tmp_path, body)
    code, output = launcher.finish()
    assert code == 2 and "[worker 0] a sentence" in output
    assert len(launcher.starts()) == 2


def test_tasks_that_all_hang_start_again(tmp_path):
    body = "if starts == 1: time.sleep(60)\nrows(6)"
    launcher = _Launcher(
        tmp_path, body, "--workers=1", "--watchdog_secs=2", "--train_updates=6"
    )
    code, output = launcher.finish()
    assert code == 0
    assert "[launcher] sees no progress, though all tasks are there" in output


def test_evaluation_after_the_last_update_may_take_its_time(tmp_path):
    body = "rows(6)\ntime.sleep(5)"
    launcher = _Launcher(
        tmp_path, body, "--workers=1", "--watchdog_secs=1", "--train_updates=6"
    )
    assert launcher.finish()[0] == 0
    assert len(launcher.starts()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_everything_and_is_the_exit_code(tmp_path, number):
    body = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    )
    launcher = _Launcher(tmp_path, body)
    wait_until(lambda: len(launcher.starts()) == 2, 30)
    launcher.process.send_signal(number)
    code, output = launcher.finish()
    assert code == 128 + number
    assert f"stopped by {number.name}" in output


def test_no_task_survives_a_launcher_that_is_killed(tmp_path):
    launcher = _Launcher(tmp_path, "time.sleep(60)")
    wait_until(lambda: len(launcher.starts()) == 2, 30)
    assert len(processes_with(str(launcher.task))) > 2  # the launcher has it too
    launcher.process.kill()
    assert launcher.finish()[0] == -signal.SIGKILL


def test_one_bar_shows_the_updates_on_a_terminal(tmp_path):
    main_side, task_side = pty.openpty()
    size = struct.pack("HHHH", 24, 80, 0, 0)  # rows, columns
    fcntl.ioctl(task_side, termios.TIOCSWINSZ, size)
    body = "rows(3)\ntime.sleep(1)\nrows(6)\ntime.sleep(1)"
    launcher = _Launcher(tmp_path, body, "--train_updates=6", stderr=task_side)
    assert launcher.finish()[0] == 0
    os.close(task_side)
    shown = os.read(main_side, 1 << 16).decode()
    os.close(main_side)
    assert "3/6" in shown and "6/6" in shown
    assert shown.count("training:") >= 2 and "\n" not in shown.strip()


@pytest.mark.parametrize(
    "flag, sentence",
    [
        ("--workers=0", "`--workers` must be an integer >= 1. Received: 0."),
        ("--max_restarts=-1", "`--max_restarts` must be an integer >= 0."),
        ("--effective_batch_size=1", "must have an example for each micro-step"),
        ("--train_updates=0", "`--train_updates` must be an integer >= 1"),
        ("--workes=2", "Received: --workes. Did you mean --workers?"),
    ],
)
def test_flag_that_does_not_fit_starts_nothing(tmp_path, flag, sentence):
    launcher = _Launcher(tmp_path, "", flag, stderr=subprocess.STDOUT)
    code, output = launcher.finish()
    assert code == 2 and sentence in output and output.count("\n") == 1
    assert not launcher.starts()


def test_ports_are_free_and_different():
    ports = launch_local._free_ports(20)
    assert len(set(ports)) == 20


def test_launcher_needs_no_tensorflow():
    program = "import sys, distributed.launch_local; print('tensorflow' in sys.modules)"
    output = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT)
    assert output == b"False\n"
