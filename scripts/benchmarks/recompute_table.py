"""Memory and time of recomputed layers, relative to kept activations, and their weights.

    python scripts/benchmarks/recompute_table.py --csv=recompute.csv --plot=recompute.png

Trains BERT encoders with dropout, with and without recomputed layers, their batch in
one micro-step and in several. Each run is a process of its own; those that are timed
take turns. Activations are the part of the peak that grows with the batch: the peak
resident size of a micro-step minus that of one example of 8 tokens. Peaks are measured
and compared with the planner's as in plan_table.py. The weights after --updates updates
with and without recomputed layers are compared bit for bit. Exit codes: 0; 1 if, in one
micro-step, the activations are above --most_memory or the time above --most_time of
those without, if the planner is off by more than 15%, or if a weight differs; 2 for
invalid flags. Needs Linux.
"""

import argparse
import csv
import hashlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from matplotlib.figure import Figure

from bert_finetune.plan_memory import memory_of
from estimator_accum.runs.command_line import (
    OneSentenceParser,
    check_above_0,
    check_counts,
    exit_code_of,
)
from scripts.benchmarks import plan_table

_CASES = ("small 32x128", "small 8x512", "six-layer 32x128", "six-layer 8x512")
_CASES += ("base 2x512",)
_MICRO_STEPS = (1, 2, 4)
_SMALLEST = (1, 8)
_WINDOWS = 3  # measured, after one that is not
_LARGEST_PLAN_ERROR = 0.15


class Row(NamedTuple):
    """One way to train one encoder; also the table's columns."""

    encoder: str
    examples: int
    tokens: int
    micro_steps: int
    recompute: bool
    peak_mb: float
    planned_over_peak: float
    activations_mb: float
    time_ratio: float

    def __str__(self) -> str:
        way = "recomputed" if self.recompute else "kept"
        return (
            f"{self.encoder:<10}{self.examples:>3} x {self.tokens:<4} K={self.micro_steps}"
            f" {way:<11}peak {self.peak_mb:8.1f} MB (planned {self.planned_over_peak:.2f})"
            f"  activations {self.activations_mb:8.1f} MB  time {self.time_ratio:.2f}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_argument(
        "--cases",
        nargs="+",
        type=_case,
        default=[_case(text) for text in _CASES],
        metavar="'ENCODER BxT'",
        help=f"encoder, examples x tokens (default: {', '.join(_CASES)})",
    )
    parser.add_argument(
        "--micro_steps",
        nargs="+",
        type=int,
        default=list(_MICRO_STEPS),
        metavar="K",
        help="numbers of micro-steps, the first of them 1 (default: 1 2 4)",
    )
    parser.add_numbers(
        ("rounds", 3, "measurements of time, each in a process of its own"),
        ("updates", 20, "updates after which the weights are compared"),
        ("most_memory", 0.40, "highest ratio of activations"),
        ("most_time", 1.27, "highest ratio of time"),
    )
    parser.add_argument("--csv", type=pathlib.Path, metavar="FILE", help="the table")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="its figure")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the job of one process
    flags = parser.parse_args(arguments)
    if flags.child:
        what, *job = json.loads(flags.child)
        print(json.dumps(_CHILDREN[what](*job)))
        return 0
    return exit_code_of(lambda: _table(flags))


def _table(flags: argparse.Namespace) -> int:
    check_counts(flags)
    check_above_0(flags)
    if flags.micro_steps[0] != 1 or min(flags.micro_steps) < 1:
        raise ValueError(
            "--micro_steps must be integers >= 1 that begin with 1. Received: "
            f"{flags.micro_steps}. Use 1 2 4."
        )
    rows, is_good = [], True
    for case in flags.cases:
        rows += _rows(case, flags)
        is_good &= _judge(rows[-_ways(case, flags) :], flags)
        is_good &= _compare_weights(case, flags.updates)
    if flags.csv:
        with open(flags.csv, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([Row._fields, *rows])
    if flags.plot:
        draw(rows).savefig(flags.plot, dpi=150)
    return int(not is_good)


def _ways(case: tuple[str, int, int], flags: argparse.Namespace) -> int:
    """Returns the number of rows of a case; a micro-step has at least one example."""
    return 2 * sum(steps <= case[1] for steps in flags.micro_steps)


def _rows(case: tuple[str, int, int], flags: argparse.Namespace) -> list[Row]:
    """Measures one encoder in all ways; prints and returns a row for each."""
    encoder, examples, tokens = case
    ways = [
        (steps, recompute)
        for steps in flags.micro_steps
        if steps <= examples
        for recompute in (False, True)
    ]
    times = {way: [] for way in ways}
    for _ in range(flags.rounds):
        secs = {way: _run("secs", *case, *way) for way in ways}
        for way in ways:
            times[way].append(secs[way] / secs[ways[0]])
    rows = []
    for steps, recompute in ways:
        found = _run("bytes", *case, steps, recompute)
        planned = memory_of(
            plan_table.make_config(encoder, dropout=True),
            -(-examples // steps),
            tokens,
            is_accumulating=steps > 1,
            is_recomputed=recompute,
        )
        rows.append(
            Row(
                *(*case, steps, recompute),
                round(found["peak"] / 1e6, 1),
                round(planned.peak / found["peak"], 3),
                round(found["activations"] / 1e6, 1),
                round(statistics.median(times[steps, recompute]), 3),
            )
        )
        print(rows[-1], flush=True)
    return rows


def _judge(rows: list[Row], flags: argparse.Namespace) -> bool:
    """Prints the ratios of one case; returns whether they are within the bounds."""
    kept, ours = rows[:2]
    memory = ours.activations_mb / kept.activations_mb
    print(
        f"    in one micro-step: activations {memory:.2f}, time {ours.time_ratio:.2f} of "
        "those without",
        flush=True,
    )
    errors = [abs(row.planned_over_peak - 1) for row in rows]
    return (
        memory <= flags.most_memory
        and ours.time_ratio <= flags.most_time
        and max(errors) <= _LARGEST_PLAN_ERROR
    )


def _compare_weights(case: tuple[str, int, int], updates: int) -> bool:
    """Prints how many variables differ; returns whether none does."""
    kept, ours = (_run("weights", *case, updates, way) for way in (False, True))
    different = [name for name, digest in kept.items() if ours[name] != digest]
    print(
        f"    after {updates} updates {len(different)} of {len(kept)} variables differ",
        flush=True,
    )
    return not different and kept.keys() == ours.keys()


def draw(rows: list[Row]) -> Figure:
    """Draws time against memory, one line with and one without recomputed layers."""
    cases = list(dict.fromkeys(row[:3] for row in rows))
    figure = Figure(figsize=(3.6 * len(cases), 3.8), layout="constrained")
    for axes, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases):
        for recompute, label in enumerate(("kept", "recomputed")):
            own = [
                row for row in rows if row[:3] == case and row.recompute == recompute
            ]
            points = [row.peak_mb for row in own], [row.time_ratio for row in own]
            axes.plot(*points, marker="o", color=f"C{recompute}", label=label)
            for row in own:
                place = (row.peak_mb, row.time_ratio)
                text = f"K={row.micro_steps}"
                axes.annotate(
                    text, place, (4, 4), textcoords="offset points", fontsize=8
                )
        encoder, examples, tokens = case
        axes.set_title(f"{encoder}, {examples} x {tokens} tokens", fontsize=10)
        axes.set_xlabel("peak memory [MB]")
        axes.margins(y=0.15)
        highest = max(row.peak_mb for row in rows if row[:3] == case)
        axes.set_xlim(0, 1.2 * highest)  # with room for the last label
        axes.grid(True, color="0.9")
    figure.axes[0].set_ylabel("time of an update / kept, K=1")
    figure.axes[0].legend(frameon=False)
    return figure


def _run(what: str, *job):
    """Returns what a process of its own prints for a job."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    if what == "bytes":
        environment |= plan_table.EXACT_BYTES
    child = json.dumps([what, *job])
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--child", child]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _start(encoder: str, recompute: bool, steps: int):
    """Returns a function that trains one window, and malloc's bytes at the start."""
    import numpy as np

    config = plan_table.make_config(encoder, dropout=True)
    session, train_op, inputs, begin = plan_table.start(config, recompute, steps)
    random = np.random.default_rng(0)

    def train(examples: int, tokens: int) -> None:
        ids = random.integers(0, 1000, [examples, tokens])
        for part in np.array_split(ids, steps):
            session.run(train_op, {inputs: part})

    return train, session, begin


def _bytes(encoder, examples, tokens, steps, recompute) -> dict[str, int]:
    """Returns the peak, and the part of it that grows with the batch [bytes]."""
    train, _, begin = _start(encoder, recompute, steps)
    _, smallest = _peaks(lambda: train(_SMALLEST[0] * steps, _SMALLEST[1]), begin)
    peak, largest = _peaks(lambda: train(examples, tokens), begin)
    return {"peak": peak, "activations": largest - smallest}


def _peaks(train_window, begin: int) -> tuple[int, int]:
    """Returns the highest peak of some windows, with and without what is held."""
    peaks = []
    for _ in range(1 + _WINDOWS):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        held = plan_table.held_bytes() - begin
        resident = plan_table.status_bytes("VmRSS")
        train_window()
        grown = plan_table.status_bytes("VmHWM") - resident
        peaks.append((held + grown, grown))
    whole, grown = zip(*peaks[1:], strict=True)
    return max(whole), max(grown)


def _secs(encoder, examples, tokens, steps, recompute) -> float:
    """Returns the shortest time of a window [secs]."""
    train, _, _ = _start(encoder, recompute, steps)
    secs = []
    for _ in range(1 + _WINDOWS):
        since = time.perf_counter()
        train(examples, tokens)
        secs.append(time.perf_counter() - since)
    return min(secs[1:])


def _weights(encoder, examples, tokens, updates, recompute) -> dict[str, str]:
    """Returns a digest of every variable after some updates."""
    import tensorflow as tf

    train, session, _ = _start(encoder, recompute, steps=1)
    for _ in range(updates):
        train(examples, tokens)
    return {
        variable.name: hashlib.sha256(session.run(variable).tobytes()).hexdigest()
        for variable in tf.compat.v1.global_variables()
    }


_CHILDREN = {"bytes": _bytes, "secs": _secs, "weights": _weights}


def _case(text: str) -> tuple[str, int, int]:
    encoder, _, shape = text.partition(" ")
    if encoder not in plan_table.ENCODERS:
        names = ", ".join(plan_table.ENCODERS)
        raise argparse.ArgumentTypeError(
            f"must begin with one of {names}. Received: {text!r}"
        )
    return encoder, *plan_table.shape_of(shape)


if __name__ == "__main__":
    sys.exit(main())
