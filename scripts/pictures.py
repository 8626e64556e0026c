"""Draws the pictures of the pages whose numbers stand on these pages.

    python scripts/pictures.py

writes docs/images/idea.svg, and from the tables of the pages memory.svg
(docs/whole_batches.md), keras_memory.svg (docs/keras_batches.md), performance.svg and
keras.svg (the pages of their names). The background is transparent and the colors are
readable on white and on black. The same numbers give the same files. Needs matplotlib.
"""

import pathlib
import re
import sys

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from estimator_accum.programs.command_line import OneSentenceParser, exit_code_of

_DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
_GREY, _BLUE, _ORANGE, _GREEN = "#77808a", "#3a87c8", "#d9822b", "#2e9e6b"
_STYLE = {
    "font.size": 11,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "estimator-accum",  # names of clip paths
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), _GREY),
    **dict.fromkeys(("xtick.color", "ytick.color"), _GREY),
}
Bars = list[tuple[str, float]]


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_folder("output_dir", "folder of the pictures", default=_DOCS / "images")
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: _draw_all(flags.output_dir))


def _draw_all(folder: pathlib.Path) -> None:
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        _save(draw_idea(), folder / "idea.svg", "four micro-batches, one update")
        for name, page, way in (
            ("memory", "whole_batches", "batches of 1,024, microbatch_model_fn"),
            ("keras_memory", "keras_batches", "batches of 512, Keras's microbatch"),
        ):
            bars = memory_bars(page)
            _save(draw_memory(bars, way), folder / f"{name}.svg", str(bars))
        panels = performance_panels()
        _save(draw_performance(panels), folder / "performance.svg", str(panels))
        _save(draw_keras(keras_bars()), folder / "keras.svg", str(keras_bars()))


def _save(figure, path: pathlib.Path, description: str) -> None:
    metadata = {"Date": None, "Creator": None, "Description": description}
    figure.savefig(path, transparent=True, metadata=metadata)
    print(path)


def memory_bars(page: str) -> Bars:
    """Returns the memory of the convolutional net by way, from the page's table."""
    text = (_DOCS / f"{page}.md").read_text()
    header = re.search(r"^\| \| plain .*", text, re.MULTILINE)[0]
    row = re.search(r"^\| convolutional net.*", text, re.MULTILINE)[0]
    names, numbers = (
        [cell.strip() for cell in line.split("|")[2:-1]] for line in (header, row)
    )
    return [(n, float(v.replace(",", ""))) for n, v in zip(names, numbers, strict=True)]


_PANELS = {  # title: {bar: the row of the table in docs/performance.md}
    "Added to a micro-step [ms], BERT-Small, K = 4: lower is better": {
        "the copied patch": "**overhead** of a micro-step, BERT-Small, K = 4: the patch",
        "this project": "this project",
        "memory-bandwidth bound": "memory-bandwidth bound",
    },
    "Examples per second on CoLA, BERT of 6 layers: higher is better": {
        "Trainer, 8 x 4": "**CoLA**, 6 layers, 32 sentences an update: Trainer, 8 x 4",
        "Trainer, 8 x 4, by length": "Trainer, 8 x 4, `group_by_length`",
        "Trainer, 32 x 1, by length": "Trainer, 32 x 1, `group_by_length`",
        "this project, 8 x 4": "this project, 8 x 4",
        "this project, split for speed": "this project, `--effective_batch_size=32` alone",
    },
}


def performance_panels() -> dict[str, Bars]:
    """Returns the bars of each panel, from the page's table; the first row counts."""
    numbers = {}
    for line in (_DOCS / "performance.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 5 and (number := re.match(r"[\d.,]+", cells[3])):
            numbers.setdefault(cells[1], float(number[0].rstrip(",")))
    return {
        title: [(name, numbers[row]) for name, row in rows.items()]
        for title, rows in _PANELS.items()
    }


def keras_bars() -> Bars:
    """Returns the largest difference of a weight by way, from the page's caption."""
    text = (_DOCS / "keras.md").read_text()
    matches = re.findall(r"(\d\.\de-\d\d) with ([^,\]]+)", text)
    return [(name, float(value)) for value, name in matches]


def draw_idea():
    """Draws a batch, its micro-batches, the mean of their gradients and one update."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    figure = Figure(figsize=(5.8, 2.1), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 58), ylim=(0, 21), aspect="equal")
    axes.axis("off")

    def box(x, y, width, height, color, text):
        style = {"boxstyle": "round,pad=0,rounding_size=1", "linewidth": 1.6}
        patch = FancyBboxPatch((x, y), width, height, ec=color, fc="none", **style)
        axes.add_patch(patch)
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center")

    def arrow(start, end):
        style = {"arrowstyle": "-|>", "color": _GREY, "linewidth": 1.2}
        axes.annotate("", end, start, arrowprops=style)

    box(0.5, 3.8, 11.5, 16.8, _ORANGE, "batch of\n32 examples")
    for number in range(4):
        y = 17 - 4.4 * number
        arrow((12.2, 12.2), (16.3, y + 1.8))
        box(16.5, y, 10.5, 3.6, _BLUE, "8 examples")
        arrow((27.2, y + 1.8), (31.3, 12.2))
    box(31.5, 8.2, 11, 8, _GREEN, "mean of the\n4 gradients")
    arrow((42.7, 12.2), (45.3, 12.2))
    box(45.5, 8.2, 12, 8, _ORANGE, "one update of\nthe weights")
    axes.text(21.75, 1.5, "one after the other", ha="center", va="center")
    return figure


def draw_memory(bars: Bars, way: str):
    """Draws memory against the number of micro-batches.

    Args:
        bars: Numbers of micro-batches, with the memory of each.
        way: The batches and the function that splits them.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 2.7), layout="constrained")
    axes = figure.subplots()
    plain = bars[0][1]
    names = [
        name if n == 0 else f"K = {name}" + ": the same" * (value == plain)
        for n, (name, value) in enumerate(bars)
    ]
    colors = [_ORANGE] + [_BLUE] * (len(bars) - 1)
    drawn = axes.bar(names, [value for _, value in bars], color=colors, width=0.6)
    axes.bar_label(drawn, fmt="{:,.0f} MB", padding=3)
    title = f"Peak memory of training, convolutional net, {way}"
    axes.set_title(title, loc="left")
    axes.set_yticks([])
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.margins(y=0.15)
    return figure


def draw_performance(panels: dict[str, Bars]):
    """Draws horizontal bars, a panel for each comparison."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 4.4), layout="constrained")
    sizes = [len(bars) for bars in panels.values()]
    all_axes = figure.subplots(len(panels), 1, height_ratios=sizes)
    for axes, (title, bars) in zip(all_axes, panels.items(), strict=True):
        bars = bars[::-1]
        names, values = zip(*bars, strict=True)
        colors = [_color_of(name) for name in names]
        drawn = axes.barh(names, values, color=colors, height=0.6)
        axes.bar_label(drawn, fmt="{:g}", padding=3)
        axes.set_title(title, loc="left")
        axes.set_xticks([])
        axes.spines[["top", "bottom", "right"]].set_visible(False)
        axes.margins(x=0.1)
    return figure


def draw_keras(bars: Bars):
    """Draws two differences on a logarithmic axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 2.2), layout="constrained")
    axes = figure.subplots()
    names, values = zip(*bars[::-1], strict=True)
    colors = [_ORANGE, _BLUE]
    drawn = axes.barh(names, values, color=colors, height=0.5, log=True)
    axes.bar_label(drawn, [f"{value:.1e}" for value in values], padding=3)
    axes.set_title("Largest weight difference from batches of 32", loc="left")
    axes.set_xlabel("log scale; smaller is better")
    axes.set_xlim(1e-8, 10)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _color_of(name: str) -> str:
    if name.startswith("this project"):
        return _BLUE
    return _GREY if "bound" in name else _ORANGE


if __name__ == "__main__":
    sys.exit(main())
