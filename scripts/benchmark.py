"""Measures the cost of accumulation, side by side: the table of docs/performance.md.

    python scripts/benchmark.py --cola_dir=glue/CoLA --output_dir=benchmark_output

Every candidate runs in its own process, and the processes take turns: A B A B. The table
contains ratios, with their quartiles over the rounds. Its parts:

    overhead  cost of a micro-step beyond its forward and backward pass: this project,
              with and without its check of every micro-step, the patch that BERT
              scripts copy, reimplemented, and the memory-bandwidth bound
    fit       Keras's `fit` with `estimator_accum.keras.accumulate` and without
    keras_batches  cost and memory of batches of a Keras model: in 8 micro-batches and
              unsplit, with losses that need one pass and two
    steps     processor time of the first call of a step of TensorFlow 2, and time of a
              call without work, by `microbatch_step` and by tf.function
    growth    time of an update / K, from K=2 to K=64
    unedited  time of an update of a model_fn with its own optimizer, in 4 and whole
    spot_check  memory and time of the first updates of a split model_fn, with and without
              the spot check; memory of one micro-batch and of a plain Estimator
    cola      examples per second of fine-tuning: this project, Hugging Face's Trainer,
              and the bound of this machine
    cores     examples per second of one process and of two on half the cores each, the
              bound of micro-batches side by side, and time of other forms of operations
    memory    peak resident memory at effective batches of 32 and 256
    housing   updates per second of the housing example
    traffic   bytes of a micro-step between a worker and its parameter server

benchmark.csv and benchmark.md in --output_dir are rewritten after every part, so a run
that is stopped keeps its results so far.
"""

import argparse
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import
if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from estimator_accum.programs.command_line import (
    OneSentenceParser,
    count,
    exit_code_of,
)
from scripts.benchmarks.base import as_text, run_script, write
from scripts.benchmarks.cola import PRECISIONS
from scripts.benchmarks.models import SIZES
from scripts.benchmarks.parts import PARTS


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    flags = _parser().parse_args(arguments)
    return exit_code_of(lambda: _measure(flags))


def _parser() -> argparse.ArgumentParser:
    parser = OneSentenceParser(__doc__)

    def add(name, default, what, **options):
        described = f"{what} (default: %(default)s)"
        parser.add_argument(f"--{name}", default=default, help=described, **options)

    parser.add_folder("output_dir", "folder of the table", default="benchmark_output")
    parser.add_folder("cola_dir", "folder with CoLA's train.tsv, for the part cola")
    add("parts", list(PARTS), "what to measure", nargs="+", choices=PARTS)
    sizes = "sizes of BERT; None: each part's own"
    add("sizes", None, sizes, nargs="+", choices=SIZES)
    add("accumulation_steps", [4, 16], "K, in overhead and fit", nargs="+", type=count)
    add("cola_examples", 1600, "examples of cola's one epoch", type=count)
    add("precisions", list(PRECISIONS), "of cola", nargs="+", choices=PRECISIONS)
    trainer = "Python with torch and transformers 5, for Hugging Face's rows of cola"
    add("trainer_python", None, trainer, metavar="PATH")
    batches = "effective batches, in memory"
    add("effective_batch_sizes", [32, 256], batches, nargs="+", type=count)
    but = "in all but cola, cores and housing"
    add("micro_batch_size", 8, f"examples, {but}", type=count)
    add("tokens", 16, f"tokens of an example, {but}", type=count)
    add("housing_updates", 400, "updates of one run of housing", type=count)
    updates = "updates of one run of spot_check"
    add("checked_updates", 100, updates, type=count)
    add("rounds", 9, "turns of each program", type=count)
    starts = "starts of each program, but for fit to unedited and cores"
    add("starts", 3, starts, type=count)
    return parser


def _measure(flags) -> None:
    if "cola" in flags.parts and flags.cola_dir is None:
        raise ValueError(
            "`--cola_dir` must name the folder with CoLA's train.tsv. Received: none. "
            "Fetch it with `estimator-accum fetch glue`, or leave cola out of --parts."
        )
    if "cola" in flags.parts:
        _check_trainer(flags.trainer_python)
    flags.output_dir.mkdir(parents=True, exist_ok=True)  # before hours of measuring
    rows = []
    for part in flags.parts:
        measure, sizes = PARTS[part]
        for size in (flags.sizes or sizes) if sizes else [None]:
            for new in measure(size, flags):
                rows += new
                write(rows, flags.output_dir)
                print(as_text(new), flush=True)
    print(f"table: {flags.output_dir}")


def _check_trainer(python: str | None) -> None:
    if python is None:
        print("Trainer is left out: it needs --trainer_python.", flush=True)
        return
    try:
        run_script(["-c", "import torch, transformers"], python)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            "`--trainer_python` must be a Python with torch and transformers. Received: "
            f"{python!r}. Use that of a virtual environment that has them."
        ) from error


if __name__ == "__main__":
    sys.exit(main())
