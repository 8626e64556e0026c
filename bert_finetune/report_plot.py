"""The picture of one training run: loss, gradient norm, learning rate, evaluations.

The panels lie above one another, over the same updates. A thin line has the value of
every update; the bold one is its mean over as many updates before as after, and ends
where one of these would be missing.
"""

import csv
import pathlib

import numpy as np

from bert_finetune.evaluations import read_evaluations
from estimator_accum.programs.folder import whole_file
from estimator_accum.programs.metrics_file import METRICS

PLOT = "training.png"

_SMOOTHED_SHARE = 0.05  # of the updates are averaged for one point of the bold line
_MIN_SMOOTHED, _MIN_POINTS = 5, 20  # a run of fewer updates than that has no bold line
_SHOWN_SHARE = 0.99  # of losses and norms are inside of the limits
_MARGIN = 0.06
_BLUE, _RED, _GREEN, _ORANGE = "#0072b2", "#b22222", "#009e73", "#e69f00"


def write_plot(folder: pathlib.Path, metric: str) -> pathlib.Path:
    """Draws `training.png` of a run from its two tables of metrics.

    Args:
        folder: Output folder of the run, with `train_metrics.csv`; `evaluations.csv`
            is drawn too, if it is there.
        metric: Name of the metric by which evaluations are compared.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    # Imported here: only a run that draws needs it.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    updates = _columns(folder / METRICS)
    evaluations = _by_column(read_evaluations(folder))
    panels = [("loss", "loss", 3.0)]
    if evaluations:
        panels.append((metric, metric.removeprefix("eval_").replace("_", " "), 2.0))
    panels += [
        ("gradient_norm", "gradient norm", 2.0),
        ("learning_rate", "learning rate", 1.2),
    ]
    heights = [height for *_, height in panels]
    figure = Figure(figsize=(9, 1.3 * sum(heights)), layout="constrained")
    all_axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, height_ratios=heights
    )[:, 0]
    best = _best(evaluations, metric) if evaluations else None
    for axes, (column, title, _) in zip(all_axes, panels, strict=True):
        axes.set_ylabel(title)
        if column == metric:
            _draw_evaluations(axes, evaluations, metric, best)
        else:
            _draw_updates(axes, updates, column)
            if column == "loss" and evaluations:
                _draw_dev_loss(axes, evaluations)
        if best is not None:
            axes.axvline(best, color=_RED, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.grid(True, color="0.92")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    all_axes[-1].set_xlabel("update")
    all_axes[-1].xaxis.set_major_locator(
        MaxNLocator(8, steps=[1, 2, 5, 10], integer=True)
    )
    # 1e-4 once above the axis, not 0.0001 at every line.
    all_axes[-1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    figure.suptitle(folder.resolve().name, fontweight="bold")
    figure.align_ylabels()
    path = folder / PLOT
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=110)
    return path


def smoothed(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns centred means and their positions in `values`; none of few values."""
    window = max(_MIN_SMOOTHED, int(len(values) * _SMOOTHED_SHARE)) // 2 * 2 + 1
    if len(values) < _MIN_POINTS:
        window = len(values) + 1
    sums = np.cumsum(np.concatenate([[0.0], values]))
    means = (sums[window:] - sums[:-window]) / window
    return np.arange(len(means)) + window // 2, means


def limits(values: np.ndarray, shown_share: float = 1.0) -> tuple[float, float] | None:
    """Returns the lower and upper end of an axis; None if there is nothing to show.

    Args:
        values: Values on the axis; those that are not finite do not count.
        shown_share: Share of the values that is inside; the largest ones may be out.
    """
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = values.min(), np.quantile(values, shown_share)
    margin = _MARGIN * (high - low) or _MARGIN * abs(high) or _MARGIN
    return float(low - margin), float(high + margin)


def _draw_updates(axes, updates: dict[str, np.ndarray], column: str) -> None:
    steps, values = updates["update_step"], updates[column]
    places, means = smoothed(values)
    is_rate = column == "learning_rate"
    is_thin = len(means) > 0 and not is_rate
    style = {"linewidth": 0.7, "alpha": 0.45} if is_thin else {"linewidth": 1.6}
    if len(steps) < _MIN_POINTS:
        style |= {"marker": "o", "markersize": 3}
    axes.plot(steps, values, color=_BLUE, **style)
    if is_thin:
        width = 2 * places[0] + 1
        label = f"training, mean of {width} updates"
        axes.plot(steps[places], means, color=_BLUE, linewidth=2, label=label)
        if column == "loss":  # for all panels
            axes.legend(frameon=False, fontsize="small")
    if (ends := limits(values, 1.0 if is_rate else _SHOWN_SHARE)) is not None:
        axes.set_ylim(*ends)


def _draw_dev_loss(axes, evaluations: dict[str, np.ndarray]) -> None:
    steps, values = evaluations["update_step"], evaluations["eval_loss"]
    style = {"marker": "o", "markersize": 4, "linewidth": 1.4}
    axes.plot(steps, values, color=_ORANGE, label="dev set", **style)
    low, high = axes.get_ylim()
    of_dev = limits(values)
    axes.set_ylim(min(low, of_dev[0]), max(high, of_dev[1]))
    axes.legend(frameon=False, fontsize="small")


def _draw_evaluations(axes, evaluations, metric: str, best: float) -> None:
    steps, values = evaluations["update_step"], evaluations[metric]
    axes.plot(steps, values, color=_GREEN, marker="o", markersize=4, linewidth=1.4)
    value = values[steps == best][0]
    axes.plot([best], [value], color=_RED, marker="*", markersize=13, linestyle="none")
    axes.annotate(
        f"best: {value:.4f} at update {int(best):,}",
        (0.99, 0.06),
        xycoords="axes fraction",
        horizontalalignment="right",
        color=_RED,
        fontsize="small",
    )
    axes.set_ylim(*limits(values))


def _best(evaluations: dict[str, np.ndarray], metric: str) -> float:
    return evaluations["update_step"][np.argmax(evaluations[metric])]


def _columns(path: pathlib.Path) -> dict[str, np.ndarray]:
    with open(path, newline="", encoding="utf-8") as file:
        return _by_column(list(csv.DictReader(file)))


def _by_column(rows: list[dict[str, str]]) -> dict[str, np.ndarray]:
    """Returns float arrays by name; an empty cell is NaN. Empty without a row."""
    return {
        name: np.array([float(row[name] or "nan") for row in rows])
        for name in (rows[0] if rows else ())
    }
