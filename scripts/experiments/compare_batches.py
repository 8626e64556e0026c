r"""Measures how far accumulated weights are from the big batch's, on BERT.

Trains twice from one checkpoint on the same examples, without dropout: once in
micro-batches, once in whole batches (or with `--against=padded` in micro-batches that
are padded to --max_seq_length), and compares every variable of the two final
checkpoints, optimizer slots included. Prints a line for each kind of variable and ends
with

    largest relative weight difference: 1.2e-06

This is the maximum over all variables of max |a - b| / max |b| within one variable.
Exit code 1 if it is above --tolerance.

    python scripts/experiments/compare_batches.py --data_dir=glue/CoLA --bert_dir=bert \
        --output_dir=comparison
"""

import argparse
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from bert_finetune.tasks import get_task, read_examples
from estimator_accum.programs.command_line import (
    OneSentenceParser,
    check_counts,
    exit_code_of,
)
from estimator_accum.programs.program import quiet_import

with quiet_import(sys.argv[1:]):
    import tensorflow as tf

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
# Counters, and the leftovers of a closed window.
_NOT_COMPARED = re.compile(
    "(global|update)_step|accumulation/.*|.*/accumulator(_rows)?"
)
# Softmax ignores what it adds to all scores of a query.
_ROUNDING = "  (has no gradient but rounding: attention ignores the keys' bias)"


def main(argv: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_folder("data_dir", "folder with train.tsv", required=True)
    parser.add_folder("bert_dir", "folder with bert_model.ckpt", required=True)
    parser.add_folder("output_dir", "for both runs; new or empty", required=True)
    parser.add_argument("--task_name", default="CoLA")
    parser.add_numbers(
        ("updates", 20, "optimizer updates of each run"),
        ("micro_batch_size", 8, "examples of a micro-batch"),
        ("gradient_accumulation_steps", 4, "micro-batches of an update"),
        ("max_seq_length", 128, "longest input [tokens]"),
        ("tolerance", 1e-5, "largest relative difference of a weight"),
    )
    parser.add_argument("--against", choices=("whole", "padded"), default="whole")
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    check_counts(arguments)
    output = arguments.output_dir
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(
            "`--output_dir` must be a new or empty folder. "
            f"Received: {output}. Use another one."
        )
    task = get_task(arguments.task_name)
    examples = read_examples(task, arguments.data_dir, task.train_file, labelled=True)
    steps = arguments.gradient_accumulation_steps
    size = arguments.micro_batch_size
    epochs = arguments.updates * size * steps / len(examples)
    accumulated = _train(arguments, epochs, output / "accumulated", size, steps)
    if arguments.against == "padded":
        flags = ["--pad_to_max_length"]
        other = _train(arguments, epochs, output / "padded", size, steps, flags)
    else:
        other = _train(arguments, epochs, output / "whole", size * steps, 1)
    return _compare(accumulated, other, arguments.tolerance)


def _train(
    arguments: argparse.Namespace,
    epochs: float,
    folder: pathlib.Path,
    batch_size: int,
    steps: int,
    more_flags: Sequence[str] = (),
) -> dict:
    bert = arguments.bert_dir
    what = f"{arguments.updates} updates of {batch_size} x {steps}"
    print(" ".join([what, *more_flags]), flush=True)
    command = [
        sys.executable,
        str(_REPOSITORY / "bert_finetune" / "run_classifier.py"),
        f"--task_name={arguments.task_name}",
        "--do_train=true",
        "--dropout=false",
        f"--data_dir={arguments.data_dir}",
        f"--vocab_file={bert / 'vocab.txt'}",
        f"--bert_config_file={bert / 'bert_config.json'}",
        f"--init_checkpoint={bert / 'bert_model.ckpt'}",
        f"--max_seq_length={arguments.max_seq_length}",
        f"--train_batch_size={batch_size}",
        f"--gradient_accumulation_steps={steps}",
        f"--num_train_epochs={epochs!r}",
        f"--output_dir={folder}",
        *more_flags,
    ]
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    path = tf.train.latest_checkpoint(str(folder))
    if path is None:
        raise ValueError(
            "A run must leave a checkpoint to compare. Received: none in "
            f"{folder}. Use more --updates, or look at what the run has said."
        )
    reader = tf.train.load_checkpoint(path)
    return {
        name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()
    }


def _compare(ours: dict, theirs: dict, tolerance: float) -> int:
    if ours["update_step"] != theirs["update_step"]:
        print(f"updates differ: {ours['update_step']} and {theirs['update_step']}")
        return 1
    largest = {}
    for name, value in theirs.items():
        if _NOT_COMPARED.fullmatch(name):
            continue
        difference = np.max(np.abs(ours[name] - value))
        if difference:
            difference = difference / np.max(np.abs(value))
        if not np.isfinite(difference):
            print(f"{name} is not finite, or zero in one run only")
            return 1
        last = name.rpartition("/")[2]
        kind = last if last in ("adam_m", "adam_v") else "weight"
        largest[kind] = max(largest.get(kind, (0.0, "")), (difference, name))
    for kind, (difference, name) in sorted(largest.items()):
        note = _ROUNDING if "/key/bias" in name else ""
        print(f"{kind:8} {difference:.2e}  {name}{note}")
    print(f"largest relative weight difference: {largest['weight'][0]:.2e}")
    is_within = bool(largest["weight"][0] <= tolerance)
    print(f"{'within' if is_within else 'above'} --tolerance={tolerance:g}")
    return int(not is_within)


if __name__ == "__main__":
    sys.exit(main())
