"""Runs of this project's scripts, timed by their metrics, and of other programs."""

import csv
import pathlib
import subprocess
import sys

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def run(arguments: list[str]) -> str:
    """Runs Python with `arguments` from the repository's root; returns its stdout.

    Raises:
        RuntimeError: If the program fails; the message ends with its stderr.
    """
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=_REPOSITORY,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        command = " ".join(arguments[:2])
        raise RuntimeError(f"{command} failed ({done.returncode}): {done.stderr}")
    return done.stdout


def examples_per_sec(times: list[float], examples: int) -> float:
    """Returns the speed of a program that records the time after every update.

    The first fifth is left out, as in `update_secs`.

    Args:
        times: Time after every update [s].
        examples: Examples per update.
    """
    times = times[len(times) // 5 :]
    return (len(times) - 1) * examples / (times[-1] - times[0])


def update_secs(model_dir: pathlib.Path) -> list[tuple[float, float]]:
    """Returns (examples, seconds) of every update, from `train_metrics.csv`.

    The first fifth is left out: its updates compile, allocate and fill buffers.
    """
    with open(model_dir / "train_metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found, before = [], 0.0
    for row in rows:
        examples = float(row["examples"]) - before
        before = float(row["examples"])
        found.append((examples, examples / float(row["examples_per_sec"])))
    return found[-(-len(found) // 5) :]
