"""Measures the bytes that an update of two workers sends over the loopback device.

    python scripts/benchmarks/network_bytes.py

Trains the same model on the same effective batch, in two processes, with K = 1 and with
K micro-steps per update, and takes the bytes that /proc/net/dev counts between two
updates, minus the idle traffic measured before. For comparison: the same micro-steps
with a reduction at each of them, as gradient accumulation for Estimators used to do it.
If it has the permission, it runs in a network namespace of its own, without other
programs' traffic. Exit codes: 0; 1 if K micro-steps take more than 1.1 times the bytes
of one; 2 for invalid flags.
"""

import argparse
import ctypes
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from distributed.local_clusters import launched, wait_for_update
from estimator_accum.runs.command_line import (
    OneSentenceParser,
    check_counts,
    exit_code_of,
)
from estimator_accum.runs.metrics_file import last_update

_WORKERS = 2
_LARGEST_RATIO = 1.1
_FIRST_UPDATE = 5  # earlier ones build connections
_IDLE_SECS = 2.0
_CLONE_NEWNET = 0x40000000


class Run(NamedTuple):
    """Sizes of one run's updates.

    Attributes:
        micro_batch_size: Micro-batch of each worker [examples].
        gradient_accumulation_steps: K [micro-steps per update].
        updates_counted: Number of its updates that equal one update of the other runs.
    """

    micro_batch_size: int
    gradient_accumulation_steps: int
    updates_counted: int = 1


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_numbers(
        ("effective_batch_size", 160, "examples of an update"),
        ("gradient_accumulation_steps", 8, "K"),
        ("hidden_units", 64, "of the model's largest layer"),
        ("updates", 100, "how many are measured"),
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: compare(flags))


def compare(flags: argparse.Namespace) -> int:
    """Measures the three runs, prints a table; returns the exit code."""
    check_counts(flags)
    steps, batch = flags.gradient_accumulation_steps, flags.effective_batch_size
    if batch % (steps * _WORKERS):
        raise ValueError(
            "`--effective_batch_size` must be a multiple of K * 2 workers. "
            f"Received: {batch} with K={steps}. Use {steps * _WORKERS * 10}."
        )
    is_alone = enter_own_network()
    micro_batch = batch // _WORKERS // steps
    runs = {
        "K=1": Run(micro_batch * steps, 1),
        f"K={steps}": Run(micro_batch, steps),
        f"{steps} reductions": Run(micro_batch, 1, steps),
    }
    idle = _idle_bytes_per_sec()
    print(f"{'its own' if is_alone else 'shared'} loopback device, {idle:,.0f} bytes/s")
    print(f"{'':14} {'bytes per update':>16} {'of K=1':>7}", flush=True)
    ratios = []
    for label, run in runs.items():
        size = run.updates_counted * _bytes_per_update(flags, run, idle)
        ratios.append(size / ratios[0] if ratios else size)
        ratio = ratios[-1] if len(ratios) > 1 else 1.0
        print(f"{label:14} {size:16,.0f} {ratio:7.2f}", flush=True)
    return int(ratios[1] > _LARGEST_RATIO)


def enter_own_network() -> bool:
    """Moves this process to its own network; returns whether that was permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(_CLONE_NEWNET):
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True


def _idle_bytes_per_sec() -> float:
    before = _loopback_bytes()
    time.sleep(_IDLE_SECS)
    return (_loopback_bytes() - before) / _IDLE_SECS


def _loopback_bytes() -> int:
    """Returns the bytes received by the loopback device so far; it sent as many."""
    for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[0])
    raise OSError("/proc/net/dev must have the loopback device. Received: none.")


def _bytes_per_update(flags, run: Run, idle_bytes_per_sec: float) -> float:
    """Trains in two processes; returns what an update sends [bytes]."""
    with (
        tempfile.TemporaryDirectory() as folder,
        launched(
            folder,
            workers=_WORKERS,
            micro_batch_size=run.micro_batch_size,
            gradient_accumulation_steps=run.gradient_accumulation_steps,
            hidden_units=flags.hidden_units,
            train_updates=1000000,  # more than are needed: the run is stopped
            save_checkpoints_updates=1000000,
        ) as launcher,
    ):
        first, before, start = _counted(folder, _FIRST_UPDATE, launcher)
        last, after, end = _counted(folder, first + flags.updates, launcher)
    return (after - before - idle_bytes_per_sec * (end - start)) / (last - first)


def _counted(folder: str, update: int, launcher) -> tuple[int, int, float]:
    """Waits for update `update`; returns (update, bytes, seconds) of one moment."""
    while True:
        now_at = wait_for_update(folder, update, [launcher])
        counted, secs = _loopback_bytes(), time.monotonic()
        if last_update(folder) == now_at:
            return now_at, counted, secs


if __name__ == "__main__":
    sys.exit(main())
