"""estimator-accum plot: the picture, and every refusal."""

import os
import pathlib
import re
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from matplotlib import image

from estimator_accum.programs import loss_curves, plot_loss
from tests.helpers.processes import running

pytestmark = pytest.mark.once
_HEADER = (
    "update_step,global_step,examples,learning_rate,loss,gradient_norm,examples_per_sec"
)


def _write_run(folder: pathlib.Path, losses: list[float], micro_steps: int) -> str:
    folder.mkdir()
    rows = [
        f"{update},{update * micro_steps},{update * 32},0.0001,{loss},1.5,800.0"
        for update, loss in enumerate(losses, start=1)
    ]
    (folder / "train_metrics.csv").write_text("\n".join([_HEADER, *rows]) + "\n")
    return str(folder)


@pytest.fixture
def two_runs(tmp_path: pathlib.Path) -> str:
    falling = np.linspace(0.7, 0.1, 60).tolist()
    with_accumulation = _write_run(tmp_path / "with", falling, micro_steps=4)
    without = _write_run(tmp_path / "without", falling[:40], micro_steps=1)
    return f"{with_accumulation},{without}"


def test_picture_is_written_without_a_display(tmp_path, two_runs, monkeypatch):
    plot = tmp_path / "new folder" / "loss.png"
    for name in ("DISPLAY", "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)
    arguments = ["--output_dirs", two_runs, "--plot", plot]
    path = {"PYTHONPATH": str(running.ROOT)}
    done = running.run(plot_loss.__file__, *arguments, **path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{plot}\n"
    height, width = image.imread(plot).shape[:2]
    assert width > 2 * height > 1000
    assert os.listdir(plot.parent) == ["loss.png"]


def test_both_clocks_are_drawn_side_by_side_with_units_legend_and_grid(two_runs):
    runs = [pd.read_csv(f"{path}/train_metrics.csv") for path in two_runs.split(",")]
    figure = loss_curves.draw(runs, ["with accumulation (8 x 4)", "without (32)"])
    by_updates, by_examples = figure.axes
    assert by_updates.get_xlabel() == "optimizer updates"
    assert by_examples.get_xlabel() == "training examples seen"
    assert by_updates.get_ylabel() == "training loss [nats per example]"
    for axes, clock in ((by_updates, "update_step"), (by_examples, "examples")):
        raw, smoothed, raw_of_second, _ = axes.get_lines()
        np.testing.assert_array_equal(raw.get_xdata(), runs[0][clock])
        np.testing.assert_array_equal(raw.get_ydata(), runs[0]["loss"])
        np.testing.assert_array_equal(raw_of_second.get_xdata(), runs[1][clock])
        assert smoothed.get_linewidth() > 3 * raw.get_linewidth()
        names = [text.get_text() for text in axes.get_legend().get_texts()]
        assert names == ["with accumulation (8 x 4)", "without (32)"]
        title = axes.get_legend().get_title().get_text()
        assert title == "bold: centred mean of 5 updates; thin: each"
        assert axes.xaxis.get_gridlines()[0].get_visible()


def test_bold_line_is_the_centred_mean():
    clocks = {"update_step": range(1, 8), "examples": range(32, 256, 32)}
    run = pd.DataFrame(clocks | {"loss": [0, 0, 0, 5, 0, 0, 0]})
    (axes,) = loss_curves.draw([run], ["spike"]).axes  # of one run, one clock
    _, smoothed = axes.get_lines()
    # Near the ends some of its five updates are missing.
    nan = np.nan
    np.testing.assert_allclose(smoothed.get_ydata(), [nan, nan, 1, 1, 1, nan, nan])


@pytest.mark.parametrize(("low", "is_from_zero"), [(0.2, True), (0.8, False)])
def test_losses_that_change_little_fill_the_picture(low, is_from_zero):
    losses = np.linspace(1.0, low, 50)
    run = pd.DataFrame(
        {"update_step": range(50), "examples": range(50), "loss": losses}
    )
    bottom, top = loss_curves.draw([run], ["run"]).axes[0].get_ylim()
    assert (bottom == 0) == is_from_zero
    assert bottom < low and 1.0 < top < 1.1


def test_label_defaults_to_the_folders_name(tmp_path, two_runs, monkeypatch):
    drawn = mock.Mock(side_effect=loss_curves.draw)
    monkeypatch.setattr(loss_curves, "draw", drawn)
    plot = str(tmp_path / "loss.svg")
    assert plot_loss.main(["--output_dirs", two_runs, "--plot", plot]) == 0
    assert drawn.call_args.args[1] == ["with", "without"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "Received: .*csv, which does not exist. Name the --output_dir of a run"),
        ("", "must be a table with the columns .* Received: a file that is empty"),
        ("update_step,loss\n1,0.5\n", "update_step, loss, without examples"),
        (f"{_HEADER}\n", "must have a row for each update. Received: no row"),
        (f"{_HEADER}\n1,1,32,1,0.7,1,1\n2,2,64,1,nan,1,1\n", "on line 3: loss nan. T"),
        (f"{_HEADER}\n1,1,32,1,high,1,1\n", "hold numbers. .* on line 2: loss high"),
    ],
    ids=["missing", "empty", "columns", "no rows", "nan", "text"],
)
def test_unfit_metrics_file_is_refused(refusal, tmp_path, content, sentence):
    path = tmp_path / "train_metrics.csv"
    if content is not None:
        path.write_text(content)
    flags = [f"--output_dirs={tmp_path}", f"--plot={tmp_path / 'loss.png'}"]
    message = refusal(plot_loss.main, *flags)
    assert str(path) in message and re.search(sentence, message)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--output_dirs=a,b --plot=a.png --labels=one", "`--labels` must .*: 1 for 2"),
        (
            "--output_dirs=a --plot=a.jpeg2000",
            "`--plot` must end in .png, .svg or .pdf",
        ),
        ("--output_dirs=a --plott=a.png", "--plot"),
        ("--output_dirs=a, --plot=a.png", "names separated by single commas"),
    ],
)
def test_an_unfit_flag_is_refused(refusal, tmp_path, monkeypatch, flags, sentence):
    monkeypatch.chdir(tmp_path)
    assert re.search(sentence, refusal(plot_loss.main, *flags.split()))
