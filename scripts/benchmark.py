"""Measures the cost of accumulation, side by side: the table of docs/performance.md.

    python scripts/benchmark.py --cola_dir=glue/CoLA --output_dir=benchmark_output

Every contender runs in its own process, and they take turns: A B A B. The table has
ratios, with their quartiles over the rounds. Its parts:

    overhead  cost of a micro-step beyond its forward and backward pass: this project,
              with and without its check of every micro-step, others restated, Keras'
              two where installed, and the memory-bandwidth bound
    fit       Keras's `fit` with `estimator_accum.keras.accumulate` and without
    growth    time of an update / K, from K=2 to K=64
    unedited  time of an update of a model_fn with its own optimizer, cut in 4 and uncut
    cola      examples per second of fine-tuning: as it is, cut by tokens, padded, the
              original patch on google-research/bert restated, and Hugging Face's
              Trainer where installed
    memory    peak resident memory at effective batches of 32 and 256
    housing   updates per second of the housing example

benchmark.csv, benchmark.md and benchmark.png in --output_dir are rewritten after every
part, so a run that is stopped keeps its results so far.
"""

import argparse
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import
if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from estimator_accum.runs.command_line import OneSentenceParser, exit_code_of
from scripts.benchmarks.cola import cola, why_not_hugging_face
from scripts.benchmarks.fit import fit, kerases
from scripts.benchmarks.housing import housing
from scripts.benchmarks.keras_ways import KERAS_WAYS, why_not
from scripts.benchmarks.memory import memory
from scripts.benchmarks.models import SIZES
from scripts.benchmarks.overhead import growth, overhead
from scripts.benchmarks.table import as_text, write
from scripts.benchmarks.unedited import unedited

PARTS = ("overhead", "fit", "growth", "unedited", "cola", "memory", "housing")


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    flags = _parser().parse_args(arguments)
    return exit_code_of(lambda: _measure(flags))


def _parser() -> argparse.ArgumentParser:
    parser = OneSentenceParser(__doc__)

    def add(name, default, **options):
        described = f"{options.pop('help')} (default: %(default)s)"
        parser.add_argument(f"--{name}", default=default, help=described, **options)

    add(
        "output_dir", pathlib.Path("benchmark_output"), type=pathlib.Path, help="folder"
    )
    add("parts", PARTS, nargs="+", choices=PARTS, help="what to measure")
    add(
        "sizes", list(SIZES), nargs="+", choices=SIZES, help="of BERT: overhead, memory"
    )
    add("accumulation_steps", [4, 16], nargs="+", type=_count, help="K: overhead, fit")
    add("fit_size", "6-layer", choices=SIZES, help="of BERT: fit")
    add("growth_size", "small", choices=SIZES, help="of BERT: growth")
    add("unedited_size", "small", choices=SIZES, help="of BERT: unedited")
    add("cola_sizes", ["6-layer"], nargs="+", choices=SIZES, help="of BERT: cola")
    add("cola_dir", None, type=pathlib.Path, help="folder with CoLA's train.tsv")
    add("cola_examples", 1600, type=_count, help="of one epoch")
    add("effective_batch_sizes", [32, 256], nargs="+", type=_count, help="memory")
    add("micro_batch_size", 8, type=_count, help="examples: all but cola and housing")
    add("tokens", 16, type=_count, help="of an example: all but cola and housing")
    add("housing_updates", 400, type=_count, help="of one run")
    add("rounds", 9, type=_count, help="turns of each: overhead, fit, growth")
    add("starts", 3, type=_count, help="of all programs, with all rounds: overhead")
    add("runs", 3, type=_count, help="of each program: cola, memory, housing")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"must be an integer >= 1. Received: {text!r}. Use 3"
        )
    return int(text)


def _measure(flags) -> None:
    if "cola" in flags.parts and flags.cola_dir is None:
        raise ValueError(
            "--cola_dir must name the folder with CoLA's train.tsv. Received: none. "
            "Fetch it with `estimator-accum fetch glue`, or leave cola out of --parts."
        )
    if "overhead" in flags.parts:
        _tell([why_not(way) for way in KERAS_WAYS])
    if "cola" in flags.parts:
        _tell([why_not_hugging_face()])
    flags.output_dir.mkdir(parents=True, exist_ok=True)  # before hours of measuring
    rows = []
    for measure in _measurements(flags):
        new = measure()
        rows += new
        write(rows, flags.output_dir)
        print(as_text(new), flush=True)
    print(f"table and plot: {flags.output_dir}")


def _tell(sentences: list[str | None]) -> None:
    for sentence in filter(None, sentences):
        print(sentence, flush=True)


def _measurements(flags) -> list:
    """Returns one measuring function for each requested part."""
    batch = flags.micro_batch_size, flags.tokens
    found = {
        "overhead": [
            lambda size=size, steps=steps: overhead(
                size, steps, *batch, flags.rounds, flags.starts
            )
            for size in flags.sizes
            for steps in flags.accumulation_steps
        ],
        "fit": [
            lambda keras=keras, steps=steps: fit(
                keras, flags.fit_size, steps, *batch, flags.rounds
            )
            for keras in kerases()
            for steps in flags.accumulation_steps
        ],
        "growth": [lambda: growth(flags.growth_size, *batch, flags.rounds)],
        "unedited": [lambda: unedited(flags.unedited_size, 4, *batch, flags.rounds)],
        "cola": [
            lambda size=size: cola(
                size, flags.cola_dir, flags.cola_examples, flags.runs
            )
            for size in flags.cola_sizes
        ],
        "memory": [
            lambda size=size, effective=effective: memory(
                size, effective, *batch, flags.runs
            )
            for size in flags.sizes
            for effective in flags.effective_batch_sizes
        ],
        "housing": [lambda: housing(3, flags.housing_updates, flags.runs)],
    }
    return [measure for part in flags.parts for measure in found[part]]


if __name__ == "__main__":
    sys.exit(main())
