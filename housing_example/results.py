"""Test results of trained models as text."""

from typing import NamedTuple

import numpy as np

from estimator_accum.programs.command_line import aligned
from estimator_accum.programs.plots import Columns

_NUM_SHOWN = 5


class Result(NamedTuple):
    """Results of one trained model.

    Attributes:
        metrics: Metrics on the test examples: mae, rmse [$1,000], global_step and
            more.
        prices: Predicted prices of the test examples [$1,000].
        losses: The columns of `train_metrics.csv`; None where it cannot be read.
        weights: Trained variables by name.
    """

    metrics: dict[str, float]
    prices: np.ndarray
    losses: Columns | None
    weights: dict[str, np.ndarray]


def largest_difference(
    weights: dict[str, np.ndarray], others: dict[str, np.ndarray]
) -> float:
    """Returns the largest weight difference, relative to its variable's largest."""
    return max(
        float(np.abs(weights[name] - value).max() / np.abs(value).max())
        for name, value in others.items()
    )


def cost_text(steps: int, with_it: Result, without: Result) -> str:
    """Returns a sentence on the speed of accumulation, from the median updates."""
    rates = [float(np.median(r.losses["examples_per_sec"])) for r in (with_it, without)]
    text = (
        f"K = {steps} trained {rates[0]:,.0f} examples per second, {rates[0] / rates[1]:.2f} "
        f"of those of K = 1 ({rates[1]:,.0f})."
    )
    if rates[0] < rates[1]:
        text += " K = 1 fits in memory, and is faster."
    return text


def results_text(results: dict[str, Result], truth: np.ndarray) -> str:
    """Returns the metrics, five predictions, and the difference between two models.

    Args:
        results: Results of one or two models, by label.
        truth: True prices of the test examples [$1,000].
    """
    metrics = [("", "MAE", "RMSE")]
    for label, result in results.items():
        values = (f"{result.metrics[name]:.4f}" for name in ("mae", "rmse"))
        metrics.append((label, *values))
    shown = [("", "true", *results)]
    for row, price in enumerate(truth[:_NUM_SHOWN]):
        values = [price, *(result.prices[row] for result in results.values())]
        shown.append((f"example {row + 1}", *(f"{value:.2f}" for value in values)))
    lines = [
        f"test examples ({len(truth)}) [$1,000]",
        aligned(metrics),
        "",
        "predicted prices [$1,000]",
        aligned(shown),
    ]
    if len(results) == 2:
        apart = largest_difference(*(result.weights for result in results.values()))
        lines += ["", f"largest difference of any weight: {apart:.1e}"]
        lines[-1] += " of its variable's largest"
    return "\n".join(lines) + "\n"
