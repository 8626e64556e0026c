"""The end of a run: a table of metrics with a plot."""

import functools
import pathlib
from collections.abc import Mapping

from bert_finetune.diagnosis import share_of_largest_class
from bert_finetune.evaluations import EVALUATIONS, read_evaluations
from bert_finetune.recomputing import device_memory
from bert_finetune.saved_memory import saving_text
from bert_finetune.settings import LAYERS
from bert_finetune.tasks import Task
from bert_finetune.training import Run, describe_batches
from estimator_accum.programs import report
from estimator_accum.programs.folder import METRICS
from estimator_accum.programs.progress import read_progress


def end_of_run(
    run: Run,
    metrics: Mapping[str, float],
    speeds: Mapping[str, float | None],
    update: int,
    has_trained: bool,
) -> str:
    """Draws the plot of a run that has trained; returns its table and its paths.

    Args:
        run: The run, at its end.
        metrics: Metrics by name, suffixes of dev sets included; may be empty.
        speeds: Examples per second of "evaluation" and "prediction", as far as there
            were any; None if one batch held all examples.
        update: Updates of the checkpoint that was used.
        has_trained: Whether this process has trained.
    """
    folder = pathlib.Path(run.settings.output_dir)
    rows = metric_rows(run.task, metrics)
    has_classes = not run.task.is_regression and not run.task.is_multi_label
    if metrics and has_classes:
        shares = (share_of_largest_class(dev.labels) for dev in run.dev.values())
        rows.append(["share of the largest class", *(f"{s:.4f}" for s in shares)])
    last = read_progress(run.settings.output_dir).update or update
    if run.settings.eval_every_updates is not None:
        rows.append(["best update", f"{update:,}"])
    rows.append(["updates", f"{last:,}"])
    for job, speed in speeds.items():
        if speed is not None:
            rows.append([f"examples per second of {job}", f"{speed:,.1f}"])
    has_metrics = run.settings.do_train
    title = f"{run.task.name}: {describe_batches(run.windows)}" if has_metrics else ""
    draw = functools.partial(_draw, folder, title, run.task.main_metric)
    return report.end_of_run(
        folder,
        rows,
        draw if has_trained else None,
        has_metrics=has_metrics,
        note=_saved_memory(run) if has_trained else None,
    )


def _saved_memory(run: Run) -> str | None:
    """Returns the effect of accumulation on memory and time, where the planner knows it."""
    settings, windows = run.settings, run.windows
    if windows.batches.is_auto or windows.tokens is not None:
        return None
    try:
        memory = device_memory() if windows.batches.num_replicas == 1 else None
    except ValueError:  # a GPU whose memory cannot be found out
        memory = None
    return saving_text(
        run.config,
        windows.batches,
        run.padded_length or int(run.train.lengths.max()),
        memory,
        is_recomputed=settings.recompute == LAYERS,
        optimizer=settings.optimizer,
    )


def metric_rows(task: Task, metrics: Mapping[str, float]) -> list[list[str]]:
    """Returns a row a metric and a column a dev set, with 4 digits and a header."""
    if not metrics:
        return []
    suffixes = list(task.dev_files)
    files = [pathlib.Path(file).stem for file in task.dev_files.values()]
    marks = tuple(filter(None, suffixes))
    names = [name for name in metrics if not name.endswith(marks)]
    rows = [[task.name, *files]]
    for name in sorted(names):
        values = [f"{metrics[name + suffix]:.4f}" for suffix in suffixes]
        rows.append([name.removeprefix("eval_"), *values])
    return rows


def _draw(folder: pathlib.Path, title: str, metric: str, path: pathlib.Path) -> None:
    from estimator_accum.programs import plots  # only a run that draws needs matplotlib

    updates = plots.read_metrics(folder / METRICS, ["update_step"])
    evaluations = {}
    if read_evaluations(folder):
        evaluations = plots.read_metrics(folder / EVALUATIONS, ["update_step", metric])
    figure = plots.draw_run(updates, evaluations, metric, title)
    plots.save(figure, path)
