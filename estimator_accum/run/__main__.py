"""Runs a training script in little memory, without editing it.

    estimator-accum run --micro_batches=auto script.py --its --flags

The script runs as `python script.py --its --flags` would. Each batch of an Estimator's
input_fn is cut into micro-batches, and what the script does with its gradients, it does
once per batch. So its batch size, schedule, max_steps, hooks and checkpoints mean what
they meant. A script with a session loop of its own, without an Estimator, accumulates K
of its `session.run` calls with --gradient_accumulation_steps=K. In place of the script
there may be -m and a module.
"""

import argparse
import os
import sys
from collections.abc import Callable

from estimator_accum.compat import enable_estimator
from estimator_accum.compat._script import NoProgramError, run_script
from estimator_accum.compat.v1 import enable_v1
from estimator_accum.runs.command_line import OneSentenceParser


def main(arguments: list[str] | None = None) -> None:
    """Reads the command line and runs the script.

    Args:
        arguments: The command line; None reads `sys.argv`.
    """
    parser = add_script("estimator-accum run", __doc__)
    parser.add_argument(
        "--micro_batches",
        type=_micro_batches,
        metavar="N",
        help="micro-batches per batch, or auto: as few as memory allows (default: auto)",
    )
    parser.add_argument(
        "--gradient_accumulation_steps",
        type=count,
        metavar="K",
        help="session.run calls per update, for scripts without an Estimator",
    )
    flags = parser.parse_args(arguments)
    if flags.gradient_accumulation_steps is not None and flags.micro_batches:
        parser.error(
            "`--gradient_accumulation_steps` is for scripts without an Estimator, "
            "`--micro_batches` for those with one. Received: both. Leave one out"
        )
    enable_and_run(parser, flags, _change_training)


def _change_training(flags: argparse.Namespace) -> Callable[[], int]:
    if flags.gradient_accumulation_steps is not None:
        from estimator_accum.run._optimizers import accumulate_runs

        return accumulate_runs(flags.gradient_accumulation_steps)
    from estimator_accum.run._estimators import cut_batches

    return cut_batches(flags.micro_batches or "auto")


def add_script(name: str, description: str) -> OneSentenceParser:
    """Returns a parser of a command that runs a script, with the flags of all of them.

    Args:
        name: Name of the command.
        description: Description of the command.
    """
    parser = OneSentenceParser(
        description,
        prog=name,
        usage="%(prog)s [--flags] script.py --its --flags",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--v1",
        action="store_true",
        help="gives the script TensorFlow 1's names, as estimator-accum compat --v1",
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="a module, its flags"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="script, its flags")
    return parser


def enable_and_run(
    parser: OneSentenceParser, flags: argparse.Namespace, change: Callable
) -> None:
    """Runs the script in a process that has `tf.estimator`.

    Args:
        parser: The parser, for errors.
        flags: Its flags.
        change: Function of `flags`, called when `tf.estimator` is there. It returns a
            function that returns the exit code of a script that ends without one.
    """
    command = ["-m", *flags.module] if flags.module else flags.script
    if not flags.module and (not command or not os.path.isfile(command[0])):
        received = command[0] if command else "none"
        parser.error(f"A Python script must be given. Received: {received}")
    try:
        enable_v1() if flags.v1 else enable_estimator()
    except ImportError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    exit_code = change(flags)
    try:
        run_script(command, flags.v1)
    except NoProgramError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    if code := exit_code():
        parser.exit(code)


def count(text: str) -> int:
    """Returns the integer >= 1 that a flag names."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1. Received: {text}")
    return int(text)


def _micro_batches(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}. Or use auto") from error


if __name__ == "__main__":
    sys.exit(main())
