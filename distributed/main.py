"""Trains an image classifier, as one task of a cluster or alone.

    python -m distributed.main --data_dir=mnist --output_dir=output

`TF_CONFIG` or Slurm (`srun python -m distributed.main`) describes the cluster and this
task. All tasks are started with the same flags. Without --data_dir it trains on
generated digits. Exit codes: 0; 2 for flags, data or a cluster that do not fit; 75 when
other tasks were lost: start all of them again, and they resume from the last
checkpoint. python -m distributed.launch_local does that on one machine.
"""

import os
import pathlib
import sys

if __name__ == "__main__":  # can be run from any folder
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from distributed import command_line
from distributed.command_line import FLAGS
from distributed.settings import Settings, check_settings, flags_of
from estimator_accum.programs.cluster import Cluster, read_cluster
from estimator_accum.programs.program import Program


def main(argv: list[str]) -> None:
    """Checks everything first, then runs this task's part."""
    Program(
        name="distributed",
        jobs="distributed.jobs",
        flag_values=FLAGS,
        usage=lambda: f"{__doc__}\n{command_line.help_text()}",
        read=_read,
        flags_of=flags_of,
        advice="Use a lower --learning_rate, and another --output_dir.",
    ).run(argv)


def _read() -> tuple[Settings, Cluster]:
    settings = command_line.settings_from_flags()
    check_settings(settings)
    return settings, read_cluster(os.environ)


if __name__ == "__main__":
    main(sys.argv)
