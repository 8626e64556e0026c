"""Pictures of runs, from the `train_metrics.csv` that each of them writes.

A thin line shows the value of every update; the bold one is smoothed: the mean over as
many updates before as after. It ends where one of these would be missing.
"""

import csv
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from estimator_accum.programs.folder import METRICS, whole_file

Columns = Mapping[str, np.ndarray]  # float64 by name, a value for each row

# Colors that everyone can tell apart, in print too. Later runs are narrower and dashed,
# so that curves that coincide are all visible.
COLORS = ("#56b4e9", "#b22222", "#009e73", "#e69f00", "#cc79a7", "#0072b2")
_BLUE, _RED, _GREEN, _ORANGE = "#0072b2", "#b22222", "#009e73", "#e69f00"
_WIDTHS = (5.0, 2.2, 2.2)
_DASHES = ("solid", (0, (3, 1.5)), (0, (1, 1)))
_SMOOTHED_SHARE = 0.05  # of the updates are averaged for one point of the bold line
_MIN_SMOOTHED = 5
_SHOWN_SHARE = 0.99  # of losses and norms are inside of the limits
_NEAR = 1.5  # times the shown height that a largest value may take, to be shown too
_MARGIN = 0.06
_SUDDEN = 3  # times the largest later fall of a learning rate
_CLOCKS = (
    ("update_step", "against optimizer updates", "optimizer updates"),
    ("examples", "against training examples", "training examples seen"),
)
_TICKS = {"steps": [1, 2, 5, 10], "integer": True}


def plot_loss(
    output_dirs: Sequence[pathlib.Path],
    labels: Sequence[str] | None,
    plot: pathlib.Path,
) -> None:
    """Writes the picture of the losses of several runs, and prints its path.

    Args:
        output_dirs: Folders with `train_metrics.csv`.
        labels: A name for each folder; None uses the folders' names.
        plot: Path of the picture; its suffix selects the format.

    Raises:
        ValueError: If a file is missing or invalid.
    """
    labels = labels or [folder.name for folder in output_dirs]
    runs = [read_metrics(folder / METRICS) for folder in output_dirs]
    figure = draw_losses(runs, labels)
    plot.parent.mkdir(parents=True, exist_ok=True)
    save(figure, plot)
    print(plot)


def draw_losses(runs: Sequence[Columns], labels: Sequence[str]) -> Figure:
    """Draws loss against updates, and on the right against examples.

    The right side is there if the runs differ in the examples of an update.

    Args:
        runs: Columns update_step, loss and, where examples are counted, examples.
        labels: A name per run.
    """
    clocks = _CLOCKS[:1]
    if all(
        "examples" in run for run in runs
    ):  # with equal batches both sides would look the same
        sizes = {run["examples"][0] / run["update_step"][0] for run in runs}
        clocks = _CLOCKS[: 1 + (len(sizes) > 1)]
    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(1, len(clocks), sharey=True, squeeze=False)[0]
    window = window_of(min(len(run["loss"]) for run in runs))
    for axes, (clock, title, label) in zip(panels, clocks, strict=True):
        for number, (run, name) in enumerate(zip(runs, labels, strict=True)):
            width = 2.0 if len(runs) == 1 else None  # wide ones lie below others
            draw_series(
                axes, run[clock], run["loss"], window, number, name, width=width
            )
        axes.set(title=title, xlabel=label)
        axes.set_xlim(left=0)
        losses = np.concatenate([run["loss"] for run in runs])
        if (ends := limits(losses, 0.995)) is not None:
            axes.set_ylim(*ends)
        axes.xaxis.set_major_locator(MaxNLocator(8, **_TICKS))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.tick_params(labelleft=True)
        decorate(axes)
        axes.legend(
            title=f"bold: smoothed over {window} updates; thin: each",
            title_fontsize="small",
            alignment="left",
            frameon=False,
            handlelength=3.5,
        )
    panels[0].set_ylabel("training loss")  # in the unit of the program
    figure.suptitle("Training loss of each update", fontsize=15, fontweight="bold")
    return figure


def draw_run(updates: Columns, evaluations: Columns, metric: str, name: str) -> Figure:
    """Draws loss, evaluations, gradient norm and learning rate above one another.

    Args:
        updates: Columns of `train_metrics.csv`.
        evaluations: Columns of the evaluations during training; empty without any.
        metric: Column by which evaluations are compared; larger is better.
        name: First line of the title: the task and its batch.
    """
    panels = {"loss": ("loss", 3.0)}
    if evaluations:
        panels[metric] = (metric.removeprefix("eval_").replace("_", " "), 2.0)
    panels |= {"gradient_norm": ("gradient norm", 2.0)}
    if np.isfinite(updates["learning_rate"]).any():  # a run may not report it
        panels |= {"learning_rate": ("learning rate", 1.2)}
    heights = [height for _, height in panels.values()]
    figure = Figure(figsize=(9, 1.3 * sum(heights)), layout="constrained")
    all_axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, height_ratios=heights
    )[:, 0]
    for axes, (column, (title, _)) in zip(all_axes, panels.items(), strict=True):
        axes.set_ylabel(title)
        if column == metric:
            _draw_evaluations(axes, evaluations, metric)
        elif column == "learning_rate":
            axes.plot(updates["update_step"], updates[column], color=_BLUE)
            _label_fall(axes, updates["update_step"], updates[column])
        else:
            _draw_column(axes, updates, column)
        if column == "loss" and evaluations:
            _draw_dev_loss(axes, evaluations)
        if evaluations:
            style = {"color": _RED, "linewidth": 0.8, "linestyle": (0, (4, 3))}
            axes.axvline(_best(evaluations, metric), **style)
        decorate(axes)
    last = all_axes[-1]
    last.set_xlabel("update")
    last.xaxis.set_major_locator(MaxNLocator(8, **_TICKS))
    # 1e-4 once above the axis, not 0.0001 at every line.
    last.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    figure.suptitle(f"{name}{_best_text(evaluations, metric)}", fontweight="bold")
    figure.align_ylabels()
    return figure


def _best_text(evaluations: Columns, metric: str) -> str:
    """Returns the second line of the title; "" without evaluations."""
    if not evaluations:
        return ""
    name, value = metric.removeprefix("eval_").replace("_", " "), evaluations[metric]
    best = int(_best(evaluations, metric))
    return f"\nbest {name} {value.max():.4f}, at update {best:,}"


def _label_fall(axes: Axes, steps: np.ndarray, rates: np.ndarray) -> None:
    """Says why the rate falls abruptly where its warm-up ends.

    As in google-research/bert, the decay has gone on during the warm-up.
    """
    is_known = np.isfinite(rates)
    steps, rates = steps[is_known], rates[is_known]
    top = int(np.argmax(rates)) if len(rates) else 0
    if not 0 < top < len(rates) - 2:
        return
    falls = rates[top:-1] - rates[top + 1 :]
    if falls[0] > _SUDDEN * falls[1:].max():
        axes.annotate(
            "end of warm-up: the decay counts from update 0",
            (steps[top], rates[top]),
            (8, -2),
            textcoords="offset points",
            verticalalignment="top",
            fontsize="small",
        )


def _draw_column(axes: Axes, updates: Columns, column: str) -> None:
    window = window_of(len(updates[column]))
    label = f"training, mean of {window} updates"
    steps, values = updates["update_step"], updates[column]
    draw_series(axes, steps, values, window, label=label, color=_BLUE, width=2.0)
    if (ends := limits(values, _SHOWN_SHARE)) is not None:
        axes.set_ylim(*ends)
    if column == "loss":  # for all panels
        axes.legend(frameon=False, fontsize="small")


def _draw_dev_loss(axes: Axes, evaluations: Columns) -> None:
    values = evaluations["eval_loss"]
    style = {"marker": "o", "markersize": 4, "linewidth": 1.4, "label": "dev set"}
    axes.plot(evaluations["update_step"], values, color=_ORANGE, **style)
    low, high = limits(values)
    axes.set_ylim(min(low, axes.get_ylim()[0]), max(high, axes.get_ylim()[1]))
    axes.legend(frameon=False, fontsize="small")


def _draw_evaluations(axes: Axes, evaluations: Columns, metric: str) -> None:
    steps, values = evaluations["update_step"], evaluations[metric]
    best, value = _best(evaluations, metric), values.max()
    axes.plot(steps, values, color=_GREEN, marker="o", markersize=4, linewidth=1.4)
    axes.plot([best], [value], color=_RED, marker="*", markersize=13, linestyle="none")
    is_flat = values.min() == values.max() and 0 <= value <= 1
    axes.set_ylim(*((-0.05, 1.05) if is_flat else limits(values)))


def _best(evaluations: Columns, metric: str) -> float:
    return evaluations["update_step"][np.argmax(evaluations[metric])]


def draw_series(
    axes: Axes,
    steps: np.ndarray,
    values: np.ndarray,
    window: int,
    number: int = 0,
    label: str | None = None,
    color: str | None = None,
    width: float | None = None,
) -> None:
    """Draws a thin line through all values, and a bold one through their means.

    Args:
        axes: Axes to draw in.
        steps: Place of each value.
        values: A value of each update.
        window: Values of a mean; odd.
        number: Number of the line in the axes, which selects its style.
        label: Name in the legend.
        color: Color in place of the style's.
        width: Width of the bold line in place of the style's.
    """
    color = color or COLORS[number % len(COLORS)]
    style = min(number, len(_WIDTHS) - 1)
    axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.35, zorder=1)
    places, means = smoothed(values, window)
    axes.plot(
        np.asarray(steps)[places],
        means,
        color=color,
        linewidth=width or _WIDTHS[style],
        solid_capstyle="butt",
        linestyle=_DASHES[style],
        label=label,
        zorder=2 + number,
    )


def decorate(axes: Axes) -> None:
    """Adds the grid that all pictures have."""
    axes.margins(x=0.01)
    axes.grid(True, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: pathlib.Path) -> None:
    """Writes the picture atomically, in the format of the path's suffix."""
    with whole_file(path) as partial:
        figure.savefig(partial, format=path.suffix[1:], dpi=150)


def window_of(num_updates: int) -> int:
    """Returns the number of values in a mean: an odd one, 5 at least."""
    return max(_MIN_SMOOTHED, int(num_updates * _SMOOTHED_SHARE)) // 2 * 2 + 1


def smoothed(values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (positions, means around them); none of fewer values than `window`."""
    if len(values) < window:
        return np.arange(0), np.zeros(0)
    sums = np.cumsum(np.concatenate([[0.0], values]))
    means = (sums[window:] - sums[:-window]) / window
    return np.arange(len(means)) + window // 2, means


def limits(values: np.ndarray, shown_share: float = 1.0) -> tuple[float, float] | None:
    """Returns the lower and upper end of an axis; None if there is nothing to show.

    Args:
        values: Values on the axis; those that are not finite do not count.
        shown_share: Share of the values that is inside; outliers above may be out.
    """
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high, top = values.min(), np.quantile(values, shown_share), values.max()
    if top - low <= _NEAR * (high - low):
        high = top  # no outlier: a line that leaves the picture would look cut off
    margin = _MARGIN * (high - low) or _MARGIN * abs(high) or _MARGIN
    return float(low - margin), float(high + margin)


def read_metrics(
    path: pathlib.Path, required: Sequence[str] = ("update_step", "loss")
) -> Columns:
    """Returns the columns of a table; a cell that is not a number is NaN.

    Args:
        path: A file such as `train_metrics.csv`.
        required: Columns that must be there, with numbers only.

    Raises:
        ValueError: If the file is missing or invalid.
    """
    remedy = "Name the --output_dir of a run that has trained."
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = list(csv.reader(file)) or [[]]
    except FileNotFoundError as error:
        raise ValueError(
            f"The folder of a run must hold {path.name}. "
            f"Received: {path}, which does not exist. {remedy}"
        ) from error
    except (csv.Error, UnicodeError):
        header, rows = [], []
    missing = [column for column in required if column not in header]
    if missing:
        received = f"{', '.join(header)}, without {', '.join(missing)}"
        raise ValueError(
            f"{path} must be a table with the columns {', '.join(required)}. "
            f"Received: {received if header else 'a file that is empty or no table'}. "
            f"{remedy}"
        )
    if not rows:
        raise ValueError(
            f"{path} must have a row for each update. Received: no row. {remedy}"
        )
    cells = [dict(zip(header, row, strict=False)) for row in rows]
    columns = {
        name: np.array([_number(row.get(name)) for row in cells]) for name in header
    }
    for name in required:
        for row in np.isnan(columns[name]).nonzero()[0]:
            raise ValueError(
                f"{path} must hold numbers. Received on line {row + 2}: {name} "
                f"{cells[row].get(name)}. Train again, with a lower learning rate if the "
                "loss became NaN."
            )
    return columns


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return np.nan
