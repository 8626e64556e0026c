"""Report to MLflow."""

import os
from typing import Any

from estimator_accum.reports._report import Report, Update
from estimator_accum.reports._tracking import KeptRunId, import_package


class MlflowReport(Report):
    """Metrics of an MLflow run, at step `update_step`; needs `pip install mlflow`.

    The run is the active one if there is one (`mlflow.start_run()` around training);
    otherwise the one whose id `mlflow_run_id.txt` in the folder keeps, so a resumed
    training resumes its run; otherwise a new one. It belongs to the tracking URI and
    the experiment that are set, as usual with MLflow. An update that the run has
    already from this folder's training is not recorded again. Where trainings of several
    folders share a run, a resumed one is recorded behind the run's last `update_step`.

    Args:
        folder: Folder that keeps the id of the run, such as the Estimator's model_dir.
        **options: Arguments of `mlflow.start_run`, such as `run_name` or `run_id`.
    """

    def __init__(self, folder: str | os.PathLike, **options: Any):
        self._kept = KeptRunId(folder, "mlflow")
        self._options = options
        self._is_own_run = False

    def check(self) -> None:
        """Raises ImportError if MLflow is not installed."""
        import_package("mlflow")

    def open(self, update_step: int) -> None:
        """Starts or resumes the run."""
        self.close()
        self._mlflow = import_package("mlflow")
        run = self._mlflow.active_run()
        if run is None:
            kept = {"run_id": self._kept.read()}
            run = self._mlflow.start_run(**kept | self._options)
            self._is_own_run = True
        self._run_id = run.info.run_id
        is_resumed = self._kept.read() == self._run_id
        self._kept.write(self._run_id)
        # Another training in the same run counts from 1 again.
        recorded = self._mlflow.get_run(self._run_id).data.metrics if is_resumed else {}
        self._last_update = recorded.get("update_step", 0)

    def write(self, update: Update) -> None:
        """Records one update."""
        if update.update_step > self._last_update:
            values = update.known_values()
            self._mlflow.log_metrics(values, update.update_step, run_id=self._run_id)

    def close(self) -> None:
        """Ends the run, unless it was active before."""
        if self._is_own_run:
            self._is_own_run = False
            self._mlflow.end_run()
