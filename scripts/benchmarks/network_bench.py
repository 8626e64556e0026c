"""Measures examples per second of two workers with a slow link, against K.

    python scripts/benchmarks/network_bench.py --output_dir=network

Creates two networks on this machine, joined by a pair of devices shaped to 100 Mbit/s,
with a worker in each that trains through `distributed.main`. K = 1, 2, 4 and 8, once
with the same effective batch, cut into smaller micro-batches, and once with the same
micro-batch, so that the effective batch grows. Every cluster is timed in turns with a
fast link and the slow one; the first measures the computation alone, from which the
model of `bert_finetune.network` predicts the second. Writes network.csv and
network.png. Needs root on Linux. Exit codes: 0; 2 for invalid flags or a machine that
cannot make such links.
"""

import argparse
import contextlib
import csv
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import
if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from matplotlib.figure import Figure

from bert_finetune.network import reduction_secs, update_secs
from distributed.local_clusters import command_of, wait_for_update
from estimator_accum.runs.command_line import (
    OneSentenceParser,
    check_counts,
    exit_code_of,
)
from estimator_accum.runs.metrics_file import last_update

_STEPS = (1, 2, 4, 8)
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_WORKERS = len(_ADDRESSES)
_PORT = 2222
_DEVICE = "slow0"  # in each network
_FIRST_UPDATE = 5  # earlier ones build connections
_TURNS = 3
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "tc")
# The kernel ends the started processes, and so their networks, when this process ends.
_WITH_US = ("setpriv", "--pdeathsig", "KILL")


class Point(NamedTuple):
    """One cluster's figures; the fields are the columns of network.csv.

    Attributes:
        series: "effective batch" or "micro-batch", the size that is equal for all K.
        steps: K [micro-steps per update].
        micro_batch_size: Micro-batch of each worker [examples].
        fast: Speed measured without the slow link [examples per second].
        slow: Speed measured with the slow link [examples per second].
        predicted: Value of `slow` that the model predicts from `fast`.
    """

    series: str
    steps: int
    micro_batch_size: int
    fast: float
    slow: float
    predicted: float


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_folder(
        "output_dir", "for the two files (default: %(default)s)", default="network"
    )
    parser.add_numbers(
        ("mbits_per_sec", 100, "of the slow link"),
        ("effective_batch_size", 160, "examples of an update, a multiple of 16"),
        ("hidden_units", 512, "of the model's largest layer"),
        ("updates", 20, "how many are timed at a turn"),
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: measure(flags))


def measure(flags: argparse.Namespace) -> None:
    """Measures all points; writes the table and the plot."""
    _check(flags)
    largest = flags.effective_batch_size // _WORKERS
    runs = [("effective batch", steps, largest // steps) for steps in _STEPS]
    runs += [("micro-batch", steps, largest) for steps in _STEPS[1:]]
    points = []
    for series, steps, micro_batch in runs:
        points.append(_point(flags, series, steps, micro_batch))
        print(_line(points[-1]), flush=True)
    points.insert(len(_STEPS), points[0]._replace(series="micro-batch"))
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    with (flags.output_dir / "network.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Point._fields)
        writer.writerows(points)
    draw(points, flags.mbits_per_sec).savefig(flags.output_dir / "network.png", dpi=150)


def _check(flags: argparse.Namespace) -> None:
    check_counts(flags)
    if flags.effective_batch_size % (_WORKERS * _STEPS[-1]):
        raise ValueError(
            "`--effective_batch_size` must be a multiple of 16. "
            f"Received: {flags.effective_batch_size}. Use 160."
        )
    if sys.platform != "linux" or os.geteuid():
        raise ValueError(
            "Slow links must be made by root on Linux. Received: another user, or "
            f"{sys.platform}. Use scripts/benchmarks/network_bytes.py."
        )
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise ValueError(
            f"Slow links are made by {', '.join(TOOLS)}. Received: no {missing[0]} on "
            "PATH. Install iproute2 and util-linux; Debian has tc in /usr/sbin."
        )


def _line(point: Point) -> str:
    return (
        f"same {point.series:15} K={point.steps} x {point.micro_batch_size:<4} "
        f"{point.fast:6.0f} examples/s, slow link {point.slow:6.0f}, "
        f"predicted {point.predicted:6.0f}"
    )


def _point(flags, series: str, steps: int, micro_batch: int) -> Point:
    """Trains a cluster, and times updates with both links in turns."""
    effective = micro_batch * steps * _WORKERS
    secs = {"fast": [], "slow": []}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        holders = _make_networks(stack)
        tasks = _start_tasks(stack, flags, folder, holders, micro_batch, steps)
        wait_for_update(folder, _FIRST_UPDATE, tasks)
        for _ in range(_TURNS):
            for link, times in secs.items():
                if link == "slow":
                    _shape(holders, f"{flags.mbits_per_sec}mbit")
                times.append(_secs_per_update(tasks, folder, flags.updates))
                if link == "slow":
                    _shape(holders, None)
        num_bytes = _parameter_bytes(folder)
    fast, slow = (statistics.median(times) for times in secs.values())
    reduction = reduction_secs(num_bytes, _WORKERS, flags.mbits_per_sec * 1e6)
    predicted = update_secs(fast / steps, steps, reduction)
    rates = [effective / each for each in (fast, slow, predicted)]
    return Point(series, steps, micro_batch, *rates)


def _make_networks(stack: contextlib.ExitStack) -> list[subprocess.Popen]:
    """Creates two networks with a link; returns the processes that hold them."""
    holders = [
        # The process prints a line once it is inside its network.
        _start(
            stack,
            ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"],
            stdout=subprocess.PIPE,
        )
        for _ in _ADDRESSES
    ]
    for holder in holders:
        if not holder.stdout.read(1):
            raise OSError(
                "`unshare --net` must make a network. Received: its error above. Allow "
                "it, in a container with CAP_SYS_ADMIN and CAP_NET_ADMIN."
            )
    peer = f"peer name {_DEVICE} netns {holders[1].pid}"
    _inside(holders[0], f"ip link add {_DEVICE} type veth {peer}")
    for holder, address in zip(holders, _ADDRESSES, strict=True):
        _inside(holder, f"ip address add {address}/24 dev {_DEVICE}")
        for device in (_DEVICE, "lo"):
            _inside(holder, f"ip link set {device} up")
    return holders


def _shape(holders: list[subprocess.Popen], rate: str | None) -> None:
    """Limits the sending rate of both sides; None removes the limit."""
    for holder in holders:
        if rate is None:
            _inside(holder, f"tc qdisc delete dev {_DEVICE} root")
        else:
            tbf = f"tbf rate {rate} burst 64kb latency 400ms"
            _inside(holder, f"tc qdisc add dev {_DEVICE} root {tbf}")


def _inside(holder: subprocess.Popen, command: str) -> None:
    if subprocess.run([*_enter(holder), *command.split()], check=False).returncode:
        raise OSError(f"`{command}` must work. Received: its error above.")


def _enter(holder: subprocess.Popen) -> list[str]:
    return ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]


def _start(stack: contextlib.ExitStack, command: list[str], **options):
    process = subprocess.Popen([*_WITH_US, *command], **options)
    stack.callback(process.wait)
    stack.callback(process.kill)  # first: callbacks run backwards
    return process


def _start_tasks(stack, flags, folder, holders, micro_batch: int, steps: int) -> list:
    command = command_of(
        "main",
        output_dir=folder,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=steps,
        hidden_units=flags.hidden_units,
        train_updates=1000000,  # more than are needed: the run is stopped
        save_checkpoints_updates=1000000,
    )
    cluster = {"worker": [f"{address}:{_PORT}" for address in _ADDRESSES]}
    log = stack.enter_context((pathlib.Path(folder) / "log").open("w"))
    tasks = []
    for index, holder in enumerate(holders):
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        tasks.append(
            _start(
                stack,
                [*_enter(holder), *command],
                env={**os.environ, "TF_CONFIG": json.dumps(task)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        )
    return tasks


def _secs_per_update(tasks, folder: str, updates: int) -> float:
    # Starts at the second update from now: the next may have begun with the other link.
    first = wait_for_update(folder, last_update(folder) + 2, tasks)
    start = time.monotonic()
    last = wait_for_update(folder, first + updates, tasks)
    return (time.monotonic() - start) / (last - first)


def _parameter_bytes(folder: str) -> int:
    import tensorflow as tf  # slow, and not needed for --help

    shapes = tf.train.load_checkpoint(folder).get_variable_to_shape_map()
    trained = [name for name in shapes if name.endswith(("/kernel", "/bias"))]
    return 4 * sum(tf.TensorShape(shapes[name]).num_elements() for name in trained)


def draw(points: list[Point], mbits_per_sec: int) -> Figure:
    """Draws measured speeds as dots, predicted ones as lines."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    for number, series in enumerate(dict.fromkeys(p.series for p in points)):
        axes = figure.add_subplot(1, 2, number + 1)
        of_it = [point for point in points if point.series == series]
        steps = [point.steps for point in of_it]
        axes.plot(steps, [p.fast for p in of_it], "s:", color="#009e73", label="fast")
        name = f"{mbits_per_sec} Mbit/s"
        axes.plot(steps, [p.slow for p in of_it], "o", color="#b22222", label=name)
        values = [p.predicted for p in of_it]
        axes.plot(steps, values, color="#56b4e9", label=f"{name}, predicted", zorder=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(steps, steps)
        axes.set(title=f"the same {series}", xlabel="K, micro-steps per update")
        axes.set(ylabel="examples per second", ylim=(0, None))
        axes.legend()
    return figure


if __name__ == "__main__":
    sys.exit(main())
