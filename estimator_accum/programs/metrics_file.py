"""Progress of a run, read from the chief's `train_metrics.csv`; needs no TensorFlow."""

import os
import pathlib

METRICS = "train_metrics.csv"
_LAST_ROW_BYTES = 1000  # at most


def last_update(output_dir: str | os.PathLike) -> int:
    """Returns the last reported update; 0 before the first.

    After a restart it keeps its value until training resumes.
    """
    try:
        with (pathlib.Path(output_dir) / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_ROW_BYTES))
            rows = file.read().decode().split("\n")[1:-1]
    except FileNotFoundError:
        return 0
    return int(rows[-1].partition(",")[0]) if rows else 0
