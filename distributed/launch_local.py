"""Runs a whole cluster on one machine, and restarts all tasks when one is lost.

    python -m distributed.launch_local --workers=2 --output_dir=output

Each task is a `distributed.main` with the same flags; see there. When a task dies, or
there is no progress, all of them restart from the last checkpoint. Ctrl-C stops them
after their next update, with a checkpoint; a second Ctrl-C stops them at once. If the
launcher ends for any other reason, the tasks end too. Exit codes: 0; 1 when tasks died
again and again without a new checkpoint; 2 for flags or data that do not fit; after a
signal, 75 for SIGUSR1, else 128 + the signal's number: 130 for Ctrl-C.
"""

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

if __name__ == "__main__":  # from any folder
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

import tqdm
from absl import flags

from distributed import command_line
from distributed.progress import METRICS, last_update
from distributed.settings import Settings, batches_of, check_settings
from estimator_accum.runs.program import asks_for_help, read_flags, sentence

FLAGS = flags.FlagValues()
flags.DEFINE_integer("workers", 2, "Tasks that train.", flag_values=FLAGS)
flags.DEFINE_bool(
    "evaluator",
    False,
    "Whether a task evaluates each checkpoint while the others train.",
    flag_values=FLAGS,
)
flags.DEFINE_integer(
    "max_restarts",
    5,
    "Restarts in a row without a new checkpoint before the launcher gives up.",
    flag_values=FLAGS,
)
FLAGS.append_flag_values(command_line.FLAGS)

_MAIN = pathlib.Path(__file__).with_name("main.py")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_SECS_BETWEEN_LOOKS = 0.2
_GRACE_SECS = 30  # after the tasks' own watchdogs should have ended them
_EXIT_GAVE_UP, _EXIT_DOES_NOT_FIT, _EXIT_AGAIN = 1, 2, 75
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class _Stopped(BaseException):
    """Raised by a signal that asks to stop; the argument is the signal's number."""


class _Task:
    """One process of the cluster and its output."""

    def __init__(self, name: str, settings: Settings, tf_config: dict):
        self.name = name
        self._rest = b""
        values = dataclasses.asdict(settings) | {
            "verbosity": FLAGS["verbosity"].value,
        }
        arguments = [f"--{k}={v}" for k, v in values.items() if v is not None]
        self.process = subprocess.Popen(
            [sys.executable, str(_MAIN), *arguments],
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

    def kill(self) -> None:
        """Kills the process if it still runs, and prints its remaining output."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
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

    def __init__(self, settings: Settings):
        self._path = pathlib.Path(settings.output_dir) / METRICS
        self._total = settings.train_updates
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
            size = self._path.stat().st_size
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
        return is_late and self.updates < self._total


def main(argv: list[str]) -> int:
    """Checks the flags, keeps the cluster running, and returns the exit code."""
    if asks_for_help(argv):
        launcher = FLAGS.module_help(sys.modules[__name__])
        print(__doc__, launcher, command_line.help_text(), sep="\n")
        return 0
    try:
        read_flags(FLAGS, argv)
        settings = command_line.settings_from_flags()
        check_settings(settings)
        _check_sizes(settings)
    except (flags.Error, ValueError) as error:
        print(f"distributed: {sentence(error, FLAGS)}", file=sys.stderr)
        return _EXIT_DOES_NOT_FIT
    before = {number: signal.signal(number, _stop) for number in _SIGNALS}
    try:
        return _keep_running(settings)
    except _Stopped as stopped:
        (number,) = stopped.args
        _say(f"stopped by {signal.Signals(number).name}")
        return _EXIT_AGAIN if number == signal.SIGUSR1 else 128 + number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number, frame) -> None:
    for each in _SIGNALS:
        signal.signal(each, _stop_at_once)
    raise _Stopped(number)


def _stop_at_once(number, frame) -> None:
    for each in _SIGNALS:  # the cleanup must not be interrupted
        signal.signal(each, signal.SIG_IGN)
    raise _Stopped(number)


def _check_sizes(settings: Settings) -> None:
    for name, least in (("workers", 1), ("max_restarts", 0)):
        value = FLAGS[name].value
        if value < least:
            raise ValueError(
                f"`--{name}` must be an integer >= {least}. Received: {value}. "
                "See --help for the usual value."
            )
    batches_of(settings, FLAGS.workers)


def _keep_running(settings: Settings) -> int:
    progress = _Progress(settings)
    restarts, checkpoint = 0, _last_checkpoint(settings)
    try:
        while True:
            code = _run_once(settings, progress)
            if code in (0, _EXIT_DOES_NOT_FIT):
                return code
            latest = _last_checkpoint(settings)
            restarts = 0 if latest != checkpoint else restarts
            checkpoint = latest
            if restarts == FLAGS.max_restarts:
                _say(f"gives up: {restarts} restarts without a new checkpoint")
                return _EXIT_GAVE_UP
            restarts += 1
            _say(f"starts all tasks again, from {checkpoint or 'the beginning'}")
    finally:
        progress.bar.close()


def _last_checkpoint(settings: Settings) -> str | None:
    try:
        text = (pathlib.Path(settings.output_dir) / "checkpoint").read_text()
    except (FileNotFoundError, NotADirectoryError):  # the tasks report the second one
        return None
    found = re.search(r'^model_checkpoint_path: ".*?([^/"]+)"', text, re.MULTILINE)
    return found and found[1]


def _run_once(settings: Settings, progress: _Progress) -> int:
    """Runs all tasks; returns 0 if all succeed, 2 if inputs do not fit, else 1."""
    tasks = []
    try:
        for name, tf_config in _tf_configs(FLAGS.workers, FLAGS.evaluator).items():
            tasks.append(_Task(name, settings, tf_config))
        return _watch(tasks, settings, progress)
    except _Stopped:
        with contextlib.suppress(_Stopped):  # by a second signal
            _let_end(tasks, settings.watchdog_secs + _GRACE_SECS)
        raise
    finally:
        for task in tasks:
            task.kill()


def _watch(tasks: list[_Task], settings: Settings, progress: _Progress) -> int:
    progress.start()
    with selectors.DefaultSelector() as selector:
        for task in tasks:
            selector.register(task.process.stdout, selectors.EVENT_READ, task)
        while True:
            for key, _ in selector.select(_SECS_BETWEEN_LOOKS):
                if key.data.show_output() is None:
                    selector.unregister(key.fileobj)
            if not selector.get_map():
                time.sleep(_SECS_BETWEEN_LOOKS)
            progress.look()
            codes = [task.process.poll() for task in tasks]
            lost = [task for task, code in zip(tasks, codes, strict=True) if code]
            if lost:
                return _code_of(lost)
            if codes == [0] * len(tasks):
                return 0
            if progress.has_stopped(settings.watchdog_secs + _GRACE_SECS):
                _say("sees no progress, though all tasks are there")
                return _EXIT_GAVE_UP


def _let_end(tasks: list[_Task], secs: float) -> None:
    """Tells the tasks to save after their next update and end, and waits for them."""
    _say("lets all tasks save after their next update; a second signal ends them")
    until = time.monotonic() + secs
    for task in tasks:
        task.process.terminate()
    while time.monotonic() < until and None in [t.process.poll() for t in tasks]:
        for task in tasks:
            task.show_output()
        time.sleep(_SECS_BETWEEN_LOOKS)


def _code_of(lost: list[_Task]) -> int:
    """Prints how tasks ended; returns 2 if an input did not fit, else 1."""
    for task in lost:
        while task.show_output():
            pass
        code = task.process.returncode
        how = f"exit code {code}"
        if code < 0:
            how = signal.Signals(-code).name
        _say(f"{task.name} ended with {how}")
    codes = {task.process.returncode for task in lost}
    return _EXIT_DOES_NOT_FIT if _EXIT_DOES_NOT_FIT in codes else _EXIT_GAVE_UP


def _tf_configs(workers: int, has_evaluator: bool) -> dict[str, dict]:
    """Returns each task's `TF_CONFIG` by its name, on free ports."""
    counts = {"chief": 1, "worker": workers - 1, "evaluator": int(has_evaluator)}
    ports = iter(_free_ports(sum(counts.values())))
    cluster = {
        job: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
        for job, count in counts.items()
        if count
    }
    return {
        f"{job} {index}": {"cluster": cluster, "task": {"type": job, "index": index}}
        for job, addresses in cluster.items()
        for index in range(len(addresses))
    }


def _free_ports(count: int) -> list[int]:
    """Returns free ports; a port taken in between shows up as a lost task."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
