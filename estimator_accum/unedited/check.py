"""Compares a training script in micro-batches with the plain script, in a few updates.

    estimator-accum check script.py --its --flags

Runs the script up to the first `Estimator.train`, and then, instead of training, a few
updates on its first batches: unsplit, and in 2 and 8 micro-batches, without dropout.
Prints the difference of each variable and a verdict. Exit codes: 0 if all variables are
equal up to rounding, 1 if one differs or the script trains no Estimator, 2 if the script
is refused. In a script with a session loop, --gradient_accumulation_steps=K compares K
`session.run` calls with the joined examples of all K. --precision also prints how much
this precision changes the unsplit updates.
"""

import argparse
import sys
from collections.abc import Callable

from estimator_accum.programs.command_line import count
from estimator_accum.unedited.command import (
    add_script,
    enable_and_run,
    make_script_parser,
)


def main(arguments: list[str] | None = None) -> None:
    """Reads the command line and runs the script up to its training.

    Args:
        arguments: The command line; None reads `sys.argv`.
    """
    parser = make_script_parser("estimator-accum check", __doc__)
    parser.add_argument(
        "--updates",
        type=count,
        default=2,
        metavar="N",
        help="updates to compare (default: %(default)d)",
    )
    add_script(parser)
    flags = parser.parse_args(arguments)
    if flags.gradient_accumulation_steps == 1:
        parser.error(
            "`--gradient_accumulation_steps` must be above 1, for there to be something "
            "to compare. Received: 1. Use 2"
        )
    if flags.gradient_accumulation_steps and flags.precision != "float32":
        parser.error(
            "`--precision` is compared for scripts with an Estimator. Received: "
            f"{flags.precision} with --gradient_accumulation_steps. Leave one out"
        )
    enable_and_run(parser, flags, _change_training)


def _change_training(flags: argparse.Namespace) -> Callable[[], int]:
    if flags.gradient_accumulation_steps is not None:
        from estimator_accum.unedited import loop_comparison

        return loop_comparison.check_instead_of_training(
            flags.gradient_accumulation_steps, flags.updates
        )
    from estimator_accum.unedited.comparison import check_instead_of_training

    return check_instead_of_training(
        flags.updates, flags.precision, is_forced=flags.force_precision
    )


if __name__ == "__main__":
    sys.exit(main())
