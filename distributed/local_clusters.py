"""Clusters that scripts start and watch on this machine; needs no TensorFlow."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

from estimator_accum.runs.metrics_file import last_update

_ROOM = pathlib.Path(__file__).resolve().parent
_DEADLINE_SECS = 300
_SECS_BETWEEN_LOOKS = 0.002


def command_of(module: str, **flags) -> list[str]:
    """Returns the command that runs a module of this folder; None omits a flag."""
    given = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    return [sys.executable, str(_ROOM / f"{module}.py"), *given]


def environment() -> dict[str, str]:
    """Returns this process's environment without `TF_CONFIG`."""
    return {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}


@contextlib.contextmanager
def launched(output_dir: str | os.PathLike, **flags) -> Iterator[subprocess.Popen]:
    """Runs `launch_local` in a `with` block; its output goes to `log` in the folder."""
    with (pathlib.Path(output_dir) / "log").open("w") as log:
        launcher = subprocess.Popen(
            command_of("launch_local", output_dir=output_dir, **flags),
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield launcher
    finally:
        launcher.terminate()  # its tasks end with it
        launcher.wait()


def wait_for_update(
    output_dir: str | os.PathLike, update: int, processes: Iterable[subprocess.Popen]
) -> int:
    """Waits until a run reaches an update; returns the update that it is at.

    Raises:
        ValueError: If a process ends first, or it takes longer than 300 seconds. The
            end of the run's `log` is then printed to stderr.
    """
    end = time.monotonic() + _DEADLINE_SECS
    while (now_at := last_update(output_dir)) < update:
        if any(each.poll() is not None for each in processes) or time.monotonic() > end:
            log = pathlib.Path(output_dir) / "log"
            print(log.read_text()[-2000:], file=sys.stderr)
            raise ValueError(
                f"The run must get to update {update}. Received: one that ended or "
                f"took {_DEADLINE_SECS} s at update {now_at}. See its lines above."
            )
        time.sleep(_SECS_BETWEEN_LOOKS)
    return now_at
