"""`distributed.ray_train` whose workers kill themselves a few times.

    python ray_program.py FOLDER DEATHS --num_workers=2 distributed.main --output_dir=...

Each death leaves a file in FOLDER. With 2 micro-steps an update, of which every tenth
one saves, the first death is a SIGKILL in the window of update 12, and the second one,
after the restart, a SIGTERM in the same window. All others are a SIGKILL.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from distributed import ray_train, ray_worker

_SIGNALS = [(1, 24, 9), (0, 4, 15)]  # worker, run of its session, signal
_LAST_RUN = 6


def train_and_die(config) -> None:
    """Trains in one of Ray's workers, to which Ray copies this function."""
    import os
    import random

    import ray.train

    from distributed import ray_worker

    life = len(list(folder.iterdir()))
    random_ = random.Random(life)
    worker, last, signal = random_.randrange(2), random_.randint(1, _LAST_RUN), 9
    if life < len(_SIGNALS):
        worker, last, signal = _SIGNALS[life]

    class Dying(ray_worker.RayReport):
        """Counts the runs of the session."""

        runs = 0

        def before_run(self, run_context) -> None:
            self.runs += 1
            is_last = self.runs == last and life < deaths
            if is_last and ray.train.get_context().get_world_rank() == worker:
                (folder / str(life)).touch()
                os.kill(os.getpid(), signal)
            super().before_run(run_context)

    ray_worker.RayReport = Dying
    ray_worker.train_program(config)


if __name__ == "__main__":
    folder, deaths = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    ray_worker.train_program = train_and_die
    sys.exit(ray_train.main(sys.argv[3:]))
