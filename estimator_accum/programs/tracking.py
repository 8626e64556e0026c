"""Reports of a program's updates to the experiment trackers of `--report_to`."""

import os
import pathlib

from estimator_accum.programs.settings import RunSettings
from estimator_accum.reports import MlflowReport, Report, WandbReport


def make_reports(settings: RunSettings, model_dir: str | os.PathLike) -> list[Report]:
    """Returns a report to each tracker, of a run named like its folder.

    The flags of the run are MLflow's tags and W&B's config. TensorBoard has the updates
    of every run, through `metrics_dir`.

    Args:
        settings: Settings of the run.
        model_dir: Folder of the model, which keeps the ids of the trackers' runs.
    """
    names = (settings.report_to or "").split(",")
    name, config = pathlib.Path(model_dir).resolve().name, settings.as_flags()
    reports: list[Report] = []
    if "mlflow" in names:
        tags = {flag: str(value) for flag, value in config.items()}
        reports.append(MlflowReport(model_dir, run_name=name, tags=tags))
    if "wandb" in names:
        reports.append(WandbReport(model_dir, name=name, config=config))
    return reports
