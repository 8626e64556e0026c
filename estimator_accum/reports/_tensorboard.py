"""Report to TensorBoard."""

import math
import os

from estimator_accum.reports import _files
from estimator_accum.reports._csv import CsvReport
from estimator_accum.reports._report import Report, Update


class TensorBoardReport(Report):
    """TensorBoard scalars under `accumulation/`, at the number of the update.

    So runs of 8 x 4 and of 32 x 1 examples share their horizontal axis. The scalars
    are global_step, <unit> (so far), learning_rate, loss, gradient_norm,
    <unit>_per_sec, weight, effective_batch_size, clipped_share and noise_scale, where
    <unit> is the unit of the weights. Unknown values are omitted. A resumed run takes
    <unit> so far from the `train_metrics.csv` of the folder, or counts from 0 if there
    is none.

    Args:
        folder: Folder of the events; created if it does not exist.
        unit: Unit of the weights, e.g. "examples".
        micro_batch_size: Examples per replica in a micro-step, for
            `effective_batch_size`; None if weights count examples, or if unknown.
        name: Name of a further train op of the graph: its scalars are under `<name>/`.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        unit: str = "micro_steps",
        micro_batch_size: int | None = None,
        name: str | None = None,
    ):
        self._folder = _files.path_in(folder)
        self._table = CsvReport(folder, unit, name)
        self._unit = unit
        self._micro_batch_size = micro_batch_size
        self._scope = name or "accumulation"
        self._events = None

    def check(self) -> None:
        """Raises ValueError if there is a `train_metrics.csv` with other columns."""
        self._table.check()

    def open(self, update_step: int) -> None:
        """Opens the events; TensorBoard keeps the lost updates beside the new ones."""
        import tensorflow as tf  # not above: programs show progress before its import

        self.close()
        self._weight = self._table.weight_until(update_step)
        self._events = tf.compat.v1.summary.FileWriterCache.get(self._folder)

    def write(self, update: Update) -> None:
        """Adds the scalars of one update."""
        import tensorflow as tf

        self._weight += update.weight
        values = self._table.values_of(update) | {
            "global_step": update.global_step,
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
            update.update_step,
        )

    def _effective_batch_size(self, update: Update) -> float:
        if self._micro_batch_size is not None:
            return self._micro_batch_size * update.micro_batches
        return update.weight if self._unit == "examples" else math.nan

    def close(self) -> None:
        """Writes all pending events to disk."""
        if self._events is not None:
            self._events.flush()
