"""Programs that tests run, all ended with their test by one deadline.

    done = running.run("script.py", "--flag", tf_config=None, VARIABLE="1")
    with running.start("-m", "distributed.main", *flags) as task:
        running.wait_until(saved.exists, task)
        task.kill()

`programs` describes how they start. No test depends on the clock: it waits for an
event, and a slow machine only makes it wait longer. Only an endless wait fails.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

DEADLINE_SECS = 1200  # for any event that a test waits for
PROGRAMS = pathlib.Path(__file__).resolve().parent
ROOT = PROGRAMS.parents[2]
# Beside the repository's files; other tests may write them during a copy.
NOT_THE_REPOSITORYS = (".*", "__pycache__", "build", "*.egg-info", "demo", "site")
NOT_THE_REPOSITORYS += ("*_output",)
_SECS_BETWEEN_LOOKS = 0.01
_PORTS = range(20_000, 32_000)  # below the kernel's ports for outgoing connections
_locks = []  # open lock files of ports, until this process ends


@dataclasses.dataclass
class Done:
    """Exit code and output of a program."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class Program:
    """A running Python program; killed with its process group when the block ends.

    Args:
        arguments: The command line after `python`.
        tf_config: The process's TF_CONFIG; None for a process outside of a cluster.
        cwd: Working folder; the repository's root by default.
        stdin: As in subprocess; nothing by default.
        python: Path of the interpreter.
        variables: Additional environment variables.
    """

    def __init__(
        self,
        *arguments,
        tf_config: dict | None = None,
        cwd: pathlib.Path | None = None,
        stdin: int = subprocess.DEVNULL,
        python: str = sys.executable,
        **variables: str,
    ):
        self._stdout = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, *map(str, arguments)],
            cwd=cwd or ROOT,
            env=environment(tf_config) | variables,
            stdin=stdin,
            stdout=self._stdout,
            stderr=self._stderr,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, kind, *_) -> None:
        self.kill()
        done = self.done()
        if kind or done.returncode:  # pytest shows it if the test fails
            print(f"{self.process.args} ended with {done.returncode}")
            print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
        self._stdout.close()
        self._stderr.close()

    def wait(self) -> Done:
        """Waits for the end of the program."""
        self.process.wait(DEADLINE_SECS)
        return self.done()

    def done(self) -> Done:
        """Returns the output so far; the exit code is None while the program runs."""
        texts = []
        for file in (self._stdout, self._stderr):
            size = os.fstat(file.fileno()).st_size
            texts.append(os.pread(file.fileno(), size, 0).decode(errors="replace"))
        return Done(self.process.poll(), *texts)

    def kill(self) -> None:
        """Kills the program and its process group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()


def start(*arguments, **options) -> Program:
    """Starts a program; use it in a `with`. See `Program`."""
    return Program(*arguments, **options)


def run(*arguments, **options) -> Done:
    """Runs a program to its end. See `Program`."""
    with start(*arguments, **options) as program:
        return program.wait()


@contextlib.contextmanager
def cluster(*commands: tuple, jobs: tuple[str, ...], **options) -> Iterator[list]:
    """Starts a task for each job, each with its TF_CONFIG.

    Args:
        commands: Arguments of each task, or one tuple for all tasks.
        jobs: Job of each task, e.g. ("chief", "worker").
        options: Options of `Program`.
    """
    commands = commands * len(jobs) if len(commands) == 1 else commands
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(start(*command, tf_config=tf_config, **options))
            for command, tf_config in zip(commands, tf_configs(*jobs), strict=True)
        ]


def wait_until(condition: Callable[[], object], *programs: Program) -> None:
    """Waits until the condition holds; fails if one of the programs ends before."""
    end = time.monotonic() + DEADLINE_SECS
    while not condition():
        for program in programs:
            code = program.process.poll()
            assert code is None or condition(), f"it has ended with {code}"
        assert time.monotonic() < end, "the deadline of all tests has passed"
        time.sleep(_SECS_BETWEEN_LOOKS)


def copy_tree(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a folder, without files beside those of the repository."""
    ignored = shutil.ignore_patterns(*NOT_THE_REPOSITORYS)
    shutil.copytree(source, target, ignore=ignored)


def signal_training(number: int) -> None:
    """Sends a signal to this process, which trains; waits until it says it received it."""
    is_received, handler = threading.Event(), logging.Handler()

    def note(record: logging.LogRecord) -> None:
        if "a second signal" in record.getMessage():
            is_received.set()

    handler.emit = note
    logger = logging.getLogger("tensorflow.estimator_accum")
    logger.addHandler(handler)
    try:
        os.kill(os.getpid(), number)
        wait_until(is_received.is_set)
    finally:
        logger.removeHandler(handler)


def environment(tf_config: dict | None = None) -> dict[str, str]:
    """Returns a task's environment variables; None for a process outside of a cluster.

    Without TF_USE_LEGACY_KERAS, which enable_estimator sets for its own process.
    """
    dropped = ("TF_CONFIG", "TF_USE_LEGACY_KERAS")
    alone = {
        name: value
        for name, value in os.environ.items()
        if name not in dropped and not name.startswith("SLURM_")
    }
    return alone | ({"TF_CONFIG": json.dumps(tf_config)} if tf_config else {})


def tf_configs(*jobs: str) -> list[dict]:
    """Returns the TF_CONFIG of each task, with new ports; jobs may be repeated."""
    cluster, tasks = {}, []
    for job in jobs:
        addresses = cluster.setdefault(job, [])
        tasks.append({"type": job, "index": len(addresses)})
        addresses.append(f"127.0.0.1:{_reserve_port()}")
    return [{"cluster": cluster, "task": task} for task in tasks]


def _reserve_port() -> int:
    """Returns a free port that no other suite on this machine takes."""
    folder = pathlib.Path(tempfile.gettempdir(), f"test_ports_{os.getuid()}")
    folder.mkdir(exist_ok=True)
    while True:
        port = random.choice(_PORTS)
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
        else:
            _locks.append(lock)
            return port
