"""Report to Weights & Biases."""

import os
import pathlib
from typing import Any

from estimator_accum.reports._report import Report, Update
from estimator_accum.reports._tracking import KeptRunId, import_package


class WandbReport(Report):
    """History of a Weights & Biases run, at step `update_step`; `pip install wandb`.

    The run is the current one if there is one (`wandb.init()` before training);
    otherwise the one whose id `wandb_run_id.txt` in the folder keeps, so a resumed
    training resumes its run; otherwise a new one. An update that the run has already
    is not recorded again. With `mode="offline"` each training leaves a folder of its
    own, with the same id, for `wandb sync`.

    Args:
        folder: Folder that keeps the id of the run, and W&B's files, such as the
            Estimator's model_dir.
        **options: Arguments of `wandb.init`, such as `project`, `name` or `mode`.
    """

    def __init__(self, folder: str | os.PathLike, **options: Any):
        self._folder = pathlib.Path(folder)
        self._kept = KeptRunId(folder, "wandb")
        self._options = options
        self._run = None
        self._is_own_run = False

    def check(self) -> None:
        """Raises ImportError if W&B is not installed."""
        import_package("wandb")

    def open(self, update_step: int) -> None:
        """Starts or resumes the run."""
        self.close()
        wandb = import_package("wandb")
        self._run = wandb.run
        if self._run is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            options = {"dir": str(self._folder)}
            if kept := self._kept.read():
                options |= {"id": kept, "resume": "allow"}
            self._run = wandb.init(**options | self._options)
            self._is_own_run = True
        self._kept.write(self._run.id)

    def write(self, update: Update) -> None:
        """Records one update."""
        if update.update_step >= self._run.step:
            # Otherwise W&B holds the values back until the next update.
            self._run.log(update.known_values(), step=update.update_step, commit=True)

    def close(self) -> None:
        """Ends the run, unless it was there before."""
        if self._is_own_run:
            self._is_own_run = False
            self._run.finish()
