"""Table of a run's results, with the paths of its files."""

import contextlib
import logging
import os
import pathlib
import statistics
from collections.abc import Callable, Sequence

from estimator_accum.programs.command_line import aligned
from estimator_accum.programs.folder import METRICS, read_rows
from estimator_accum.reports._memory import peak_bytes, spoken

_PLOT = "training.png"

_logger = logging.getLogger("tensorflow.estimator_accum")


def end_of_run(
    folder: pathlib.Path,
    rows: Sequence[Sequence[str]],
    draw: Callable[[pathlib.Path], None] | None,
    paths: Sequence[Sequence[str]] = (),
    *,
    has_metrics: bool = True,
    note: str | None = None,
) -> str:
    """Returns the table and the paths of a run, and draws its plot.

    Args:
        folder: Output folder.
        rows: First rows of the table, such as metrics and updates.
        draw: Function that draws the plot to a path; None leaves it as it is.
        paths: More rows of (name, path).
        has_metrics: Whether the run trains, and has `train_metrics.csv`.
        note: Text below the table.
    """
    rows = [*rows]
    if has_metrics:
        rows.append(
            ["examples per second of training", examples_per_sec(folder / METRICS)]
        )
        paths = [
            ["metrics", str(folder / METRICS)],
            ["plot", plotted(folder / _PLOT, draw)],
            *paths,
            ["TensorBoard", f"tensorboard --logdir={folder}"],
        ]
    rows += [[f"peak of {of}", spoken(size)] for of, size in peak_bytes().items()]
    rows.append(["disk used", spoken(bytes_of(folder))])
    text = aligned(rows) + (f"\n\n{note}" if note else "")
    return text + ("\n\n" + aligned(paths, numbers=False) if paths else "")


def examples_per_sec(path: pathlib.Path) -> str:
    """Returns the median over the updates, some of which wait for a new session."""
    column = "examples_per_sec"
    rates = [row[column] for row in read_rows(path) if column in row]
    return f"{statistics.median(rates):,.1f}" if rates else "none"


def bytes_of(folder: pathlib.Path) -> int:
    """Returns the bytes of a folder's files; one with several links counts once."""
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # another task may have removed it
                status = os.lstat(os.path.join(parent, name))
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def plotted(path: pathlib.Path, draw: Callable[[pathlib.Path], None] | None) -> str:
    """Draws the plot; returns its path, or why there is none."""
    if draw is not None:
        try:
            draw(path)
        except ImportError:
            return 'none without matplotlib: pip install "estimator-accum[plot]"'
        except Exception as error:  # noqa: BLE001, training is what the run is for
            reason = " ".join(str(error).split()) or type(error).__name__
            _logger.warning("%s could not be drawn: %s", path, reason)
    return str(path) if path.exists() else "none"
