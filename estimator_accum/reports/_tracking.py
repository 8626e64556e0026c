"""Common part of the reports to experiment trackers."""

import importlib
import os
import types

from estimator_accum.reports import _files


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
        self._path = _files.path_in(folder, f"{tracker}_run_id.txt")

    def read(self) -> str | None:
        """Returns the id; None if there is none yet."""
        if not _files.exists(self._path):
            return None
        return _files.read(self._path).strip() or None

    def write(self, run_id: str) -> None:
        """Keeps the id."""
        _files.write(self._path, f"{run_id}\n")
