"""Plot of a run: its losses, and predicted prices against the true ones."""

import pathlib

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from estimator_accum.programs.folder import whole_file
from estimator_accum.programs.loss_curves import centred_mean

# Distinct for color-blind readers and in print; the second run is drawn over the first,
# thin enough that both are visible where they coincide.
_COLORS = ("#56b4e9", "#b22222")
_LINES = ({"linewidth": 5.0}, {"linewidth": 2.2, "linestyle": (0, (3, 1.5))})
_SMOOTHED_UPDATES = 25  # averaged for one point of the bold line
_MARKERS = (
    {"marker": "o", "s": 60, "alpha": 0.6, "linewidths": 0},
    {"marker": "x", "s": 22, "linewidths": 1.2},
)


def write_plot(
    path: pathlib.Path,
    losses: dict[str, pd.DataFrame],
    predictions: dict[str, np.ndarray],
    truth: np.ndarray,
) -> None:
    """Writes the plot as a PNG file.

    Args:
        path: Path of the file.
        losses: The `train_metrics.csv` of one or two runs, by label.
        predictions: Predicted prices of the test examples [unit of MEDV], by label.
        truth: True prices of the test examples, in the same order.
    """
    figure = draw(losses, predictions, truth)
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=150)


def draw(
    losses: dict[str, pd.DataFrame],
    predictions: dict[str, np.ndarray],
    truth: np.ndarray,
) -> Figure:
    """Draws the losses on the left, the prices on the right; see `write_plot`."""
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_losses(left, losses)
    _draw_prices(right, predictions, truth)
    for axes in (left, right):
        axes.grid(True, color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, handlelength=3)
    return figure


def _draw_losses(axes: Axes, losses: dict[str, pd.DataFrame]) -> None:
    for number, (label, rows) in enumerate(losses.items()):
        updates, color = rows["update_step"], _COLORS[number]
        axes.plot(updates, rows["loss"], color=color, linewidth=0.7, alpha=0.35)
        smoothed = centred_mean(rows["loss"], _SMOOTHED_UPDATES)
        axes.plot(
            updates,
            smoothed,
            color=color,
            solid_capstyle="butt",
            label=label,
            **_LINES[number],
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.01)
    axes.set_title(
        f"Training loss of each update; bold: centred mean of {_SMOOTHED_UPDATES}"
    )
    axes.set_xlabel("optimizer updates")
    axes.set_ylabel("mean squared error [(unit of MEDV)²]")


def _draw_prices(
    axes: Axes, predictions: dict[str, np.ndarray], truth: np.ndarray
) -> None:
    ends = [min(truth), max(truth)]
    axes.plot(ends, ends, color="0.4", linewidth=1, zorder=1, label="predicted = true")
    for number, (label, prices) in enumerate(predictions.items()):
        axes.scatter(
            truth, prices, color=_COLORS[number], label=label, **_MARKERS[number]
        )
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_title(f"Prices of {len(truth)} test examples")
    axes.set_xlabel("true price [unit of MEDV]")
    axes.set_ylabel("predicted price [unit of MEDV]")
