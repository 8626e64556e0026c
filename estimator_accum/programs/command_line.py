"""Command lines of scripts: flags, one-sentence errors, tables, exit codes."""

import argparse
import difflib
import os
import pathlib
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence

from estimator_accum import __version__
from estimator_accum.programs.folder import fault_of_place
from estimator_accum.programs.numerals import parse_integer, parse_number
from estimator_accum.programs.program import (
    discard_stdout,
    escape_what_stdout_lacks,
    show,
)
from estimator_accum.programs.sentences import missing_package, path_sentence

# argparse's messages, in this project's form.
_FORMS = [
    (
        r"argument (.+?): invalid int value: (.*)",
        r"`\1` must be an integer. Received: \2",
    ),
    (
        r"argument (.+?): invalid float value: (.*)",
        r"`\1` must be a number. Received: \2",
    ),
    (
        r"argument (.+?): invalid choice: (.*) \(choose from (.*)\)",
        r"`\1` must be one of \3. Received: \2",
    ),
    (r"argument (.+?): expected .*", r"`\1` must have a value. Received: none"),
    (
        r"argument (.+?): ignored explicit argument (.*)",
        r"`\1` must have no value. Received: \2",
    ),
    (r"argument (.+?): (.*)", r"`\1` \2"),
    (
        r"the following arguments are required: (.*)",
        lambda match: (
            f"The flag{'s' * (', ' in match[1])} `{match[1].replace(', ', '`, `')}` "
            "must be given. Received: none"
        ),
    ),
]


class FetchError(Exception):
    """A file cannot be fetched, or differs from the published one: exit code 1."""


class OneSentenceParser(argparse.ArgumentParser):
    """An argument parser that reports errors in one sentence, without usage.

    The sentence and the usage line begin with `prog`, the file's name by default.
    """

    def __init__(self, description: str, **options):
        """Makes a parser that shows `description`, a script's docstring, unchanged."""
        kind = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=kind, **options)
        self.register("type", int, parse_integer)
        self.register("type", float, parse_number)
        self.register("type", pathlib.Path, local_path)
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

    def parse_args(self, args=None, namespace=None):
        """Returns the flags; an unknown one is an error that names the nearest."""
        flags, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions)
            hint = f" Did you mean {near[0]}?" if near else ""
            self.error(f"Flags must be those of --help. Received: {name}.{hint}")
        return flags

    def print_help(self, file=None) -> None:
        """Prints the help text, for a reader who may leave early."""
        show(self.format_help().rstrip("\n"))

    def error(self, message: str):
        """Exits with code 2."""
        for form, ours in _FORMS:
            if re.fullmatch(form, message):
                message = re.sub(form, ours, message)
                break
        if not message.endswith("?"):
            message = f"{message.rstrip('.')}. See --help."
        self.exit(2, f"{self.prog}: {message}\n")


def local_path(text: str) -> pathlib.Path:
    """Returns the path that a flag names; an error if it is not on this machine."""
    if fault := fault_of_place(text):
        raise argparse.ArgumentTypeError(fault)
    return pathlib.Path(text)


def count(text: str) -> int:
    """Returns the integer >= 1 that a flag names."""
    try:
        number = parse_integer(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1. Received: {text}")
    return number


def check_counts(flags: argparse.Namespace, **least: int) -> None:
    """Raises ValueError if a flag is an integer below 1, or below its own `least`."""
    for name, value in vars(flags).items():
        lowest = least.get(name, 1)
        if type(value) is int and value < lowest:
            raise ValueError(
                f"`--{name}` must be an integer >= {lowest}. Received: {value}. "
                "See --help."
            )


def command_of(flags: argparse.Namespace) -> list[str]:
    """Returns the command after the flags; raises ValueError if it cannot be started."""
    command = flags.command[flags.command[:1] == ["--"] :]
    if not command or shutil.which(command[0]) is None:
        raise ValueError(
            "A program that can be started must follow the flags. Received: "
            f"{command[0] if command else 'none'}. Write its path, or begin with "
            "python: python train.py --its --flags, or python -m module."
        )
    return command


def exit_code_of(action: Callable[[], int | None], speaker: str | None = None) -> int:
    """Runs a script's action and prints its error as one sentence on stderr.

    Args:
        action: Function without arguments that may return an exit code.
        speaker: Name with which the sentence begins; None is the file's name.

    Returns:
        The action's result, 0 for None; 1 if a fetch fails or yields another file; 2
        for bad flags or files, or a missing package; 130 (128 + SIGINT) after Ctrl-C; 141
        (128 + SIGPIPE) if the reader of stdout has left.
    """
    speaker = speaker or os.path.basename(sys.argv[0])
    escape_what_stdout_lacks()
    try:
        code = action() or 0
        sys.stdout.flush()
        return code
    except FetchError as error:
        print(f"{speaker}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{speaker}: stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `| head` has read enough
        discard_stdout()
        return 128 + signal.SIGPIPE
    except (TypeError, ValueError, OSError, ImportError) as error:
        said = path_sentence(error) or missing_package(error)
        if said is None and isinstance(error, ModuleNotFoundError):
            raise
        print(f"{speaker}: {said or error}", file=sys.stderr)
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
