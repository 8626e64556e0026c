"""Signs that a model has learned nothing from its inputs.

A constant prediction has a loss of at least `-sum_c p_c ln p_c`, p_c being the share of
class c, or, of numbers, the variance. With equal shares of C classes it is ln(C).
"""

import math
import pathlib
from collections.abc import Mapping

import numpy as np

from bert_finetune.tasks import Task
from estimator_accum.programs.folder import read_rows

ONLY_CLASS = "only_class"  # metric: the class of all predictions, -1 if they differ
_NEAR = 0.02  # relative distance of two losses that count as one
_LAST_SHARE, _FEWEST_UPDATES = 0.1, 20  # of a run, whose losses are averaged
_REMEDY = (
    "If the run made few updates, train more epochs. Else try a lower --learning_rate, or a "
    "longer --warmup_proportion."
)


def share_of_largest_class(labels: np.ndarray) -> float:
    """Returns the accuracy of always predicting the most frequent class."""
    return float(np.bincount(labels).max() / len(labels))


def constant_loss(labels: np.ndarray) -> float:
    """Returns the smallest mean loss of a prediction that is the same for all inputs.

    Args:
        labels: Classes, int32, or numbers, float32 [examples], or 0 and 1 [examples, C].
    """
    if labels.ndim == 2:
        return float(np.mean([constant_loss(column) for column in labels.T]))
    if labels.dtype.kind == "f":
        return float(np.var(labels, dtype=np.float64))
    shares = np.bincount(labels) / len(labels)
    return float(-np.sum(shares * np.log(shares, where=shares > 0, out=shares * 0)))


def of_evaluation(
    task: Task, file: str, labels: np.ndarray, metrics: Mapping[str, float]
) -> str | None:
    """Returns a sentence if an evaluation shows no learning, else None.

    Args:
        task: The task, which names the classes.
        file: Name of the dev file.
        labels: Its labels.
        metrics: Its metrics, `ONLY_CLASS` included if labels are classes.
    """
    if task.is_regression or task.is_multi_label:
        return None
    logarithm, share = math.log(task.num_outputs), share_of_largest_class(labels)
    loss = f"the loss is {metrics['eval_loss']:.4f}"
    loss += f", and ln({task.num_outputs}) = {logarithm:.4f}"
    only = int(metrics[ONLY_CLASS])
    if only >= 0 and np.any(labels != only):
        return (
            f"{file}: every prediction is one class, {task.class_names[only]}, which "
            f"{np.mean(labels == only):.4f} of the examples have; {loss}. {_REMEDY}"
        )
    is_flat = any(
        abs(metrics["eval_loss"] - bound) <= _NEAR * bound
        for bound in (logarithm, constant_loss(labels))
    )
    if is_flat and metrics["eval_accuracy"] <= share:
        return (
            f"{file}: {loss}, and the accuracy is not above {share:.4f}, the share of "
            f"the largest class: the model has not learned. {_REMEDY}"
        )
    return None


def of_training(path: pathlib.Path, labels: np.ndarray) -> str | None:
    """Returns a sentence if the training loss ends as that of a constant, else None.

    Args:
        path: `train_metrics.csv` of the run; shorter ones than 20 updates say nothing.
        labels: Labels of the training examples.
    """
    losses = [row["loss"] for row in read_rows(path) if "loss" in row]
    if len(losses) < _FEWEST_UPDATES:
        return None
    last = losses[-max(_FEWEST_UPDATES // 2, int(_LAST_SHARE * len(losses))) :]
    loss, constant = float(np.mean(last)), constant_loss(labels)
    if not loss >= (1 - _NEAR / 2) * constant:
        return None
    return (
        f"training loss: {loss:.4f} over the last {len(last)} updates, and "
        f"{constant:.4f} for a prediction that is the same for all inputs: the model has "
        f"not learned. {_REMEDY}"
    )
