"""Runs a whole cluster on one machine; a lost task restarts all tasks.

    python -m distributed.launch_local --workers=2 --output_dir=output

Each task is a `distributed.main` with the same flags; see there. When a task dies, or
there is no progress, all of them restart from the last checkpoint. Ctrl-C stops them
after their next update, with a checkpoint; a second Ctrl-C stops them immediately. If the
launcher ends for any other reason, the tasks end too. Exit codes: 0; 1 if tasks died
again and again without a new checkpoint; 2 for invalid flags or data; after a signal,
75 for SIGUSR1, otherwise 128 + the signal's number: 130 for Ctrl-C.
"""

import dataclasses
import pathlib
import sys

if __name__ == "__main__":  # from any folder
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from absl import flags

from distributed.main import PROGRAM
from distributed.settings import Settings
from estimator_accum.programs import launch
from estimator_accum.programs.flag_values import (
    define_flags,
    help_text,
    read_settings_of,
)
from estimator_accum.programs.parsers import FROM_0
from estimator_accum.programs.program import asks_for_help, show
from estimator_accum.programs.sentences import sentence
from estimator_accum.programs.settings import DEVICES, config_text, flag


@dataclasses.dataclass(frozen=True)
class _Cluster:
    """Flags of the launcher itself."""

    workers: int = flag(2, launch.HELP["workers"], group=DEVICES)
    ps: int = flag(0, launch.HELP["ps"], FROM_0, group=DEVICES)
    evaluator: bool = flag(False, launch.HELP["evaluator"], group=DEVICES)
    max_restarts: int = flag(5, launch.HELP["max_restarts"], FROM_0, group=DEVICES)


_NAME = "python -m distributed.launch_local"
_MAIN = pathlib.Path(__file__).with_name("main.py")
_EXIT_DOES_NOT_FIT = 2


def make_flags() -> flags.FlagValues:
    """Returns the flags of the launcher and of the tasks."""
    values = define_flags(_Cluster)
    values.append_flag_values(PROGRAM.flags())
    return values


def main(argv: list[str]) -> int:
    """Checks the flags, keeps the cluster running, and returns the exit code."""
    if asks_for_help(argv):
        own_flags, of_tasks = define_flags(_Cluster), PROGRAM.flags()
        usage = f"usage: {_NAME} [--flags]\n\n{__doc__}\n"
        show(f"{usage}{help_text(own_flags)}\n{help_text(of_tasks)}")
        return 0
    values = make_flags()
    try:
        settings = read_settings_of(Settings, values, argv)
        settings.batches(1 if values.ps else values.workers)
    except (flags.Error, ValueError) as error:
        print(f"{_NAME}: {sentence(error, values)}", file=sys.stderr)
        return _EXIT_DOES_NOT_FIT
    if values.print_config:
        show(config_text(settings))
        return 0
    return launch.run(
        launch.Launch(
            command=_command(settings, values.verbosity),
            workers=values.workers,
            has_evaluator=values.evaluator,
            max_restarts=values.max_restarts,
            output_dir=pathlib.Path(settings.output_dir),
            watchdog_secs=settings.watchdog_secs,
            total_updates=settings.train_updates,
            servers=values.ps,
        )
    )


def _command(settings: Settings, verbosity: int) -> list[str]:
    values = dataclasses.asdict(settings) | {"verbosity": verbosity}
    arguments = [f"--{k}={v}" for k, v in values.items() if v is not None]
    return [sys.executable, str(_MAIN), *arguments]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
