"""The process of the script that `estimator-accum run` or `check` starts."""

import argparse
import os
import sys
from collections.abc import Callable

from estimator_accum.compat import enable_estimator
from estimator_accum.compat._script import NoProgramError, run_script
from estimator_accum.compat.v1 import enable_v1
from estimator_accum.programs.command_line import OneSentenceParser, count


def make_script_parser(name: str, description: str) -> OneSentenceParser:
    """Returns a parser of a command that runs a script; it has no flags yet.

    Args:
        name: Name of the command.
        description: Description of the command.
    """
    return OneSentenceParser(
        description,
        prog=name,
        usage="%(prog)s [--flags] script.py --its --flags",
        allow_abbrev=False,
    )


def add_script(parser: OneSentenceParser) -> None:
    """Adds the script, and the flags that all commands for scripts have."""
    parser.add_argument(
        "--v1",
        action="store_true",
        help="gives the script TensorFlow 1's names, as estimator-accum compat --v1",
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="precision of matrix products; variables and gradient sums stay as they "
        "are (default: %(default)s)",
    )
    parser.add_argument(
        "--force_precision",
        action="store_true",
        help="do not warn about a processor without instructions for --precision",
    )
    parser.add_argument(
        "--gradient_accumulation_steps",
        type=count,
        metavar="K",
        help="session.run calls per update, for scripts without an Estimator",
    )
    parser.add_argument(
        "-m",
        dest="module",
        metavar="MODULE ...",
        nargs=argparse.REMAINDER,
        help="a module instead of a script, and its flags",
    )
    parser.add_argument(
        "script",
        metavar="script ...",
        nargs=argparse.REMAINDER,
        help="the script and its flags",
    )


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
    if flags.precision != "float32":  # the rewriting logs each graph, from C++
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
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


def compute_in(precision: str, *, is_forced: bool) -> None:
    """Makes every session of the process compute in a precision, whatever its config.

    Not before the script's first session. If TensorFlow has no such precision for this
    device, that session ends the process with exit code 2 and one sentence.

    Args:
        precision: As for `mixed_precision_config`.
        is_forced: As for `mixed_precision_config`.
    """
    from estimator_accum import mixed_precision_config  # --help must not need it
    from estimator_accum.graph.internals import (
        INIT_OF_SESSION,
        mark_as_closed,
        replace_function,
    )

    def with_precision(original: Callable) -> Callable:
        def init(session, target="", graph=None, config=None):
            mark_as_closed(session)  # also if the precision is refused
            try:
                config = mixed_precision_config(
                    precision, config, is_forced=is_forced, is_in_cluster=bool(target)
                )
            except ValueError as refusal:
                print(f"estimator-accum run: {refusal}", file=sys.stderr)
                sys.exit(2)
            original(session, target, graph, config)

        return init

    replace_function(INIT_OF_SESSION, with_precision)
