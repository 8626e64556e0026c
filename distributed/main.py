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

from absl import flags

from distributed import command_line
from distributed.command_line import FLAGS
from distributed.settings import check_settings
from estimator_accum.runs.cluster import read_cluster
from estimator_accum.runs.folder import make_run_folder
from estimator_accum.runs.program import (
    asks_for_help,
    quiet_import,
    read_flags,
    refuse,
    set_verbosity,
)


def main(argv: list[str]) -> None:
    """Checks everything first, then runs this task's part."""
    if asks_for_help(argv):
        print(__doc__, command_line.help_text(), sep="\n")
        return
    try:
        read_flags(FLAGS, argv)
        settings = command_line.settings_from_flags()
        check_settings(settings)
        cluster = read_cluster(os.environ)
    except (flags.Error, ValueError, TypeError) as error:
        refuse("distributed", error, FLAGS)
    with quiet_import(argv[1:]):  # takes seconds, so the flags are checked first
        from distributed import jobs
        from estimator_accum.compat import enable_estimator
        from estimator_accum.runs.ending import ended_in_words
        from estimator_accum.runs.lock import locked
    try:
        set_verbosity(FLAGS.verbosity, "distributed")
        enable_estimator()
        job = jobs.prepare(settings, cluster)
        if cluster.is_chief:
            make_run_folder(settings.output_dir)
    except (ImportError, ValueError, TypeError, OSError) as error:
        refuse("distributed", error, FLAGS)
    folder = job.settings.output_dir
    advice = "Use a lower --learning_rate, and another --output_dir."
    with (
        ended_in_words("distributed", folder, advice, cluster.is_alone),
        locked(folder, cluster.is_chief),
    ):
        results = jobs.execute(job)
    if results:
        print(results, end="")


if __name__ == "__main__":
    main(sys.argv)
