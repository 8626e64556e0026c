"""Draws the training loss of one or more runs.

    estimator-accum plot --output_dirs with,without --plot loss.png

reads `train_metrics.csv` in each folder, which a training run writes with a row for
each update. The thin line is the loss of every update, the bold one is smoothed. If the
runs differ in the examples of an update, the right side is against examples. Needs no
display. Exit codes: 0; 2 with one sentence if a file is missing or
invalid.
"""

import argparse
import pathlib
import sys

from estimator_accum.programs.command_line import (
    OneSentenceParser,
    exit_code_of,
    local_path,
)
from estimator_accum.programs.folder import METRICS


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__, prog="estimator-accum plot")
    parser.add_argument(
        "--output_dirs",
        type=_folders,
        required=True,
        metavar="DIR,DIR",
        help=f"folders of runs, each with {METRICS}; separated by commas",
    )
    parser.add_argument(
        "--labels",
        type=_split,
        metavar="NAME,NAME",
        help="a name for each folder, in the same order; default: the folders' names",
    )
    parser.add_argument(
        "--plot",
        type=pathlib.Path,
        required=True,
        metavar="FILE.png",
        help="the picture to write; .png, .svg or .pdf",
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: _plot(flags), parser.prog)


def _plot(flags: argparse.Namespace) -> None:
    folders = flags.output_dirs
    if flags.labels and len(flags.labels) != len(folders):
        raise ValueError(
            "`--labels` must hold a name for each folder of `--output_dirs`. Received: "
            f"{len(flags.labels)} for {len(folders)}. Separate names by commas."
        )
    if flags.plot.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(
            f"`--plot` must end in .png, .svg or .pdf. Received: {flags.plot}. "
            "Use FILE.png for a picture that opens everywhere."
        )
    # Takes a second to import, so the flags are checked first.
    from estimator_accum.programs.plots import plot_loss

    plot_loss(folders, flags.labels, flags.plot)


def _folders(text: str) -> list[pathlib.Path]:
    return [local_path(part) for part in _split(text)]


def _split(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(
            f"must be names separated by single commas. Received: {text!r}"
        )
    return parts


if __name__ == "__main__":
    sys.exit(main())
