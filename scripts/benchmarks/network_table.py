"""Prints which K hides the network, by the model of `bert_finetune.network`.

    python scripts/benchmarks/network_table.py --num_parameters=110e6 --micro_step_secs=0.1

K is the smallest number of micro-steps per update at which reducing the gradients takes
at most a tenth of the time, for each number of workers and each link. The defaults
describe BERT-base (110 million float32 parameters) with a micro-step of 0.1 s per
worker: 32 sequences of 128 tokens, at 6 floating-point operations for each parameter
and token, on a device that sustains 27 TFLOP/s.
"""

import argparse
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import
if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from bert_finetune.network import reduction_secs, steps_that_hide
from estimator_accum.runs.command_line import (
    OneSentenceParser,
    check_above_0,
    exit_code_of,
)

_WORKERS = (8, 64, 512)
_GBITS_PER_SEC = (1, 10, 100)
_BYTES_PER_PARAMETER = 4


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_numbers(
        ("num_parameters", 110e6, "float32 parameters"),
        ("micro_step_secs", 0.1, "of one worker's micro-batch, on its own"),
        ("share", 0.1, "of the time that the network may take"),
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: _print(flags))


def _print(flags: argparse.Namespace) -> None:
    check_above_0(flags)
    print("\n".join(table(**vars(flags))))


def table(num_parameters: float, micro_step_secs: float, share: float) -> list[str]:
    """Returns the lines of the table, in Markdown."""
    num_bytes = int(num_parameters * _BYTES_PER_PARAMETER)
    links = " | ".join(f"{gbits} Gbit/s" for gbits in _GBITS_PER_SEC)
    lines = [f"| workers | {links} |", "|---" * (1 + len(_GBITS_PER_SEC)) + "|"]
    for workers in _WORKERS:
        cells = []
        for gbits in _GBITS_PER_SEC:
            secs = reduction_secs(num_bytes, workers, gbits * 1e9)
            steps = steps_that_hide(micro_step_secs, secs, share)
            cells.append(f"K = {steps} ({secs:.2f} s)")
        lines.append(f"| {workers} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
