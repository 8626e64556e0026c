"""Reports of updates: files, TensorBoard, MLflow, Weights & Biases, or your own.

For `make_accumulation_hooks(reports=[...])`.
"""

from estimator_accum.reports._csv import CsvReport
from estimator_accum.reports._mlflow import MlflowReport
from estimator_accum.reports._report import Report, Update
from estimator_accum.reports._tensorboard import TensorBoardReport
from estimator_accum.reports._wandb import WandbReport

__all__ = [
    "CsvReport",
    "MlflowReport",
    "Report",
    "TensorBoardReport",
    "Update",
    "WandbReport",
]
