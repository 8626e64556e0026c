"""Pictures of runs; refusals of `estimator-accum plot`."""

import os
import pathlib
import re
from unittest import mock

import numpy as np
import pytest
from matplotlib import image

from estimator_accum.programs import plot_loss, plots
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


def test_both_clocks_are_drawn_side_by_side_with_legend_and_grid(two_runs):
    paths = [pathlib.Path(path, "train_metrics.csv") for path in two_runs.split(",")]
    runs = [plots.read_metrics(path) for path in paths]
    (alone,) = plots.draw_losses(runs, ["8 x 4", "32"]).axes  # equal batches
    assert alone.get_xlabel() == "optimizer updates"
    runs[1]["examples"] /= 2
    figure = plots.draw_losses(runs, ["with accumulation (8 x 4)", "without (32)"])
    by_updates, by_examples = figure.axes
    assert by_updates.get_xlabel() == "optimizer updates"
    assert by_examples.get_xlabel() == "training examples seen"
    assert by_updates.get_ylabel() == "training loss"
    for axes, clock in ((by_updates, "update_step"), (by_examples, "examples")):
        raw, smoothed, raw_of_second, _ = axes.get_lines()
        np.testing.assert_array_equal(raw.get_xdata(), runs[0][clock])
        np.testing.assert_array_equal(raw.get_ydata(), runs[0]["loss"])
        np.testing.assert_array_equal(raw_of_second.get_xdata(), runs[1][clock])
        assert smoothed.get_linewidth() > 3 * raw.get_linewidth()
        names = [text.get_text() for text in axes.get_legend().get_texts()]
        assert names == ["with accumulation (8 x 4)", "without (32)"]
        title = axes.get_legend().get_title().get_text()
        assert title == "bold: smoothed over 5 updates; thin: each"
        assert axes.xaxis.get_gridlines()[0].get_visible()


def test_runs_that_do_not_count_examples_are_drawn_against_updates():
    runs = [_run([2.0, 1.0]) for _ in range(2)]
    del runs[1]["examples"]
    (axes,) = plots.draw_losses(runs, ["a", "b"]).axes
    assert axes.get_xlabel() == "optimizer updates"
    assert axes.get_ylabel() == "training loss"  # whatever its unit is


def _run(losses) -> dict[str, np.ndarray]:
    updates = np.arange(1.0, len(losses) + 1)
    losses = np.array(losses, float)
    return {"update_step": updates, "examples": 32 * updates, "loss": losses}


def test_bold_line_is_the_centred_mean_and_ends_where_its_window_would_be_cut():
    (axes,) = plots.draw_losses([_run([0, 0, 0, 5, 0, 0, 0])], ["spike"]).axes
    _, bold = axes.get_lines()
    np.testing.assert_allclose(bold.get_xydata(), [[3, 1], [4, 1], [5, 1]])
    assert plots.window_of(1000) == 51
    places, means = plots.smoothed(np.arange(100.0), 51)
    assert (places[0], places[-1]) == (25, 74)
    np.testing.assert_allclose(means, places)
    assert len(plots.smoothed(np.ones(4), 5)[1]) == 0


@pytest.mark.parametrize("low", [0.2, 0.8])
def test_losses_fill_the_picture(low):
    figure = plots.draw_losses([_run(np.linspace(1.0, low, 50))], ["run"])
    bottom, top = figure.axes[0].get_ylim()
    assert low - 0.1 < bottom < low and 1.0 < top < 1.1


@pytest.mark.parametrize(
    "values, share, expected",
    [
        ([2.0, 3.0], 1.0, (1.94, 3.06)),
        ([0.0] * 99 + [1.0] * 101 + [1000.0], 0.99, (-0.06, 1.06)),
        ([0.0] * 99 + [1.0] * 101 + [1.4], 0.99, (-0.084, 1.484)),
        ([5.0, np.nan], 1.0, (4.7, 5.3)),
        ([0.0], 1.0, (-0.06, 0.06)),
        ([np.nan], 1.0, None),
    ],
)
def test_limits_are_those_of_the_data(values, share, expected):
    limits = plots.limits(np.array(values), share)
    assert limits is expected or limits == pytest.approx(expected)


@pytest.mark.parametrize("is_evaluated, rate", [(True, 1e-4), (False, np.nan)])
def test_picture_of_a_run_has_a_panel_for_each_series(is_evaluated, rate):
    updates = _run(np.linspace(1, 0, 40)) | {"gradient_norm": np.ones(40)}
    updates["learning_rate"] = np.array([np.nan] + [rate] * 39)  # unknown once
    evaluations = {}
    if is_evaluated:
        steps = np.array([10.0, 20.0, 30.0, 40.0])
        scores = np.array([0.3, 0.6, 0.1, 0.4])
        evaluations = {"update_step": steps, "eval_loss": 1 / steps, "f1": scores}
    figure = plots.draw_run(updates, evaluations, "f1", "run")
    best = "\nbest f1 0.6000, at update 20" if is_evaluated else ""
    assert figure.get_suptitle() == f"run{best}"
    names = ["loss", "f1", "gradient norm", "learning rate"]
    if not is_evaluated:
        names = ["loss", "gradient norm"]
    assert [axes.get_ylabel() for axes in figure.axes] == names
    lines = {axes.get_ylabel(): axes.get_lines() for axes in figure.axes}
    assert len(lines["loss"][0].get_xdata()) == 40
    if is_evaluated:  # the dev set's loss, and the best update in every panel
        dev = lines["loss"][2]
        np.testing.assert_array_equal(dev.get_xydata(), np.stack([steps, 1 / steps], 1))
        assert all(line[-1].get_xdata()[0] == 20 for line in lines.values())


@pytest.mark.parametrize("is_late", [True, False])
def test_fall_of_the_rate_after_warm_up_is_explained(is_late):
    steps = np.arange(1.0, 41)
    decay = 1e-4 * (1 - (steps if is_late else np.maximum(steps - 10, 0)) / 50)
    rates = np.where(steps <= 10, 1e-5 * steps, decay)
    updates = {"update_step": steps, "loss": steps, "gradient_norm": steps}
    figure = plots.draw_run(updates | {"learning_rate": rates}, {}, "", "run")
    texts = [text.get_text() for text in figure.axes[-1].texts]
    expected = ["end of warm-up: the decay counts from update 0"]
    assert texts == (expected if is_late else [])


def test_label_defaults_to_the_folders_name(tmp_path, two_runs, monkeypatch):
    drawn = mock.Mock(side_effect=plots.draw_losses)
    monkeypatch.setattr(plots, "draw_losses", drawn)
    plot = str(tmp_path / "loss.svg")
    assert plot_loss.main(["--output_dirs", two_runs, "--plot", plot]) == 0
    assert drawn.call_args.args[1] == ["with", "without"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "Received: .*csv, which does not exist. Name the --output_dir of a run"),
        ("", "must be a table with the columns .* Received: a file that is empty or n"),
        ("update_step,los\n1,0.5\n", "update_step, los, without loss"),
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
        ("--output_dirs=a --plot=a.jpeg2000", "plot` must end in .png, .svg or .pdf"),
        ("--output_dirs=a --plott=a.png", "--plot"),
        ("--output_dirs=a, --plot=a.png", "names separated by single commas"),
    ],
)
def test_an_unfit_flag_is_refused(refusal, tmp_path, monkeypatch, flags, sentence):
    monkeypatch.chdir(tmp_path)
    assert re.search(sentence, refusal(plot_loss.main, *flags.split()))
