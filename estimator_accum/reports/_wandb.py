"""Report to Weights & Biases."""

import os
from typing import Any

from estimator_accum.reports import _files
from estimator_accum.reports._report import Report, Update
from estimator_accum.reports._tracking import KeptRunId, import_package


class WandbReport(Report):
    """History of a Weights & Biases run by `update_step`; `pip install wandb`.

    `update_step` is the x axis of the values (`define_metric`). W&B drops a row whose
    step is before its last one, and each update is a step of its own: log your own
    values without `step`, with an x axis of their own (`define_metric`) if necessary.

    The run is the current one if there is one (`wandb.init()` before training);
    otherwise the one whose id `wandb_run_id.txt` in the folder keeps, so a resumed
    training resumes its run; otherwise a new one. An update that the run has already
    from this folder's training is not recorded again. Where trainings of several folders
    share a run, a resumed one is recorded behind the run's last `update_step`. With
    `mode="offline"` each training leaves a folder of its own, with the same id, for
    `wandb sync`.

    Args:
        folder: Folder that keeps the id of the run, and W&B's files, such as the
            Estimator's model_dir.
        **options: Arguments of `wandb.init`, such as `project`, `name` or `mode`.
    """

    def __init__(self, folder: str | os.PathLike, **options: Any):
        self._folder = _files.path_in(folder)
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
            options = {}
            if "://" not in self._folder:  # elsewhere W&B's files stay on this machine
                os.makedirs(self._folder, exist_ok=True)
                options["dir"] = self._folder
            if kept := self._kept.read():
                options |= {"id": kept, "resume": "allow"}
            self._run = wandb.init(**options | self._options)
            self._is_own_run = True
        is_resumed = self._kept.read() == self._run.id
        self._kept.write(self._run.id)
        # Another training in the same run counts from 1 again.
        recorded = self._run.summary.get("update_step") if is_resumed else 0
        self._last_update = recorded or 0
        self._defined = set()

    def write(self, update: Update) -> None:
        """Records one update."""
        if update.update_step <= self._last_update:
            return
        values = update.known_values()
        for name in values.keys() - self._defined - {"update_step"}:
            self._run.define_metric(name, step_metric="update_step")
            self._defined.add(name)
        # W&B's own step counts all logs; `step` would drop an update behind the user's.
        self._run.log(values, commit=True)
        self._last_update = update.update_step

    def close(self) -> None:
        """Ends the run, unless it was there before."""
        if self._is_own_run:
            self._is_own_run = False
            self._run.finish()
