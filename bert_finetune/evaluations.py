"""Evaluations during training: `evaluations.csv`, the best checkpoint, an early stop.

Order of an evaluation's writes, all after the checkpoint of its update:

    best/model.ckpt-*   if it is better: its files, beside those of the one before
    best/checkpoint     names it
    evaluations.csv     the row
    best/               without the one before

A run that is killed between any two of them finds its update without a row and
evaluates it again, so `best/checkpoint` always names a complete checkpoint, at least as
good as every row.
"""

import csv
import io
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping

from bert_finetune.results import BEST, EVALUATIONS
from estimator_accum.programs.folder import SETTINGS_FILE, whole_file, write_text
from estimator_accum.programs.progress import (
    Progress,
    latest_checkpoint,
    named_checkpoint,
)

_STEPS = ("update_step", "global_step")
_STATE = "checkpoint"

_logger = logging.getLogger("tensorflow.bert_finetune")


class Evaluations:
    """Evaluations of one training run, and the best of its checkpoints.

    Args:
        output_dir: Output folder of the run.
        metric: Name of the metric by which checkpoints are compared; larger is better,
            and the first of several equal ones is the best.
        measure: Function that evaluates a checkpoint; returns its metrics by name.
        every: Updates from one evaluation to the next; the last update has one too.
        num_updates: Updates of the run.
        patience: Evaluations in a row without a better one after which training stops;
            None never stops early.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike,
        metric: str,
        measure: Callable[[str], Mapping[str, float]],
        *,
        every: int,
        num_updates: int,
        patience: int | None = None,
    ):
        self._folder = pathlib.Path(output_dir)
        self._metric, self._measure = metric, measure
        self._every, self._num_updates = every, num_updates
        self._patience = patience
        self._rows: list[dict[str, str]] = []

    def open(self, update: int) -> None:
        """Begins after `update`; drops rows of later updates, which are now lost."""
        rows = read_evaluations(self._folder, self._metric)
        self._rows = [row for row in rows if int(row["update_step"]) <= update]
        if len(self._rows) < len(rows):
            self._write()
        self._remove_others()

    def next_update(self, update: int) -> int:
        """Returns the first update after `update` that is evaluated."""
        return min((update // self._every + 1) * self._every, self._num_updates)

    def is_missing(self, update: int) -> bool:
        """Returns whether `update` is to be evaluated and has no row."""
        is_due = update and (update % self._every == 0 or update == self._num_updates)
        return bool(is_due) and update not in self._updates

    @property
    def has_stopped(self) -> bool:
        """True if the metric has not improved for `patience` evaluations."""
        if self._patience is None or not self._rows:
            return False
        return len(self._rows) - 1 - self._best_index >= self._patience

    def add(self, progress: Progress) -> None:
        """Evaluates the latest checkpoint, which is that of `progress`."""
        checkpoint = latest_checkpoint(str(self._folder))
        values = self._measure(checkpoint)
        steps = zip(_STEPS, (progress.update, progress.global_step), strict=True)
        row = {name: str(step) for name, step in steps}
        row |= {name: f"{value:.9g}" for name, value in values.items()}
        self._rows.append(row)
        is_best = self._best_index == len(self._rows) - 1
        if is_best or best_checkpoint(self._folder) is None:
            self._keep(pathlib.Path(checkpoint))
        self._write()
        self._remove_others()
        _logger.info(
            "evaluation at update %s of %s: %s %.4f%s",
            f"{progress.update:,}",
            f"{self._num_updates:,}",
            self._metric,
            values[self._metric],
            ", the best" if is_best else "",
        )

    @property
    def _updates(self) -> list[int]:
        return [int(row["update_step"]) for row in self._rows]

    @property
    def _best_index(self) -> int:
        values = [float(row[self._metric]) for row in self._rows]
        return values.index(max(values))

    def _write(self) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(self._rows[0]) if self._rows else _STEPS)
        writer.writeheader()
        writer.writerows(self._rows)
        write_text(self._folder / EVALUATIONS, text.getvalue())

    def _keep(self, checkpoint: pathlib.Path) -> None:
        """Makes a checkpoint of the run the one in `best/`."""
        folder, name = self._folder / BEST, checkpoint.name
        folder.mkdir(exist_ok=True)
        before = best_checkpoint(self._folder)
        if before is not None and before.name == name:
            if _index(before).read_bytes() == _index(checkpoint).read_bytes():
                return  # of an evaluation that was killed; checksums are in the index
            name += "-again"  # a file that `checkpoint` names is never replaced
        for file in _files(checkpoint):
            _copy(file, folder / f"{name}{file.name.removeprefix(checkpoint.name)}")
        settings = (self._folder / SETTINGS_FILE).read_text(encoding="utf-8")
        write_text(folder / SETTINGS_FILE, settings)
        write_text(folder / _STATE, f'model_checkpoint_path: "{name}"\n')

    def _remove_others(self) -> None:
        best = best_checkpoint(self._folder)
        kept = set() if best is None else {file.name for file in _files(best)}
        for pattern in ("model.ckpt-*", ".*.partial"):
            for file in (self._folder / BEST).glob(pattern):
                if file.name not in kept:
                    file.unlink()


def best_checkpoint(output_dir: str | os.PathLike) -> pathlib.Path | None:
    """Returns the checkpoint that `best/` keeps; None if there is none."""
    checkpoint = named_checkpoint(pathlib.Path(output_dir).resolve() / BEST)
    return None if checkpoint is None else pathlib.Path(checkpoint)


def read_evaluations(
    output_dir: str | os.PathLike, metric: str | None = None
) -> list[dict[str, str]]:
    """Returns the rows of `evaluations.csv`; none without the file.

    Args:
        output_dir: Output folder of a run.
        metric: A column that must be there.

    Raises:
        ValueError: If the file is not what a run has written.
    """
    path = pathlib.Path(output_dir) / EVALUATIONS
    if not os.path.lexists(path):
        return []
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
        for row in rows:
            if None in row or metric is not None and metric not in row:
                raise ValueError(", ".join(map(str, row)))
            int(row["update_step"])
            for value in row.values():
                float(value)
        return rows
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
        needed = ", ".join([*_STEPS, metric or "the metrics"])
        raise ValueError(
            f"{path} must be a table with the columns {needed}. Received: {error}. "
            "Use another --output_dir, or remove this file to evaluate anew."
        ) from error


def check_evaluations(output_dir: str | os.PathLike, metric: str) -> None:
    """Raises ValueError if training could not go on with the folder's evaluations."""
    if read_evaluations(output_dir, metric) and best_checkpoint(output_dir) is None:
        raise ValueError(
            f"A folder with {EVALUATIONS} must hold the best checkpoint too. Received: "
            f"{output_dir}, where {BEST}/ names none. Remove {EVALUATIONS}, and training "
            "starts to compare anew."
        )


def _index(checkpoint: pathlib.Path) -> pathlib.Path:
    return checkpoint.with_name(f"{checkpoint.name}.index")


def _files(checkpoint: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a checkpoint, without its graph."""
    data = checkpoint.parent.glob(f"{checkpoint.name}.data-*")
    return [*sorted(data), _index(checkpoint)]


def _copy(file: pathlib.Path, copy: pathlib.Path) -> None:
    """Makes a copy that is complete or absent: a link, if the file system has them.

    TensorFlow replaces the files of a checkpoint and never changes them.
    """
    with whole_file(copy) as partial:
        partial.unlink(missing_ok=True)
        try:
            os.link(file, partial)
        except OSError:  # shutil itself reports a full disk
            shutil.copyfile(file, partial)
