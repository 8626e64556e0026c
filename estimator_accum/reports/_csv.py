"""Report to a CSV file."""

import csv
import io
import math
import os

from estimator_accum.reports import _files
from estimator_accum.reports._report import Report, Update


class CsvReport(Report):
    """`train_metrics.csv`: one row per update, each update once even across restarts.

    Columns: update_step, global_step, <unit> (so far), learning_rate, loss,
    gradient_norm, <unit>_per_sec, where <unit> is the unit of the weights.
    Unknown values are empty.

    Args:
        folder: Folder of the file; created if it does not exist. An address such as
            gs://bucket/run is written by `tf.io.gfile`.
        unit: Unit of the weights, e.g. "examples".
        name: Name of a further train op of the graph: its file is
            `train_metrics_<name>.csv`.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        unit: str = "micro_steps",
        name: str | None = None,
    ):
        suffix = f"_{name.replace('/', '_')}" if name else ""
        self._path = _files.path_in(folder, f"train_metrics{suffix}.csv")
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

    def check(self) -> None:
        """Raises ValueError if there is a file to which `open` could not append."""
        self._rows_until(0)

    def open(self, update_step: int) -> None:
        """Opens the file after `update_step`; drops rows of later updates, now lost."""
        rows = self._rows_until(update_step)
        self._weight = self._weight_of(rows)
        header = dict(zip(self._columns, self._columns, strict=True))
        _files.write(self._path, self._text([header, *rows]))

    def weight_until(self, update_step: int) -> float:
        """Returns the weight of all updates until `update_step`, as the file has it."""
        return self._weight_of(self._rows_until(update_step))

    def values_of(self, update: Update) -> dict[str, float]:
        """Returns the values of a row that are of one update alone, by column."""
        return {
            "learning_rate": update.learning_rate,
            "loss": update.loss,
            "gradient_norm": update.gradient_norm,
            f"{self._unit}_per_sec": update.weight_per_sec,
        }

    def _weight_of(self, rows: list[dict]) -> float:
        return float(rows[-1][self._unit]) if rows else 0.0

    def _rows_until(self, update_step: int) -> list[dict]:
        try:
            if not _files.exists(self._path):
                return []
            text = _files.read(self._path)
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
        except OSError as error:
            reason = str(error).rstrip(". ")
            raise ValueError(
                f"{self._path} must be a file that this machine can read. Received: "
                f"{reason}. Use another folder."
            ) from error
        except (ValueError, csv.Error) as error:
            raise ValueError(
                f"{self._path} must have the columns "
                f"{','.join(self._columns)}. Received: {error}. Use another folder."
            ) from error

    def write(self, update: Update) -> None:
        """Appends a row."""
        self._weight += update.weight
        values = self.values_of(update)
        row = {name: f"{v:.9g}" for name, v in values.items() if not math.isnan(v)}
        row |= {
            "update_step": update.update_step,
            "global_step": update.global_step,
            self._unit: f"{self._weight:.9g}",
        }
        _files.append(self._path, self._text([row]))

    def _text(self, rows: list[dict]) -> str:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns).writerows(rows)
        return text.getvalue()
