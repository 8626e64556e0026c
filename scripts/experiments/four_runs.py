"""Trains the same effective batch in four ways, and compares weights and losses.

    python scripts/experiments/four_runs.py --output_dir=four_runs

1 worker x 200; 1 worker x 100, K=2; 2 workers x 100; 2 workers x 50, K=2: each of them
trains on 200 examples per update, in the files' order, by gradient descent. It prints
how far the weights are from those of the first run, and draws the losses of all runs
against updates and against examples. Exit codes: 0; 1 if a weight differs by more than
1e-5; that of a run that failed; 2 for invalid flags.
"""

import pathlib
import subprocess
import sys
from typing import NamedTuple

import numpy as np

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from distributed.local_clusters import command_of, environment
from estimator_accum.runs.command_line import OneSentenceParser, exit_code_of
from estimator_accum.runs.loss_curves import plot_loss

_PLOT = "four_runs.png"
_LARGEST_DIFFERENCE = 1e-5


class Run(NamedTuple):
    """One way to train on 200 examples per update.

    Attributes:
        workers: Number of tasks that train.
        micro_batch_size: Micro-batch of each worker [examples].
        gradient_accumulation_steps: K [micro-steps per update].
    """

    workers: int
    micro_batch_size: int
    gradient_accumulation_steps: int

    @property
    def label(self) -> str:
        """Name in the output, such as "2 workers x 50, K=2"."""
        workers = f"{self.workers} worker{'s' * (self.workers > 1)}"
        return (
            f"{workers} x {self.micro_batch_size}, K={self.gradient_accumulation_steps}"
        )

    @property
    def folder(self) -> str:
        """Name of the run's `--output_dir` inside the common folder."""
        return "_".join(map(str, self))


RUNS = (Run(1, 200, 1), Run(1, 100, 2), Run(2, 100, 1), Run(2, 50, 2))


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_folder(
        "output_dir",
        "a new folder, or that of a comparison before (default: %(default)s)",
        default="four_runs",
    )
    parser.add_folder("data_dir", "MNIST's files; generated digits if not given")
    parser.add_numbers(("train_updates", 100, "optimizer updates"))
    flags = parser.parse_args(arguments)
    try:
        return exit_code_of(
            lambda: compare(flags.output_dir, flags.data_dir, flags.train_updates)
        )
    except subprocess.CalledProcessError as error:  # the run has printed the reason
        return error.returncode


def compare(
    output_dir: pathlib.Path, data_dir: pathlib.Path | None, train_updates: int
) -> int:
    """Trains all four, prints the differences, draws; returns the exit code.

    An existing run resumes, or stays as it is if it is complete.
    """
    weights = []
    for run in RUNS:
        print(f"==> {run.label}", file=sys.stderr, flush=True)
        _train(run, output_dir / run.folder, data_dir, train_updates)
        weights.append(_read_weights(output_dir / run.folder))
    print(f"largest difference of any weight from {RUNS[0].label}, absolute:")
    differences = [_difference(each, weights[0]) for each in weights[1:]]
    for run, difference in zip(RUNS[1:], differences, strict=True):
        print(f"  {run.label:<22} {difference:.1e}")
    plot_loss(
        [output_dir / run.folder for run in RUNS],
        [run.label for run in RUNS],
        output_dir / _PLOT,
    )
    return int(max(differences) > _LARGEST_DIFFERENCE)


def _train(run: Run, folder: pathlib.Path, data_dir, train_updates: int) -> None:
    is_cluster = run.workers > 1
    command = command_of(
        "launch_local" if is_cluster else "main",
        workers=run.workers if is_cluster else None,
        output_dir=folder,
        micro_batch_size=run.micro_batch_size,
        gradient_accumulation_steps=run.gradient_accumulation_steps,
        train_updates=train_updates,
        data_dir=data_dir,
        shuffle=False,
    )
    subprocess.run(command, check=True, env=environment())


def _read_weights(folder: pathlib.Path) -> dict[str, np.ndarray]:
    import tensorflow as tf  # slow, and not needed for --help

    reader = tf.train.load_checkpoint(str(folder))
    names = reader.get_variable_to_shape_map()
    trained = [name for name in names if name.endswith(("/kernel", "/bias"))]
    return {name: reader.get_tensor(name) for name in trained}


def _difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)


if __name__ == "__main__":
    sys.exit(main())
