"""Picture of the training loss of runs, from their `train_metrics.csv`."""

import pathlib

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from estimator_accum.programs.folder import whole_file
from estimator_accum.programs.metrics_file import METRICS

_COLUMNS = ("update_step", "examples", "loss")
_SMOOTHED_SHARE = 0.05  # of a run's updates are averaged for one point of the bold line
_MIN_SMOOTHED_UPDATES = 5
_CLOCKS = (
    ("update_step", "against optimizer updates", "optimizer updates"),
    ("examples", "against training examples", "training examples seen"),
)
# Colors that everyone can tell apart, in print too. Later runs are narrower and dashed,
# so that curves that coincide are all visible.
_COLORS = ("#56b4e9", "#b22222", "#009e73", "#e69f00", "#cc79a7", "#0072b2")
_WIDTHS = (5.0, 2.2, 2.2)
_DASHES = ("solid", (0, (3, 1.5)), (0, (1, 1)))


def plot_loss(
    output_dirs: list[pathlib.Path], labels: list[str] | None, plot: pathlib.Path
) -> None:
    """Writes the picture and prints its path.

    Args:
        output_dirs: Folders with `train_metrics.csv`.
        labels: A name for each folder; None uses the folders' names.
        plot: Path of the picture; its suffix selects the format.

    Raises:
        ValueError: If a file is missing or invalid, or the arguments do not match.
    """
    labels = labels or [folder.name for folder in output_dirs]
    _check_labels(labels, output_dirs)
    _check_format(plot)
    runs = [_read_metrics(folder / METRICS) for folder in output_dirs]
    figure = draw(runs, labels)
    plot.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(plot) as partial:
        figure.savefig(partial, format=plot.suffix[1:], dpi=150)
    print(plot)


def draw(runs: list[pd.DataFrame], labels: list[str]) -> Figure:
    """Draws loss against updates; of several runs, against examples on the right.

    Args:
        runs: A table per run, with the columns update_step, examples and loss [nats].
        labels: A name per run.
    """
    clocks = _CLOCKS if len(runs) > 1 else _CLOCKS[:1]  # two would look the same
    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(1, len(clocks), sharey=True, squeeze=False)[0]
    window = _smoothed_updates(runs)
    for axes, (clock, title, label) in zip(panels, clocks, strict=True):
        for number, (run, name) in enumerate(zip(runs, labels, strict=True)):
            _draw_run(axes, clock, run, name, number, window)
        axes.set_title(title)
        axes.set_xlabel(label)
        _decorate(axes, runs, window)
    panels[0].set_ylabel("training loss [nats per example]")
    figure.suptitle("Training loss of each update", fontsize=15, fontweight="bold")
    return figure


def centred_mean(values: pd.Series, window: int) -> pd.Series:
    """Returns the mean over as many values before as after; NaN where some are missing.

    Args:
        values: One value an update.
        window: Values of a mean; odd.
    """
    return values.rolling(window, center=True).mean()


def _draw_run(
    axes: Axes, clock: str, run: pd.DataFrame, label: str, number: int, window: int
) -> None:
    color = _COLORS[number % len(_COLORS)]
    smoothed = centred_mean(run["loss"], window)
    axes.plot(run[clock], run["loss"], color=color, linewidth=0.7, alpha=0.3, zorder=1)
    axes.plot(
        run[clock],
        smoothed,
        color=color,
        linewidth=_WIDTHS[min(number, 2)],
        solid_capstyle="butt",
        linestyle=_DASHES[min(number, 2)],
        label=label,
        zorder=2 + number,
    )


def _decorate(axes: Axes, runs: list[pd.DataFrame], window: int) -> None:
    axes.margins(x=0.01)
    axes.set_xlim(left=0)
    low = min(run["loss"].quantile(0.005) for run in runs)
    high = max(run["loss"].quantile(0.995) for run in runs)
    is_from_zero = low < 0.5 * high
    axes.set_ylim(0 if is_from_zero else 1.05 * low - 0.05 * high, 1.05 * high)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.tick_params(labelleft=True)
    axes.grid(True, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        title=f"bold: centred mean of {window} updates; thin: each",
        title_fontsize="small",
        alignment="left",
        frameon=False,
        handlelength=3.5,
    )


def _smoothed_updates(runs: list[pd.DataFrame]) -> int:
    """Returns an odd number of updates, the same for every run."""
    shortest = min(len(run) for run in runs)
    return max(_MIN_SMOOTHED_UPDATES, int(shortest * _SMOOTHED_SHARE)) // 2 * 2 + 1


def _read_metrics(path: pathlib.Path) -> pd.DataFrame:
    remedy = "Name the --output_dir of a run that has trained."
    try:
        table = pd.read_csv(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"Each folder of `--output_dirs` must hold {METRICS}. "
            f"Received: {path}, which does not exist. {remedy}"
        ) from error
    except (pd.errors.EmptyDataError, pd.errors.ParserError, UnicodeError) as error:
        content = "empty" if path.stat().st_size == 0 else "no table"
        raise ValueError(
            f"{path} must be a table with the columns {', '.join(_COLUMNS)}. "
            f"Received: a file that is {content}. {remedy}"
        ) from error
    missing = [column for column in _COLUMNS if column not in table]
    if missing:
        raise ValueError(
            f"{path} must have the columns {', '.join(_COLUMNS)}. "
            f"Received: {', '.join(table.columns)}, without {', '.join(missing)}. "
            f"{remedy}"
        )
    if table.empty:
        raise ValueError(
            f"{path} must have a row for each update. Received: no row. {remedy}"
        )
    return _numbers(table, path)


def _numbers(table: pd.DataFrame, path: pathlib.Path) -> pd.DataFrame:
    numbers = table[list(_COLUMNS)].apply(pd.to_numeric, errors="coerce")
    for row, column in zip(*numbers.isna().to_numpy().nonzero(), strict=True):
        raise ValueError(
            f"{path} must hold numbers. Received on line {row + 2}: "
            f"{_COLUMNS[column]} {table[_COLUMNS[column]][row]}. Train again, with a "
            "lower learning rate if the loss became NaN."
        )
    return numbers


def _check_labels(labels: list[str], output_dirs: list[pathlib.Path]) -> None:
    if len(labels) != len(output_dirs):
        raise ValueError(
            "`--labels` must hold a name for each folder of `--output_dirs`. Received: "
            f"{len(labels)} for {len(output_dirs)}. Separate names by commas."
        )


def _check_format(plot: pathlib.Path) -> None:
    if plot.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(
            f"`--plot` must end in .png, .svg or .pdf. Received: {plot}. "
            "Use FILE.png for a picture that opens everywhere."
        )
