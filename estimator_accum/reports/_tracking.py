"""Common part of the reports to experiment trackers."""

import importlib
import os
import pathlib
import types


def import_package(name: str) -> types.ModuleType:
    """Imports the package of a tracker, which is named like its module.

    Raises:
        ImportError: If it is not installed; the message is one sentence.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(
            f"A report to {name} needs its package. Received: a Python without it. "
            f"Use `pip install {name}`."
        ) from error


class KeptRunId:
    """Id of the run that a folder's training reports to, kept in `<tracker>_run_id.txt`.

    Args:
        folder: Folder of the file; created if it does not exist.
        tracker: Name of the tracker.
    """

    def __init__(self, folder: str | os.PathLike, tracker: str):
        self._path = pathlib.Path(folder) / f"{tracker}_run_id.txt"

    def read(self) -> str | None:
        """Returns the id; None if there is none yet."""
        if not self._path.exists():
            return None
        return self._path.read_text(encoding="utf-8").strip() or None

    def write(self, run_id: str) -> None:
        """Keeps the id."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(f"{run_id}\n", encoding="utf-8")
        partial.replace(self._path)
