"""Reports of updates: a CSV file, TensorBoard scalars, progress."""

import csv
import math
import os
import pathlib
import time
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.reports._display import Display


class Update(NamedTuple):
    """One optimizer update, as reported.

    Attributes:
        update_step: Updates so far, this one included.
        global_step: Micro-steps so far.
        loss: Mean loss of the window, over all its micro-batches and replicas.
        gradient_norm: Global norm of the window's mean gradient, before clipping.
        weight: Sum of the window's weights over all replicas.
        micro_batches: Micro-batches in the window, over all replicas.
        clipped_share: Share of the updates so far that were clipped, 0 to 1.
        noise_scale: Gradient noise scale [unit of the weights]; NaN if unknown.
        learning_rate: Learning rate of this update; NaN if unknown.
    """

    update_step: int
    global_step: int
    loss: float
    gradient_norm: float
    weight: float
    micro_batches: int = 1
    clipped_share: float = 0.0
    noise_scale: float = math.nan
    learning_rate: float = math.nan


class MetricsFile:
    """`train_metrics.csv`: one row per update, each update once even across restarts.

    Columns: update_step, global_step, <unit> (so far), learning_rate, loss,
    gradient_norm, <unit>_per_sec, where <unit> is the unit of the weights. The same
    values go to TensorBoard under `accumulation/`, at the update's global_step, with
    the window's weight, effective_batch_size, clipped_share and noise_scale.

    Args:
        folder: Folder of the file and the events; created if it does not exist.
        unit: Unit of the weights, e.g. "examples".
        micro_batch_size: Examples per replica in a micro-step, for
            `effective_batch_size`; None if weights count examples, or if unknown.
        name: Name of a further train op of the graph: its file is
            `train_metrics_<name>.csv` and its scalars are under `<name>/`.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        unit: str,
        micro_batch_size: int | None = None,
        name: str | None = None,
    ):
        self._micro_batch_size = micro_batch_size
        self._scope = name or "accumulation"
        suffix = f"_{name.replace('/', '_')}" if name else ""
        self._path = pathlib.Path(folder) / f"train_metrics{suffix}.csv"
        self._unit = unit
        self._columns = [
            "update_step",
            "global_step",
            unit,
            "learning_rate",
            "loss",
            "gradient_norm",
            f"{unit}_per_sec",
        ]
        self._events = None

    def open(self, update_step: int) -> None:
        """Opens the file after `update_step`; drops rows of later updates, now lost."""
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = self._rows_until(update_step)
        self._weight = float(rows[-1][self._unit]) if rows else 0.0
        self._since = time.perf_counter()
        partial = self._path.with_suffix(".partial")
        with open(partial, "w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(self._path)
        self._events = tf.compat.v1.summary.FileWriterCache.get(str(self._path.parent))

    def check(self) -> None:
        """Raises ValueError if there is a file to which `open` could not append."""
        self._rows_until(0)

    def _rows_until(self, update_step: int) -> list[dict]:
        if not os.path.lexists(self._path):
            return []
        try:
            text = self._path.read_text(encoding="utf-8")
            # A killed run may have left half a line.
            lines = text[: text.rfind("\n") + 1].splitlines()
            header, *rows = list(csv.reader(lines)) or [self._columns]
            if header != self._columns:
                raise ValueError(",".join(header))
            if any(len(row) != len(header) for row in rows):
                raise ValueError("a row with too few or too many columns")
            rows = [dict(zip(header, row, strict=True)) for row in rows]
            for row in rows:
                float(row[self._unit])
            return [row for row in rows if int(row["update_step"]) <= update_step]
        except (OSError, ValueError, csv.Error) as error:
            raise ValueError(
                f"{self._path} must have the columns "
                f"{','.join(self._columns)}. Received: {error}. Use another folder."
            ) from error

    def write(self, update: Update) -> None:
        """Appends a row and the TensorBoard scalars of one update."""
        now = time.perf_counter()
        rate, self._since = update.weight / (now - self._since), now
        self._weight += update.weight
        values = {
            "learning_rate": update.learning_rate,
            "loss": update.loss,
            "gradient_norm": update.gradient_norm,
            f"{self._unit}_per_sec": rate,
        }
        row = {name: f"{v:.9g}" for name, v in values.items() if not math.isnan(v)}
        row |= {
            "update_step": update.update_step,
            "global_step": update.global_step,
            self._unit: f"{self._weight:.9g}",
        }
        with open(self._path, "a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)
        values |= {
            "update_step": update.update_step,
            self._unit: self._weight,
            "weight": update.weight,
            "clipped_share": update.clipped_share,
            "noise_scale": update.noise_scale,
            "effective_batch_size": self._effective_batch_size(update),
        }
        self._events.add_summary(
            tf.compat.v1.Summary(
                value=[
                    tf.compat.v1.Summary.Value(
                        tag=f"{self._scope}/{name}", simple_value=value
                    )
                    for name, value in values.items()
                    if not math.isnan(value)
                ]
            ),
            update.global_step,
        )

    def _effective_batch_size(self, update: Update) -> float:
        if self._micro_batch_size is not None:
            return self._micro_batch_size * update.micro_batches
        return update.weight if self._unit == "examples" else math.nan

    def close(self) -> None:
        """Writes all pending events to disk."""
        if self._events is not None:
            self._events.flush()


class Progress:
    """Progress display of training: updates done, updates to do, remaining time.

    Args:
        total_updates: Updates of the whole run; None if unknown.
    """

    def __init__(self, total_updates: int | None):
        self._display = Display("training", "update", total_updates)

    def open(self, update_step: int) -> None:
        """Starts the display at `update_step`."""
        self._display.open(update_step)

    def write(self, update: Update) -> None:
        """Shows one update."""
        self._display.show(update.update_step, loss=f"{update.loss:#.4g}")

    def close(self) -> None:
        """Leaves the display as it stands."""
        self._display.close()
