"""Command lines of scripts: flags, one-sentence errors, tables, exit codes."""

import argparse
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence

from estimator_accum import __version__
from estimator_accum.programs.program import path_sentence


class FetchError(Exception):
    """A file cannot be fetched, or differs from the published one: exit code 1."""


class OneSentenceParser(argparse.ArgumentParser):
    """An argument parser that reports errors in one sentence, without usage."""

    def __init__(self, description: str, **options):
        """Makes a parser that shows `description`, a script's docstring, unchanged."""
        kind = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=kind, **options)
        self.add_argument(
            "--version", action="version", version=f"estimator-accum {__version__}"
        )

    def add_folder(self, name: str, what: str, **options) -> None:
        """Adds a flag that names a folder."""
        options |= {"type": pathlib.Path, "metavar": "DIR", "help": what}
        self.add_argument(f"--{name}", **options)

    def add_numbers(self, *rows: tuple[str, float, str]) -> None:
        """Adds a flag of the default's type for each (name, default, description)."""
        for name, default, what in rows:
            is_whole = isinstance(default, int)
            self.add_argument(
                f"--{name}",
                type=type(default),
                default=default,
                metavar="N" if is_whole else "X",
                help=f"{what} (default: %(default){'d' if is_whole else 'g'})",
            )

    def error(self, message: str):
        """Exits with code 2."""
        self.exit(2, f"{self.prog}: {message.rstrip('.')}. Try --help.\n")


def check_counts(flags: argparse.Namespace) -> None:
    """Raises ValueError if a flag is an integer below 1."""
    for name, value in vars(flags).items():
        if isinstance(value, int) and value < 1:
            raise ValueError(
                f"`--{name}` must be an integer >= 1. Received: {value}. "
                "See --help for the usual value."
            )


def exit_code_of(action: Callable[[], int | None]) -> int:
    """Runs a script's action and prints its error as one sentence on stderr.

    Returns:
        The action's result, 0 for None; 1 if a fetch fails or yields another file; 2
        for bad flags or files; 130 (128 + SIGINT) after Ctrl-C; 141 (128 + SIGPIPE) if
        the reader of stdout has left.
    """
    try:
        code = action() or 0
        sys.stdout.flush()
        return code
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (TypeError, ValueError, OSError) as error:
        print(path_sentence(error) or error, file=sys.stderr)
        return 2


def aligned(rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """Returns lines of cells in columns; numbers end below one another."""
    num_columns = max(map(len, rows))
    rows = [[*row, *[""] * (num_columns - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = ">" if numbers else "<"
    return "\n".join(
        "  ".join(
            f"{cell:{align if number else '<'}{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
