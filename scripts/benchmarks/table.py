"""The rows of a benchmark, and how they are printed, written and drawn."""

import csv
import pathlib
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from scripts.benchmarks.turns import quartiles


class Row(NamedTuple):
    """One contender's figure and its ratio to the reference.

    Attributes:
        part: Part of the benchmark.
        setting: Setting that all contenders of a comparison share.
        way: Name of the contender.
        value: Median over the rounds.
        unit: Unit of `value`.
        ratio: Median over the rounds of the ratio to the reference.
        low: Lower quartile of that ratio.
        high: Upper quartile of that ratio.
        reference: Name of the contender with ratio 1.
    """

    part: str
    setting: str
    way: str
    value: float
    unit: str
    ratio: float
    low: float
    high: float
    reference: str


def make_rows(
    part: str,
    setting: str,
    unit: str,
    values: dict[str, list[float]],
    reference: str,
) -> list[Row]:
    """Compares contenders round by round with the reference.

    Args:
        part: As in Row.
        setting: As in Row.
        unit: As in Row.
        values: Contender -> its value in each round.
        reference: One of the contenders.
    """
    rows = []
    for way, its_values in values.items():
        pairs = zip(its_values, values[reference], strict=True)
        low, ratio, high = quartiles([value / base for value, base in pairs])
        value = quartiles(its_values)[1]
        rows.append(Row(part, setting, way, value, unit, ratio, low, high, reference))
    return rows


def as_text(rows: list[Row]) -> str:
    """Returns the table in Markdown."""
    lines = [
        "| part | setting | way | ratio | quartiles | of | value |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.part} | {row.setting} | {row.way} | {row.ratio:.2f} "
            f"| {row.low:.2f} to {row.high:.2f} | {row.reference} "
            f"| {row.value:.4g} {row.unit} |"
        )
    return "\n".join(lines) + "\n"


def write(rows: list[Row], folder: pathlib.Path) -> None:
    """Writes `benchmark.csv`, `benchmark.md` and `benchmark.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "benchmark.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)
    (folder / "benchmark.md").write_text(as_text(rows))
    _draw(rows, folder / "benchmark.png")


def _draw(rows: list[Row], path: pathlib.Path) -> None:
    """Draws a panel per part: ratios as bars, their quartiles as lines.

    The bars that the others are compared with are gray.
    """
    parts = list(dict.fromkeys(row.part for row in rows))
    heights = [sum(row.part == part for row in rows) + 2 for part in parts]
    figure, panels = plt.subplots(
        len(parts),
        squeeze=False,
        figsize=(10, 0.3 * sum(heights) + 0.5),
        height_ratios=heights,
        layout="constrained",
    )
    for part, panel in zip(parts, panels[:, 0], strict=True):
        mine = [row for row in rows if row.part == part]
        places = range(len(mine))
        colors = ["0.7" if row.way == row.reference else "tab:blue" for row in mine]
        panel.barh(places, [row.ratio for row in mine], color=colors, height=0.6)
        panel.hlines(
            places, [row.low for row in mine], [row.high for row in mine], color="black"
        )
        labels = [f"{row.setting}: {row.way}" for row in mine]
        panel.set_yticks(places, labels, fontsize=10)
        panel.axvline(1.0, color="gray", linewidth=0.8)
        panel.invert_yaxis()
        units = ", ".join(dict.fromkeys(row.unit for row in mine))
        references = ", ".join(dict.fromkeys(row.reference for row in mine))
        panel.set_title(f"{part} [{units}], ratio to: {references}", fontsize=11)
    figure.savefig(path, dpi=120)
    plt.close(figure)
