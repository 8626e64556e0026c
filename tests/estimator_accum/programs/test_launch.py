"""The launcher with tasks that end, hang, or print.

The tasks here are a small program without TensorFlow; tests/distributed has real ones.
"""

import io
import json
import pathlib
import signal
import sys
import time
import types

import psutil
import pytest
import tqdm

from estimator_accum.programs import groups
from estimator_accum.programs import launch as launcher
from tests.helpers.processes import running

# Each start of each task is a line in the file `starts`.
_TASK = f"""
import json, os, pathlib, signal, sys, time
signal.alarm({running.DEADLINE_SECS})
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = pathlib.Path(sys.argv[1].partition("=")[2])
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]["type"]
def write(name, text):
    (folder / "new").write_text(text)
    (folder / "new").replace(folder / name)
def rows(updates):
    text = "".join(f"{{n}},{{4 * n}},\\n" for n in range(1, updates + 1))
    text = "update_step,global_step,loss\\n" + text
    write("train_metrics.csv", text)
def saved(number):
    write("checkpoint", f'model_checkpoint_path: "model.ckpt-{{number}}"\\n')
def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)
with open(folder / "starts", "a") as file:
    print(json.dumps([task, os.getpid(), config["cluster"]]), file=file)
starts = (folder / "starts").read_text().count(f'["{{task}}"')
(folder / f"{{task}}-{{starts}}").touch()
"""

# These tasks do not import TensorFlow: a start costs less than a fork of a process that
# did.
pytestmark = [pytest.mark.once, pytest.mark.usefixtures("real_starts")]


@pytest.fixture
def output_dir(tmp_path) -> pathlib.Path:
    (tmp_path / "output").mkdir()
    return tmp_path / "output"


def _starts(folder: pathlib.Path) -> list[tuple[str, int, dict]]:
    """Returns (task, process, cluster) of each start."""
    path = folder / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _nothing_runs(folder: pathlib.Path) -> bool:
    return all(_has_ended(pid) for _, pid, _ in _starts(folder))


@pytest.fixture
def launch(output_dir, monkeypatch, capsys):
    """Runs the launcher in this process; returns (exit code, output)."""
    task = output_dir.with_name("task.py")
    monkeypatch.setattr(groups, "SECS_BETWEEN_LOOKS", 0.01)
    monkeypatch.setattr(launcher, "_libc", None)  # this process has threads
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)

    def run(body: str, *flags: str, folder=output_dir, total_updates=None):
        task.write_text(_TASK + body)
        command = [sys.executable, str(task), f"--output_dir={folder}"]
        if total_updates is None:
            code = launcher.main([*flags, *command])
        else:
            workers = int(flags[0].partition("=")[2])
            code = launcher.run(
                launcher.Launch(
                    command, workers, output_dir=folder, total_updates=total_updates
                )
            )
        assert _nothing_runs(output_dir)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def _start_launcher(folder: pathlib.Path, body: str = "") -> running.Program:
    """Starts a launcher in a new process; its tasks wait."""
    task = folder.with_name("task.py")
    task.write_text(_TASK + body + "\nwait_for('what never comes')")
    command = [sys.executable, str(task), f"--output_dir={folder}"]
    return running.start("-m", "estimator_accum.programs.launch", *command)


def test_all_tasks_done_is_0_and_their_lines_have_their_names(launch, output_dir):
    body = "print('out'); print('error', file=sys.stderr); print('no end', end='')"
    code, output = launch(body, "--workers=3", "--evaluator")
    assert code == 0
    tasks = ("chief 0", "evaluator 0", "worker 0", "worker 1")
    assert sorted(output.splitlines()) == sorted(
        f"[{task}] {line}" for task in tasks for line in ("out", "error", "no end")
    )
    starts = _starts(output_dir)
    assert len(starts) == 4 and all(start[2] == starts[0][2] for start in starts)


def test_servers_end_behind_the_tasks_that_use_them(launch, output_dir):
    body = """
if task == "ps": wait_for("what never comes")
while len((folder / "starts").read_text().splitlines()) < 5: time.sleep(0.01)
"""
    code, _ = launch(body, "--workers=2", "--ps=2", "--evaluator")
    starts = _starts(output_dir)
    assert code == 0 and len(starts) == 5
    assert all(set(cluster) == {"chief", "worker", "ps"} for *_, cluster in starts)


def test_one_lost_task_starts_all_again_on_other_ports(launch, output_dir):
    body = """
if task == "chief": rows(3 * starts); saved(12 * starts)
if starts == 1:
    wait_for("checkpoint")
    if task == "worker": os.kill(os.getpid(), 9)
    wait_for("what never comes")
"""
    code, output = launch(body)
    assert code == 0
    assert "[launcher] worker 0 ended with SIGKILL" in output
    assert "[launcher] restarting all tasks from update 3" in output
    clusters = [json.dumps(cluster) for _, _, cluster in _starts(output_dir)]
    assert len(clusters) == 4 and len(set(clusters)) == 2


def test_launcher_gives_up_where_no_checkpoint_comes(launch, output_dir):
    code, output = launch("sys.exit(75)", "--workers=1", "--max_restarts=2")
    assert code == 1
    assert "chief 0 ended with exit code 75" in output
    assert "stopping: 2 restarts without a new checkpoint" in output
    assert len(_starts(output_dir)) == 3


def test_launcher_goes_on_as_long_as_checkpoints_come(launch, output_dir):
    body = "saved(starts)\nsys.exit(starts < 5)"
    assert launch(body, "--workers=1", "--max_restarts=1")[0] == 0
    assert len(_starts(output_dir)) == 5


def test_what_does_not_fit_is_not_tried_again(launch, output_dir):
    body = """
wait_for("chief-1", "what never comes" if task == "chief" else "worker-1")
print("a sentence")
sys.exit(2)
"""
    code, output = launch(body)
    assert code == 2 and "[worker 0] a sentence" in output
    assert len(_starts(output_dir)) == 2


def test_damaged_files_are_left_to_the_tasks(launch, output_dir):
    for name in ("checkpoint", "train_metrics.csv"):
        (output_dir / name).write_bytes(b"update_step,\xff\n\xff,\n\xff,\n")
    assert launch("", "--workers=1", "--max_restarts=0")[0] == 0
    (output_dir / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-5"')
    code, output = launch("sys.exit(1)", "--workers=1", "--max_restarts=1")
    assert code == 1 and "from model.ckpt-5" in output


def test_of_a_file_in_the_folders_place_the_tasks_speak(launch, output_dir):
    file = output_dir.with_name("file")
    file.write_text("")
    code, output = launch("", "--workers=1", "--max_restarts=0", folder=file)
    assert code == 1 and "[chief 0] NotADirectoryError" in output


def _set_clock(monkeypatch, now) -> None:
    fake = types.SimpleNamespace(monotonic=now, sleep=time.sleep)
    monkeypatch.setattr(launcher, "time", fake)


def test_tasks_that_all_hang_start_again(launch, output_dir, monkeypatch):
    has_begun, start = output_dir / "chief-1", [0]

    def now() -> int:
        """Begins at 0, also if the task is faster than its launcher."""
        return start.pop() if start else 331 * has_begun.exists()

    _set_clock(monkeypatch, now)
    body = "if starts == 1: wait_for('what never comes')\nrows(6)"
    code, output = launch(body, "--workers=1", total_updates=6)
    assert code == 0
    assert "[launcher] no progress for 330 s, though all tasks run" in output


@pytest.mark.parametrize("updates", [5, 6])
def test_evaluation_after_the_last_update_may_be_slow(output_dir, monkeypatch, updates):
    now = 100.0
    _set_clock(monkeypatch, lambda: now)
    progress = launcher._Progress(output_dir, total_updates=6)
    progress.start()
    now = 110.0
    rows = "".join(f"{n},\n" for n in range(1, updates + 1))
    (output_dir / "train_metrics.csv").write_text(f"update_step\n{rows}")
    progress.look()
    now = 120.0
    progress.look()
    assert not progress.has_stopped(10)
    now = 120.5
    assert progress.has_stopped(10) == (updates < 6)


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 75)]
)
def test_signal_lets_every_task_end_and_is_the_exit_code(output_dir, number, code):
    body = """
def end(*_):
    time.sleep(0.1)
    (folder / f"saved-{task}").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
(folder / f"ready-{task}").touch()
"""
    with _start_launcher(output_dir, body) as launcher:
        running.wait_until((output_dir / "ready-chief").exists, launcher)
        running.wait_until((output_dir / "ready-worker").exists, launcher)
        launcher.process.send_signal(number)
        done = launcher.wait()
        assert _nothing_runs(output_dir)
    assert done.returncode == code and f"stopped by {number.name}" in done.stdout
    for task in ("chief", "worker"):
        assert (output_dir / f"saved-{task}").exists()


def test_a_script_around_a_task_is_no_hindrance_to_its_last_save(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "_libc", None)  # this process has threads
    saves = f"""trap 'echo once >> {tmp_path}/saved; exit' TERM; touch {tmp_path}/ready
        for _ in {{1..3000}}; do sleep 0.01; done"""
    script = ["bash", "-c", 'bash -c "$0"; echo', saves]
    task = launcher._Task("chief 0", script, {"task": {"type": "chief"}})
    try:
        running.wait_until((tmp_path / "ready").exists)
        launcher._let_end([task], running.DEADLINE_SECS)
        assert (tmp_path / "saved").read_text() == "once\n"
    finally:
        task.kill()


def test_what_a_lost_task_leaves_is_ended(launch, output_dir):
    body = """
child = os.fork()
if child == 0: signal.alarm(9999); wait_for("what never comes")
write("child", str(child))
sys.exit(1)
"""
    assert launch(body, "--workers=1", "--max_restarts=0")[0] == 1
    child = int((output_dir / "child").read_text())
    running.wait_until(lambda: _has_ended(child))


def test_launcher_ignores_signals_that_it_was_started_to_ignore(launch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts it
    try:
        code, _ = launch("os.kill(os.getppid(), signal.SIGHUP)", "--workers=1")
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 0


def test_second_signal_ends_tasks_that_go_on(output_dir):
    with _start_launcher(output_dir) as launcher:
        running.wait_until(lambda: len(_starts(output_dir)) == 2, launcher)
        launcher.process.send_signal(signal.SIGHUP)
        running.wait_until(lambda: "second signal" in launcher.done().stdout, launcher)
        launcher.process.send_signal(signal.SIGTERM)
        assert launcher.wait().returncode == 128 + signal.SIGHUP
        running.wait_until(lambda: _nothing_runs(output_dir))


def test_no_task_survives_a_launcher_that_is_killed(output_dir):
    with _start_launcher(output_dir) as launcher:
        running.wait_until(lambda: len(_starts(output_dir)) == 2, launcher)
        assert not _nothing_runs(output_dir)
        launcher.process.kill()
        running.wait_until(lambda: _nothing_runs(output_dir))
        assert launcher.wait().returncode == -signal.SIGKILL


def test_one_bar_shows_the_updates_on_a_terminal(launch, output_dir, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            for updates in "36":
                if f" {updates}/6 " in text:
                    (output_dir / f"shown-{updates}").touch()
            return super().write(text)

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    body = "rows(3); wait_for('shown-3'); rows(6); wait_for('shown-6')"
    assert launch(body, "--workers=1", total_updates=6)[0] == 0
    shown = terminal.getvalue()
    assert shown.count("training:") >= 2 and "\n" not in shown.strip()


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--workers=0 python", "`--workers` must be an integer >= 1. Received: 0."),
        ("--max_restarts=-1 python", "`--max_restarts` must be an integer >= 0."),
        ("--workers=2", "must follow the flags. Received: none. Write"),
        ("--workers=x python", "`--workers` must be an integer. Received: 'x'."),
        ("--workers=1_0 python", "`--workers` must be an integer. Received: '1_0'."),
        ("--workes=2 python", "Received: --workes. Did you mean --workers?"),
        ("no-such-command", "must follow the flags. Received: no-such-command."),
    ],
)
def test_command_line_that_does_not_fit_is_one_sentence(capsys, arguments, sentence):
    try:
        code = launcher.main(arguments.split())
    except SystemExit as left:
        code = left.code
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert captured.err.startswith("estimator-accum launch: ")
    assert sentence in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "command, folder",
    [
        ("train --output_dir=a/b --x", "a/b"),
        ("train --output_dir a --x", "a"),
        ("train -model_dir=a", "a"),
        ("train --model_dir=gs://bucket/a", None),  # not a folder of this machine
        ("train --x", None),
        ("train --output_dir", None),
    ],
)
def test_folder_of_a_command_is_found_in_its_flags(command, folder):
    assert launcher._folder_of(command.split()) == (folder and pathlib.Path(folder))


def test_ports_are_free_and_different():
    ports = launcher._free_ports(20)
    assert len(set(ports)) == 20
