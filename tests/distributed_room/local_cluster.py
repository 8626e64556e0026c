"""Real processes for the room's tests, under a deadline, and what they leave."""

import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf
from cluster_tasks import environment

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE_SECS = 240


def start(module: str, *flags: str, **options) -> subprocess.Popen:
    """Starts a module of the room; its output goes to `options["stdout"]`."""
    return subprocess.Popen(
        [sys.executable, "-m", f"distributed.{module}", *flags],
        cwd=ROOT,
        env=options.pop("env", environment()),
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def run(module: str, *flags: str, **options) -> tuple[int, str]:
    """Runs a module to its end; returns (exit code, output)."""
    process = start(module, *flags, stdout=subprocess.PIPE, **options)
    try:
        output, _ = process.communicate(timeout=DEADLINE_SECS)
    finally:
        process.kill()
        process.wait()
    print(output[-4000:])
    return process.returncode, output


def values(output_dir: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns all variables of the last checkpoint by name."""
    reader = tf.train.load_checkpoint(str(output_dir))
    return {
        name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()
    }


def processes_with(text: str) -> list[int]:
    """Returns the ids of the processes with that in their command lines."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            content = path.read_bytes()
        except OSError:  # it has just ended
            continue
        if text.encode() in content and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return sorted(found)


def wait_until(condition, secs: float = DEADLINE_SECS) -> None:
    """Waits until the condition holds; fails when that takes too long."""
    end = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)
