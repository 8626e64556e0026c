"""Memory and time of recomputed layers, relative to kept activations.

    python scripts/benchmarks/recompute_table.py --csv=recompute.csv

Trains BERT encoders with dropout, each with and without recomputed layers, in processes
of their own that take turns. Activations are the part of the peak that grows with the
batch: the peak resident size of a micro-step minus that of one example of 8 tokens.
Exit codes: 0; 1 if the activations are above --most_memory or the time above
--most_time of those without; 2 for invalid flags. Needs Linux.
"""

import argparse
import csv
import json
import os
import pathlib
import statistics
import subprocess
import sys

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from estimator_accum.runs.command_line import (
    OneSentenceParser,
    check_above_0,
    check_counts,
    exit_code_of,
)
from scripts.benchmarks import plan_table

_COLUMNS = ("encoder", "examples", "tokens", "kept_mb", "recomputed_mb")
_COLUMNS += ("memory_ratio", "time_ratio")
_CASES = ("small 32x128", "small 8x512", "six-layer 32x128", "six-layer 8x512")
_CASES += ("base 2x512",)
_SMALLEST = (1, 8)
_MICRO_STEPS = 6  # of which the first two are not measured


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
    parser.add_numbers(
        ("rounds", 3, "measurements of time, each in a process of its own"),
        ("most_memory", 0.40, "highest ratio of activations"),
        ("most_time", 1.27, "highest ratio of time"),
    )
    parser.add_argument("--csv", type=pathlib.Path, metavar="FILE", help="the table")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the job of one process
    flags = parser.parse_args(arguments)
    if flags.child:
        _measure(*json.loads(flags.child))
        return 0
    return exit_code_of(lambda: _table(flags))


def _table(flags: argparse.Namespace) -> int:
    check_counts(flags)
    check_above_0(flags)
    rows = [_row(*case, flags.rounds) for case in flags.cases]
    if flags.csv:
        with open(flags.csv, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([_COLUMNS, *rows])
    is_good = all(
        memory <= flags.most_memory and time <= flags.most_time
        for *_, memory, time in rows
    )
    return int(not is_good)


def _row(encoder: str, examples: int, tokens: int, rounds: int) -> tuple:
    """Measures one encoder, prints a line and returns a row."""
    shape = examples, tokens
    kept, ours = (
        _run(encoder, shape, way, for_bytes=True)["bytes"] for way in (False, True)
    )
    ratios = []
    for _ in range(rounds):
        plain, recomputed = (
            _run(encoder, shape, way, for_bytes=False)["secs"] for way in (False, True)
        )
        ratios.append(recomputed / plain)
    memory, time = round(ours / kept, 3), round(statistics.median(ratios), 3)
    print(
        f"{encoder:<10}{examples:>4} x {tokens:<4} activations {kept / 1e6:8.1f} MB, "
        f"recomputed {ours / 1e6:8.1f} MB, ratio {memory:.2f}; time ratio {time:.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )
    kept_mb, recomputed_mb = round(kept / 1e6, 1), round(ours / 1e6, 1)
    return encoder, examples, tokens, kept_mb, recomputed_mb, memory, time


def _run(encoder, shape, is_recomputed: bool, *, for_bytes: bool) -> dict:
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    if for_bytes:
        environment |= plan_table.EXACT_BYTES
    child = json.dumps([encoder, shape, is_recomputed])
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--child", child]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _measure(encoder: str, shape: tuple[int, int], is_recomputed: bool) -> None:
    """Prints the bytes of activations and the seconds of a micro-step, as JSON."""
    import time

    import numpy as np

    config = plan_table.make_config(encoder, dropout=True)
    session, train_op, inputs, _ = plan_table.start(config, is_recomputed)
    random = np.random.default_rng(0)

    def run(shape) -> tuple[int, float]:
        """Returns the highest peak and the shortest time of some micro-steps."""
        ids, peaks, secs = random.integers(0, 1000, shape), [], []
        for _ in range(_MICRO_STEPS):
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            resident, since = plan_table.status_bytes("VmRSS"), time.perf_counter()
            session.run(train_op, {inputs: ids})
            secs.append(time.perf_counter() - since)
            peaks.append(plan_table.status_bytes("VmHWM") - resident)
        return max(peaks[2:]), min(secs[2:])

    smallest, _ = run(_SMALLEST)
    largest, secs = run(shape)
    print(json.dumps({"bytes": largest - smallest, "secs": secs}))


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
