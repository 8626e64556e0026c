"""Plot of a run: its losses beside its predicted prices."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import (
    LogLocator,
    MaxNLocator,
    NullFormatter,
    StrMethodFormatter,
)

from estimator_accum.programs.plots import COLORS, decorate, draw_series, window_of
from housing_example.results import Result

_MARKERS = (
    {"marker": "o", "s": 60, "alpha": 0.6, "linewidths": 0},
    {"marker": "x", "s": 22, "linewidths": 1.2},
)


def draw(results: dict[str, Result], truth: np.ndarray) -> Figure:
    """Draws the losses on the left, the prices on the right.

    Args:
        results: Results of one or two models, by label.
        truth: True prices of the test examples [$1,000].
    """
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    ends = [min(truth), max(truth)]
    right.plot(ends, ends, color="0.4", linewidth=1, zorder=1, label="predicted = true")
    for number, (label, result) in enumerate(results.items()):
        updates, losses = result.losses["update_step"], result.losses["loss"]
        window = window_of(len(losses))
        draw_series(left, updates, losses, window, number, label)
        style = {"color": COLORS[number], **_MARKERS[number]}
        right.scatter(truth, result.prices, label=label, **style)
    left.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    left.yaxis.set_minor_formatter(NullFormatter())
    left.set_title(f"Training loss of each update; bold: smoothed over {window}")
    left.set(xlabel="optimizer updates")
    left.set(ylabel=r"mean squared error [(\$1,000)²]")
    right.set_aspect("equal", adjustable="datalim")
    right.set_title(f"Prices of {len(truth)} test examples")
    right.set_xlabel(r"true price [\$1,000]")
    right.set_ylabel(r"predicted price [\$1,000]")
    for axes in (left, right):
        decorate(axes)
        axes.legend(frameon=False, handlelength=3)
    return figure
