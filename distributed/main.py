"""Trains an image classifier, as one task of a cluster or alone.

    python -m distributed.main --data_dir=mnist --output_dir=output

`TF_CONFIG`, Slurm (`srun python -m distributed.main`), SageMaker, Vertex AI, or torchrun
on one machine describe the cluster and this task. All tasks are started with the same
flags, and share --output_dir. Without --data_dir it trains on generated digits; without
sizes, an update is 200 examples over all workers. Exit codes: 0; 2 for invalid flags,
data or cluster; 75 if other tasks were lost: start all of them again, and they resume
from the last checkpoint. python -m distributed.launch_local restarts them on one
machine.
"""

import pathlib
import sys

if __name__ == "__main__":  # can be run from any folder
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from distributed.settings import Settings
from estimator_accum.programs.program import Program

PROGRAM = Program(
    name="python -m distributed.main",
    description=__doc__,
    settings=Settings,
    may_evaluate=True,
    advice="Use a lower --learning_rate, and another --output_dir.",
)
main = PROGRAM.run

if __name__ == "__main__":
    main(sys.argv)
