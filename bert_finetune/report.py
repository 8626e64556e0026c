"""The end of a run: one table of its results, and the paths of what it has written."""

import csv
import logging
import os
import pathlib
import resource
import statistics
import sys
from collections.abc import Mapping

import tensorflow as tf

from bert_finetune.evaluations import EVALUATIONS, read_evaluations
from bert_finetune.tasks import Task
from bert_finetune.training import Run
from estimator_accum.programs.command_line import aligned
from estimator_accum.programs.disk import spoken
from estimator_accum.programs.folder import METRICS
from estimator_accum.programs.progress import read_progress

_PLOT = "training.png"

_logger = logging.getLogger("tensorflow.bert_finetune")


def end_of_run(
    run: Run, metrics: Mapping[str, float], update: int, has_trained: bool
) -> str:
    """Draws the plot of a run that has trained; returns its table and its paths.

    Args:
        run: The run, at its end.
        metrics: Metrics by name, suffixes of dev sets included; may be empty.
        update: Updates of the checkpoint that was used.
        has_trained: Whether this process has trained.
    """
    folder = pathlib.Path(run.settings.output_dir)
    rows = metric_rows(run.task, metrics)
    last = read_progress(run.settings.output_dir).update or update
    if run.settings.eval_every_updates is not None:
        rows.append(["best update", f"{update:,}"])
    rows.append(["updates", f"{last:,}"])
    if run.settings.do_train:
        rows.append(["examples per second", _examples_per_sec(folder / METRICS)])
    rows += [[f"peak memory{of}", spoken(size)] for of, size in _peak_bytes().items()]
    rows.append(["disk used", spoken(bytes_of(folder))])
    text = aligned(rows)
    if run.settings.do_train:
        paths = [
            ["metrics", str(folder / METRICS)],
            ["plot", _plot(folder, run.task.main_metric, has_trained)],
            ["TensorBoard", f"tensorboard --logdir={folder}"],
        ]
        text += "\n\n" + aligned(paths, numbers=False)
    return text


def metric_rows(task: Task, metrics: Mapping[str, float]) -> list[list[str]]:
    """Returns a row a metric and a column a dev set, with 4 digits and a header."""
    if not metrics:
        return []
    suffixes = list(task.dev_files)
    files = [pathlib.Path(file).stem for file in task.dev_files.values()]
    names = [name for name in metrics if not _ends_with_one(name, suffixes)]
    rows = [[task.name, *files]]
    for name in sorted(names):
        values = [f"{metrics[name + suffix]:.4f}" for suffix in suffixes]
        rows.append([name.removeprefix("eval_"), *values])
    return rows


def _ends_with_one(name: str, suffixes: list[str]) -> bool:
    return any(suffix and name.endswith(suffix) for suffix in suffixes)


def _examples_per_sec(path: pathlib.Path) -> str:
    """Returns the median over the updates, some of which wait for a new session."""
    with open(path, newline="", encoding="utf-8") as file:
        rates = [float(row["examples_per_sec"]) for row in csv.DictReader(file)]
    return f"{statistics.median(rates):,.1f}" if rates else "none"


def _peak_bytes() -> dict[str, int]:
    """Returns the most memory that was in use, of the process and of each GPU."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peaks = {"": size if sys.platform == "darwin" else size * 1024}
    for gpu in tf.config.list_logical_devices("GPU"):
        name = ":".join(gpu.name.split(":")[-2:])  # GPU:0
        peaks[f" of {name}"] = tf.config.experimental.get_memory_info(name)["peak"]
    return peaks


def bytes_of(folder: pathlib.Path) -> int:
    """Returns the bytes of a folder's files; one with several links counts once."""
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(parent, name))
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def _plot(folder: pathlib.Path, metric: str, has_trained: bool) -> str:
    """Draws the plot; returns its path, or why there is none."""
    path = folder / _PLOT
    if has_trained:
        try:
            _draw(folder, metric, path)
        except ImportError:
            return 'none without matplotlib: pip install "estimator-accum[plot]"'
        except Exception as error:  # noqa: BLE001, training is what the run is for
            reason = " ".join(str(error).split()) or type(error).__name__
            _logger.warning("%s could not be drawn: %s", path, reason)
    return str(path) if path.exists() else "none"


def _draw(folder: pathlib.Path, metric: str, path: pathlib.Path) -> None:
    from estimator_accum.programs import plots  # only a run that draws needs matplotlib

    updates = plots.read_metrics(folder / METRICS, ["update_step"])
    evaluations = {}
    if read_evaluations(folder):
        evaluations = plots.read_metrics(folder / EVALUATIONS, ["update_step", metric])
    figure = plots.draw_run(updates, evaluations, metric, folder.resolve().name)
    plots.save(figure, path)
