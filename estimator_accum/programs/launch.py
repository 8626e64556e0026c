r"""Starts a command as all tasks of a cluster on this machine.

    estimator-accum launch --workers=2 estimator-accum train --strategy=multi_worker \
        --output_dir=output ...

Each task gets its own `TF_CONFIG`. When a task dies, all of them start again, and a
command that resumes from its last checkpoint loses little. Tasks that hang without dying
are ended by the watchdog of this project's programs, after --watchdog_secs.
Ctrl-C stops them with SIGTERM, and a second Ctrl-C with SIGKILL. If the launcher ends for
any other reason, the tasks end too. Exit codes: 0; 1 when tasks died again and again
without a new checkpoint; 2 for flags or data that do not fit; after a signal, 75 for
SIGUSR1, else 128 + the signal's number: 130 for Ctrl-C. Needs no TensorFlow.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import tqdm

from estimator_accum.programs import groups
from estimator_accum.programs.cluster import EXIT_AGAIN
from estimator_accum.programs.command_line import (
    OneSentenceParser,
    check_counts,
    command_of,
    exit_code_of,
)
from estimator_accum.programs.folder import (
    METRICS,
    fault_of_place,
    last_update,
    update_at,
)
from estimator_accum.programs.program import escape_what_stdout_lacks

_GRACE_SECS = 30  # after the tasks' own watchdogs should have ended them
_DEFAULT_RESTARTS = 5
HELP = {  # of the launchers' flags
    "workers": "Number of tasks that train.",
    "evaluator": "Add a task that evaluates each checkpoint while the others train.",
    "ps": "Number of parameter servers, for a command with --strategy=parameter_server "
    "or a script that uses them.",
    "max_restarts": "Restarts in a row without a new checkpoint before giving up.",
}
_EXIT_GAVE_UP, _EXIT_DOES_NOT_FIT = 1, 2
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_FOLDER_FLAG = re.compile(r"--?(?:output_dir|model_dir)(?:=(.*))?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A cluster of equal commands on this machine.

    Attributes:
        command: Command of every task.
        workers: Tasks that train, the chief included.
        has_evaluator: Whether one more task evaluates.
        max_restarts: Restarts in a row without a new checkpoint before giving up.
        output_dir: Folder of the run's checkpoints and `train_metrics.csv`; None where
            it is unknown: then there is no bar, and every restart counts.
        watchdog_secs: Seconds without an update after which the tasks should have ended
            themselves.
        total_updates: Updates of the run; None where it is unknown: then tasks that all
            hang are left to their own watchdogs.
        servers: Parameter servers, which are ended behind all other tasks.
    """

    command: Sequence[str]
    workers: int
    has_evaluator: bool = False
    max_restarts: int = _DEFAULT_RESTARTS
    output_dir: pathlib.Path | None = None
    watchdog_secs: int = 300
    total_updates: int | None = None
    servers: int = 0


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(
        __doc__,
        prog="estimator-accum launch",
        usage="%(prog)s [--workers=N] [--ps=N] [--evaluator] [--max_restarts=N] "
        "command ...",
        allow_abbrev=False,
    )
    parser.add_argument("--evaluator", action="store_true", help=HELP["evaluator"])
    parser.add_numbers(
        ("workers", 2, HELP["workers"]),
        ("ps", 0, HELP["ps"]),
        ("max_restarts", _DEFAULT_RESTARTS, HELP["max_restarts"]),
    )
    parser.add_folder(
        "output_dir",
        "folder of the run (default: --output_dir or --model_dir of the command)",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="command of each task, with its flags"
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: run(_launch_of(flags)), parser.prog)


def _launch_of(flags: argparse.Namespace) -> Launch:
    command = command_of(flags)
    check_counts(flags, ps=0, max_restarts=0)
    return Launch(
        command,
        flags.workers,
        flags.evaluator,
        flags.max_restarts,
        flags.output_dir or _folder_of(command),
        servers=flags.ps,
    )


def _folder_of(command: Sequence[str]) -> pathlib.Path | None:
    """Returns the output folder on this machine that a command line names, if any."""
    for flag, following in zip(command, [*command[1:], None], strict=True):
        match = _FOLDER_FLAG.fullmatch(flag)
        folder = match and (match[1] if match[1] is not None else following)
        if folder and not fault_of_place(folder):
            return pathlib.Path(folder)
    return None


def run(launch: Launch) -> int:
    """Keeps the cluster running until its tasks have ended; returns the exit code."""
    escape_what_stdout_lacks()  # of any task's lines
    before = _handle_signals(_stop)
    try:
        return _keep_running(launch)
    except _Stopped as stopped:
        (number,) = stopped.args
        _say(f"stopped by {signal.Signals(number).name}")
        return EXIT_AGAIN if number == signal.SIGUSR1 else 128 + number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle_signals(handler) -> dict[int, object]:
    """Handles the signals that are not ignored; returns their previous handlers."""
    # `nohup` and a shell's background jobs start a process that ignores some of them.
    numbers = [n for n in groups.SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


def _stop(number, frame) -> None:
    _handle_signals(_stop_at_once)
    raise _Stopped(number)


def _stop_at_once(number, frame) -> None:
    _handle_signals(signal.SIG_IGN)  # the cleanup must not be interrupted
    raise _Stopped(number)


class _Stopped(BaseException):
    """Raised by a signal that asks to stop; the argument is the signal's number."""


class _Task:
    """One process of the cluster and its output."""

    def __init__(self, name: str, command: Sequence[str], tf_config: dict):
        self.name, self.is_server = name, tf_config["task"]["type"] == "ps"
        self._rest, self._is_passed_on = b"", False
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "TF_CONFIG": json.dumps(tf_config)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # only the launcher gets Ctrl-C
            # Safe: the launcher has no threads.
            preexec_fn=_die_with_parent if _libc else None,  # noqa: PLW1509
        )
        os.set_blocking(self.process.stdout.fileno(), False)

    def show_output(self) -> bool | None:
        """Prints the lines that are available.

        Returns:
            Whether there was any output; None at the end of the output.
        """
        try:
            content = os.read(self.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + content).split(b"\n")
        if not content and self._rest:
            lines, self._rest = [self._rest], b""
        for line in lines:
            _say(line.decode(errors="replace").rstrip(), self.name)
        return True if content else None

    @property
    def code(self) -> int | None:
        """Exit code, -N after signal N; None while the process runs.

        The process remains a zombie until `kill`, so that its group keeps its number.
        """
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        end = os.waitid(os.P_PID, self.process.pid, options)
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def has_ended(self) -> bool:
        """Returns whether all processes of a task that got SIGTERM have ended."""
        if self.code is None:
            return False
        # A script that ends by itself has passed the signal on, or has its own way.
        if self.code < 0 and not self._is_passed_on:
            self._is_passed_on = True
            groups.send_signal(self.process.pid, signal.SIGTERM)
        return not groups.is_running(self.process.pid)

    def kill(self) -> None:
        """Kills the processes that still run, and prints their remaining output."""
        groups.send_signal(self.process.pid, signal.SIGKILL)
        self.process.wait()
        while self.show_output():
            pass
        self.process.stdout.close()


def _die_with_parent() -> None:
    """Asks the kernel, in the new process, to kill it when the launcher ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _say(line: str, speaker: str = "launcher") -> None:
    tqdm.tqdm.write(f"[{speaker}] {line}", file=sys.stdout)
    sys.stdout.flush()


class _Progress:
    """Progress of the run, with one bar for all tasks."""

    def __init__(self, output_dir: pathlib.Path | None, total_updates: int | None):
        self._path = output_dir and pathlib.Path(output_dir) / METRICS
        self._total = total_updates
        self._size = None
        self.updates = 0
        tqdm.tqdm.monitor_interval = 0  # no thread
        self.bar = tqdm.tqdm(
            total=self._total,
            unit=" update",
            desc="training",
            disable=None,  # no bar unless stderr is a terminal
        )

    def start(self) -> None:
        """Starts the clock of `has_stopped`."""
        self._since = time.monotonic()

    def look(self) -> None:
        """Moves the bar to the last reported update."""
        try:
            size = self._path and self._path.stat().st_size
            if size == self._size:
                return
        except (FileNotFoundError, NotADirectoryError):
            return
        self._size, self._since = size, time.monotonic()
        self.updates = last_update(self._path.parent)
        self.bar.n = self.updates
        self.bar.refresh()

    def has_stopped(self, secs: float) -> bool:
        """Returns whether there was no progress for that long, with updates left."""
        is_late = time.monotonic() - self._since > secs
        return is_late and self._total is not None and self.updates < self._total


def _keep_running(launch: Launch) -> int:
    progress = _Progress(launch.output_dir, launch.total_updates)
    restarts, checkpoint = 0, _last_checkpoint(launch.output_dir)
    try:
        while True:
            code = _run_once(launch, progress)
            if code in (0, _EXIT_DOES_NOT_FIT):
                return code
            latest = _last_checkpoint(launch.output_dir)
            restarts = 0 if latest != checkpoint else restarts
            checkpoint = latest
            if restarts == launch.max_restarts:
                _say(f"stopping: {restarts} restarts without a new checkpoint")
                return _EXIT_GAVE_UP
            restarts += 1
            _say(f"restarting all tasks from {_spoken(launch.output_dir, checkpoint)}")
    finally:
        progress.bar.close()


def _last_checkpoint(output_dir: pathlib.Path | None) -> str | None:
    if output_dir is None:
        return None
    try:
        text = (output_dir / "checkpoint").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):  # the tasks report the second one
        return None
    match = re.search(r'^model_checkpoint_path: ".*?([^/"]+)"', text, re.MULTILINE)
    return match and match[1]


def _spoken(output_dir: pathlib.Path | None, checkpoint: str | None) -> str:
    """Returns the place of a checkpoint: its update, where the metrics tell it."""
    if output_dir is None:
        return "their last checkpoint"
    if checkpoint is None:
        return "the beginning"
    global_step = checkpoint.rpartition("-")[2]
    update = update_at(output_dir, global_step)
    return checkpoint if update is None else f"update {update:,}"


def _run_once(launch: Launch, progress: _Progress) -> int:
    """Runs all tasks; returns 0 if all succeed, 2 if inputs do not fit, else 1."""
    tasks = []
    try:
        configs = _tf_configs(launch.workers, launch.has_evaluator, launch.servers)
        for name, tf_config in configs.items():
            tasks.append(_Task(name, launch.command, tf_config))
        return _watch(tasks, launch, progress)
    except _Stopped:
        with contextlib.suppress(_Stopped):  # by a second signal
            _let_end(tasks, launch.watchdog_secs + _GRACE_SECS)
        raise
    finally:
        for task in tasks:
            task.kill()


def _watch(tasks: list[_Task], launch: Launch, progress: _Progress) -> int:
    progress.start()
    with selectors.DefaultSelector() as selector:
        for task in tasks:
            selector.register(task.process.stdout, selectors.EVENT_READ, task)
        while True:
            for key, _ in selector.select(groups.SECS_BETWEEN_LOOKS):
                if key.data.show_output() is None:
                    selector.unregister(key.fileobj)
            if not selector.get_map():
                time.sleep(groups.SECS_BETWEEN_LOOKS)
            progress.look()
            codes = [task.code for task in tasks]
            lost = [task for task, code in zip(tasks, codes, strict=True) if code]
            if lost:
                return _code_of(lost)
            ended = zip(tasks, codes, strict=True)
            if all(code == 0 for task, code in ended if not task.is_server):
                return 0  # servers wait for ever
            if progress.has_stopped(launch.watchdog_secs + _GRACE_SECS):
                secs = launch.watchdog_secs + _GRACE_SECS
                _say(f"no progress for {secs} s, though all tasks run")
                return _EXIT_GAVE_UP


def _let_end(tasks: list[_Task], secs: float) -> None:
    """Tells the tasks to save after their next update and end, and waits for them."""
    _say("letting all tasks save after their next update; a second signal ends them")
    until = time.monotonic() + secs
    others = [task for task in tasks if not task.is_server]  # save by the servers
    for task in others:
        os.kill(task.process.pid, signal.SIGTERM)
    while time.monotonic() < until and [t for t in others if not t.has_ended()]:
        for task in tasks:
            task.show_output()
        time.sleep(groups.SECS_BETWEEN_LOOKS)


def _code_of(lost: list[_Task]) -> int:
    """Prints how tasks ended; returns 2 if an input did not fit, else 1."""
    for task in lost:
        while task.show_output():
            pass
        code = task.code
        how = f"exit code {code}"
        if code < 0:
            how = signal.Signals(-code).name
        _say(f"{task.name} ended with {how}")
    codes = {task.code for task in lost}
    return _EXIT_DOES_NOT_FIT if _EXIT_DOES_NOT_FIT in codes else _EXIT_GAVE_UP


def _tf_configs(workers: int, has_evaluator: bool, servers: int = 0) -> dict[str, dict]:
    """Returns each task's `TF_CONFIG` by its name, on free ports."""
    counts = {"chief": 1, "worker": workers - 1, "ps": servers}
    counts["evaluator"] = int(has_evaluator)
    ports = iter(_free_ports(sum(counts.values())))
    cluster = {
        job: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
        for job, count in counts.items()
        if count
    }
    # Estimator counts an evaluator among the tasks of a cluster with servers.
    training = {job: listed for job, listed in cluster.items() if job != "evaluator"}
    return {
        f"{job} {index}": {
            "cluster": training if servers else cluster,
            "task": {"type": job, "index": index},
        }
        for job, addresses in cluster.items()
        for index in range(len(addresses))
    }


def _free_ports(count: int) -> list[int]:
    """Returns free ports; a port taken in between shows up as a lost task."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


if __name__ == "__main__":
    sys.exit(main())
