"""The report at the end of a run."""

import csv
import functools
import logging
import os
import pathlib
import sys
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import report
from bert_finetune.evaluations import EVALUATIONS
from bert_finetune.tasks import get_task
from estimator_accum.programs import report as end
from estimator_accum.programs.command_line import aligned
from estimator_accum.reports._memory import peak_bytes

pytestmark = pytest.mark.once
_COLUMNS = ["update_step", "global_step", "examples"]
_COLUMNS += ["learning_rate", "loss", "gradient_norm", "examples_per_sec"]


_draw = report._draw  # of all runs, conftest.py leaves it out


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Folder of a run of 40 updates, evaluated after each 10."""
    random = np.random.default_rng(0)
    monkeypatch.setattr(report, "_draw", _draw)
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
    assert aligned([*rows, ["updates", "12"]]).splitlines() == [
        "MNLI      dev_matched  dev_mismatched",
        "accuracy       0.1235          0.2469",
        "loss           1.5000          3.0000",
        "updates            12",
    ]
    assert report.metric_rows(get_task("mnli"), {}) == []


def test_examples_per_second_are_those_of_the_median_update(folder):
    path = folder / "train_metrics.csv"
    assert end.examples_per_sec(path) == "2.0"
    path.write_text("update_step,examples_per_sec\n1,\n2,3.0\n3\n")
    assert end.examples_per_sec(path) == "3.0"
    for damaged in (b"examples_per_sec\nfast\n", b"\xff\n", b""):
        path.write_bytes(damaged)
        assert end.examples_per_sec(path) == "none"
    path.unlink()
    assert end.examples_per_sec(path) == "none"


def test_file_with_two_links_counts_once(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "one").write_bytes(b"x" * 7)
    os.link(tmp_path / "one", tmp_path / "best" / "one")
    (tmp_path / "other").write_bytes(b"x" * 5)
    assert end.bytes_of(tmp_path) == 12


def test_a_file_that_vanishes_while_it_is_counted_does_not_count(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"x" * 7)
    folder = [(str(tmp_path), [], ["file", "gone"])]
    monkeypatch.setattr(os, "walk", lambda path: folder)
    assert end.bytes_of(tmp_path) == 7


def test_peak_memory_is_that_of_this_process():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    rows = [line.split() for line in lines]
    [peak] = [int(row[1]) * 1024 for row in rows if row[0] == "VmHWM:"]
    assert peak_bytes()["the process"] == pytest.approx(peak, rel=0.2)


@pytest.mark.parametrize("peak", [0, 5])
def test_a_peak_of_tensors_that_are_not_counted_is_left_out(peak, monkeypatch):
    info = mock.Mock(return_value={"peak": peak})
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", info)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])
    assert peak_bytes().get("the model") == (peak or None)


def _plot(folder, has_trained=True) -> str:
    draw = functools.partial(report._draw, folder, "CoLA", "f1")
    return end.plotted(folder / "training.png", draw if has_trained else None)


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_run_that_has_trained_draws_its_tables(is_evaluated, folder):
    if not is_evaluated:
        (folder / EVALUATIONS).unlink()
    assert _plot(folder) == str(folder / "training.png")
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")


def test_run_without_matplotlib_says_how_to_get_the_plot(folder, monkeypatch):
    for module in ("matplotlib.figure", "estimator_accum.programs.plots"):
        monkeypatch.setitem(sys.modules, module, None)
    assert 'pip install "estimator-accum[plot]"' in _plot(folder)


def test_plot_that_cannot_be_drawn_is_one_line(folder, caplog):
    (folder / "train_metrics.csv").write_text("update_step\nx\n")
    with caplog.at_level(logging.WARNING, "tensorflow.estimator_accum"):
        assert _plot(folder) == "none"
    [record] = caplog.records
    assert "training.png could not be drawn: " in record.getMessage()


def test_only_a_run_that_has_trained_draws(folder):
    (folder / "training.png").touch()
    (folder / "train_metrics.csv").unlink()
    assert _plot(folder, has_trained=False) == str(folder / "training.png")
