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
    cola      examples per second of fine-tuning: as it is, cut by tokens, padded
    memory    peak resident memory at effective batches of 32 and 256
    housing   updates per second of the housing example

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

from estimator_accum.programs.command_line import OneSentenceParser, exit_code_of
from scripts.benchmarks import parts
from scripts.benchmarks.base import as_text, write
from scripts.benchmarks.keras_ways import KERAS_WAYS, why_not
from scripts.benchmarks.models import SIZES

# The sizes of BERT that a part measures, unless --sizes names others.
_SIZES = {
    "overhead": list(SIZES),
    "fit": ["6-layer"],
    "growth": ["small"],
    "unedited": ["small"],
    "cola": ["6-layer"],
    "memory": list(SIZES),
}
PARTS = (*_SIZES, "housing")


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
    add("parts", PARTS, "what to measure", nargs="+", choices=PARTS)
    sizes = "sizes of BERT; None: each part's own"
    add("sizes", None, sizes, nargs="+", choices=SIZES)
    add("accumulation_steps", [4, 16], "K, in overhead and fit", nargs="+", type=_count)
    add("cola_examples", 1600, "examples of cola's one epoch", type=_count)
    batches = "effective batches, in memory"
    add("effective_batch_sizes", [32, 256], batches, nargs="+", type=_count)
    add("micro_batch_size", 8, "examples, in all but cola and housing", type=_count)
    add("tokens", 16, "tokens of an example, in all but cola and housing", type=_count)
    add("housing_updates", 400, "updates of one run of housing", type=_count)
    add("rounds", 9, "turns of each program", type=_count)
    add("starts", 3, "starts of each program, but for fit to unedited", type=_count)
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
            "`--cola_dir` must name the folder with CoLA's train.tsv. Received: none. "
            "Fetch it with `estimator-accum fetch glue`, or leave cola out of --parts."
        )
    if "overhead" in flags.parts:
        for sentence in filter(None, map(why_not, KERAS_WAYS)):
            print(sentence, flush=True)
    flags.output_dir.mkdir(parents=True, exist_ok=True)  # before hours of measuring
    rows = []
    for part in flags.parts:
        sizes = (flags.sizes or _SIZES[part]) if part in _SIZES else [None]
        for size in sizes:
            for new in _rows(part, size, flags):
                rows += new
                write(rows, flags.output_dir)
                print(as_text(new), flush=True)
    print(f"table: {flags.output_dir}")


def _rows(part: str, size: str | None, flags):
    """Yields the rows of each comparison of a part."""
    batch = flags.micro_batch_size, flags.tokens
    turns, starts = flags.rounds, flags.starts
    if part == "overhead":
        for steps in flags.accumulation_steps:
            yield parts.overhead(size, steps, *batch, turns, starts)
    elif part == "fit":
        for keras in parts.kerases():
            for steps in flags.accumulation_steps:
                yield parts.fit(keras, size, steps, *batch, turns)
    elif part == "growth":
        yield parts.growth(size, *batch, turns)
    elif part == "unedited":
        for loss in ("mean", "in-batch"):
            yield parts.unedited(size, loss, 4, *batch, turns)
    elif part == "memory":
        for effective in flags.effective_batch_sizes:
            yield parts.memory(size, effective, *batch, starts)
    elif part == "cola":
        yield parts.cola(size, flags.cola_dir, flags.cola_examples, starts)
    else:
        yield parts.housing(flags.housing_updates, starts)


if __name__ == "__main__":
    sys.exit(main())
