"""Runs a training script in little memory, without editing it.

    estimator-accum run --micro_batches=auto script.py --its --flags

The script runs as with `python script.py --its --flags`. Each batch of an Estimator's
input_fn is split into micro-batches, and the script's own code uses the gradients of the
whole batch, once per batch. So its batch size, schedule, max_steps, hooks and
checkpoints keep their meaning. In a script with a session loop of its own, without an
Estimator, --gradient_accumulation_steps=K makes one update of K `session.run` calls.
To run a module, type -m and its name in place of the script.
"""

import argparse
import sys
from collections.abc import Callable

from estimator_accum.programs.command_line import count
from estimator_accum.unedited.command import (
    add_script,
    compute_in,
    enable_and_run,
    make_script_parser,
)


def main(arguments: list[str] | None = None) -> None:
    """Reads the command line and runs the script.

    Args:
        arguments: The command line; None reads `sys.argv`.
    """
    parser = make_script_parser("estimator-accum run", __doc__)
    parser.add_argument(
        "--micro_batches",
        type=_micro_batches,
        metavar="N",
        help="micro-batches per batch, or auto: the first of 1, 2, 4, ... that fits (default: auto)",
    )
    add_script(parser)
    flags = parser.parse_args(arguments)
    if flags.gradient_accumulation_steps is not None and flags.micro_batches:
        parser.error(
            "`--gradient_accumulation_steps` is for scripts without an Estimator, "
            "`--micro_batches` for those with one. Received: both. Leave one out"
        )
    enable_and_run(parser, flags, _change_training)


def _change_training(flags: argparse.Namespace) -> Callable[[], int]:
    if flags.precision != "float32":
        compute_in(flags.precision, is_forced=flags.force_precision)
    if flags.gradient_accumulation_steps is not None:
        from estimator_accum.unedited.session_loops import accumulate_runs

        return accumulate_runs(flags.gradient_accumulation_steps)
    from estimator_accum.unedited.estimators import cut_batches

    return cut_batches(flags.micro_batches or "auto")


def _micro_batches(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}. Or use auto") from error


if __name__ == "__main__":
    sys.exit(main())
