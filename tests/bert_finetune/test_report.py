"""The table and the picture at the end of a run."""

import ast
import csv
import logging
import os
import pathlib
import sys

import numpy as np
import pytest

from bert_finetune import report, report_plot
from bert_finetune.evaluations import EVALUATIONS
from bert_finetune.report_plot import limits, smoothed, write_plot
from bert_finetune.tasks import get_task

_COLUMNS = ["update_step", "global_step", "examples"]
_COLUMNS += ["learning_rate", "loss", "gradient_norm", "examples_per_sec"]


@pytest.fixture
def folder(tmp_path):
    """Folder of a run of 40 updates, evaluated after each 10."""
    random = np.random.default_rng(0)
    with open(tmp_path / "train_metrics.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        for n in range(1, 41):
            rate = "" if n == 1 else 1e-4 / n  # unknown once
            row = [n, 4 * n, 32 * n, rate, 1 / n + random.random(), n, n % 5]
            writer.writerow(row)
    with open(tmp_path / EVALUATIONS, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["update_step", "global_step", "eval_loss", "f1"])
        writer.writerows([n, 4 * n, 1 / n, n % 30 / 30] for n in (10, 20, 30, 40))
    return tmp_path


def test_metrics_have_a_row_each_and_a_column_for_each_dev_set():
    metrics = {"eval_accuracy": np.float32(0.123456), "eval_loss": 1.5}
    metrics |= {f"{name}_mismatched": 2 * value for name, value in metrics.items()}
    rows = report.metric_rows(get_task("mnli"), metrics)
    assert report.aligned([*rows, ["updates", "12"]]).splitlines() == [
        "MNLI      dev_matched  dev_mismatched",
        "accuracy       0.1235          0.2469",
        "loss           1.5000          3.0000",
        "updates            12",
    ]
    assert report.metric_rows(get_task("mnli"), {}) == []


def test_examples_per_second_are_those_of_the_median_update(folder):
    assert report._examples_per_sec(folder / "train_metrics.csv") == "2.0"


def test_file_with_two_links_counts_once(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "one").write_bytes(b"x" * 7)
    os.link(tmp_path / "one", tmp_path / "best" / "one")
    (tmp_path / "other").write_bytes(b"x" * 5)
    assert report.bytes_of(tmp_path) == 12


def test_peak_memory_is_that_of_this_process():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    rows = [line.split() for line in lines]
    [peak] = [int(row[1]) * 1024 for row in rows if row[0] == "VmHWM:"]
    assert report._peak_bytes()[""] == pytest.approx(peak, rel=0.2)


def test_smoothed_line_ends_where_its_window_would_be_cut():
    values = np.arange(100.0)
    places, means = smoothed(values)
    assert (places[0], places[-1]) == (2, 97)  # a window of 5
    np.testing.assert_allclose(means, values[2:-2])
    assert len(smoothed(np.ones(19))[1]) == 0
    places, _ = smoothed(np.ones(1000))
    assert (places[0], places[-1]) == (25, 974)  # of 51


@pytest.mark.parametrize(
    "values, share, expected",
    [
        ([2.0, 3.0], 1.0, (1.94, 3.06)),
        ([0.0] * 99 + [1.0] * 101 + [1000.0], 0.99, (-0.06, 1.06)),
        ([5.0, np.nan], 1.0, (4.7, 5.3)),
        ([0.0], 1.0, (-0.06, 0.06)),
        ([np.nan], 1.0, None),
    ],
)
def test_limits_are_those_of_the_data(values, share, expected):
    found = limits(np.array(values), share)
    assert found is expected or found == pytest.approx(expected)


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_picture_has_a_panel_for_each_series(is_evaluated, folder, monkeypatch):
    figures = []
    from matplotlib.figure import Figure

    save = Figure.savefig

    def savefig(figure, *args, **options):
        figures.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    if not is_evaluated:
        (folder / EVALUATIONS).unlink()
    assert write_plot(folder, "f1") == folder / "training.png"
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    [figure] = figures
    names = ["loss", "f1", "gradient norm", "learning rate"]
    if not is_evaluated:
        names.remove("f1")
    assert [axes.get_ylabel() for axes in figure.axes] == names
    lines = {axes.get_ylabel(): axes.get_lines() for axes in figure.axes}
    assert len(lines["loss"][0].get_xdata()) == 40
    if is_evaluated:  # the dev set's loss, and the best update in every panel
        loss = lines["loss"][2]
        assert loss.get_ydata().tolist() == [1 / n for n in (10, 20, 30, 40)]
        assert all(line[-1].get_xdata()[0] == 20 for line in lines.values())


def _plot(folder, has_trained=True) -> str:
    return report._plot(folder, "f1", has_trained)


def test_run_without_matplotlib_says_how_to_get_the_plot(folder, monkeypatch):
    monkeypatch.setattr(report_plot, "write_plot", write_plot)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert 'pip install "estimator-accum[plot]"' in _plot(folder)


def test_plot_that_cannot_be_drawn_is_one_line(folder, monkeypatch, caplog):
    monkeypatch.setattr(report_plot, "write_plot", write_plot)
    (folder / "train_metrics.csv").write_text("update_step\nx\n")
    with caplog.at_level(logging.WARNING, "tensorflow.bert_finetune"):
        assert _plot(folder) == "none"
    [record] = caplog.records
    assert "training.png could not be drawn: could not convert" in record.getMessage()


def test_only_a_run_that_has_trained_draws(folder):
    (folder / "training.png").touch()
    (folder / "train_metrics.csv").unlink()
    assert _plot(folder, has_trained=False) == str(folder / "training.png")


def test_matplotlib_is_imported_when_it_draws():
    tree = ast.parse(pathlib.Path(report_plot.__file__).read_text())
    imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    assert not any("matplotlib" in ast.unparse(each) for each in imports)
