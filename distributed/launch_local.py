"""Runs a whole cluster on one machine, and restarts all tasks when one is lost.

    python -m distributed.launch_local --workers=2 --output_dir=output

Each task is a `distributed.main` with the same flags; see there. When a task dies, or
there is no progress, all of them restart from the last checkpoint. Ctrl-C stops them
after their next update, with a checkpoint; a second Ctrl-C stops them at once. If the
launcher ends for any other reason, the tasks end too. Exit codes: 0; 1 when tasks died
again and again without a new checkpoint; 2 for flags or data that do not fit; after a
signal, 75 for SIGUSR1, else 128 + the signal's number: 130 for Ctrl-C.
"""

import dataclasses
import pathlib
import sys

if __name__ == "__main__":  # from any folder
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from absl import flags

from distributed import command_line
from distributed.settings import Settings, batches_of, check_settings, flags_of
from estimator_accum.programs import launch
from estimator_accum.programs.config import config_text
from estimator_accum.programs.program import asks_for_help, read_flags, sentence

FLAGS = flags.FlagValues()
flags.DEFINE_integer("workers", 2, "Tasks that train.", flag_values=FLAGS)
flags.DEFINE_bool(
    "evaluator",
    False,
    "Add a task that evaluates each checkpoint while the others train.",
    flag_values=FLAGS,
)
flags.DEFINE_integer(
    "max_restarts",
    5,
    "Restarts in a row without a new checkpoint before the launcher gives up.",
    flag_values=FLAGS,
)
FLAGS.append_flag_values(command_line.FLAGS)

_MAIN = pathlib.Path(__file__).with_name("main.py")
_EXIT_DOES_NOT_FIT = 2


def main(argv: list[str]) -> int:
    """Checks the flags, keeps the cluster running, and returns the exit code."""
    if asks_for_help(argv):
        launcher = FLAGS.module_help(sys.modules[__name__])
        print(__doc__, launcher, command_line.help_text(), sep="\n")
        return 0
    try:
        read_flags(FLAGS, argv)
        settings = command_line.settings_from_flags()
        check_settings(settings)
        launch.check_sizes(FLAGS.workers, FLAGS.max_restarts)
        batches_of(settings, FLAGS.workers)
    except (flags.Error, ValueError) as error:
        print(f"distributed: {sentence(error, FLAGS)}", file=sys.stderr)
        return _EXIT_DOES_NOT_FIT
    if FLAGS.print_config:
        print(config_text(flags_of(settings)))
        return 0
    return launch.run(
        launch.Launch(
            command=_command(settings),
            workers=FLAGS.workers,
            has_evaluator=FLAGS.evaluator,
            max_restarts=FLAGS.max_restarts,
            output_dir=pathlib.Path(settings.output_dir),
            watchdog_secs=settings.watchdog_secs,
            total_updates=settings.train_updates,
        )
    )


def _command(settings: Settings) -> list[str]:
    values = dataclasses.asdict(settings) | {"verbosity": FLAGS["verbosity"].value}
    arguments = [f"--{k}={v}" for k, v in values.items() if v is not None]
    return [sys.executable, str(_MAIN), *arguments]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
