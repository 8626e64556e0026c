"""scripts/quickstart_demo.py: its refusals, and that its model really learns."""

import functools
import os
import re
import subprocess

import numpy as np
import pandas as pd
import pytest

from estimator_accum.programs.lock import locked
from scripts import quickstart_demo
from tests.helpers.processes import running

pytestmark = pytest.mark.once


def test_folder_that_another_demo_writes_to_is_refused(refusal, tmp_path):
    with locked(tmp_path):
        message = refusal(quickstart_demo.main, f"--output_dir={tmp_path}")
    assert "A folder must be of one run at a time. Received: " in message


def test_part_that_fails_ends_the_demo_with_its_code(tmp_path, monkeypatch):
    (tmp_path / "loss.png").write_text("of a demo before")
    (tmp_path / "with_accumulation").mkdir()

    def fail(command, **options):
        raise subprocess.CalledProcessError(7, command)

    monkeypatch.setattr(quickstart_demo.subprocess, "run", fail)
    assert quickstart_demo.main(["--output_dir", str(tmp_path)]) == 7
    left = [name for name in os.listdir(tmp_path) if name[0] != "."]
    assert left == ["data"]  # a failed demo leaves no result


@pytest.mark.slow
def test_demo_learns_and_accumulation_changes_nothing(tmp_path, monkeypatch, capsys):
    shorter = functools.partial(quickstart_demo.write_demo_data, train=1600, dev=200)
    monkeypatch.setattr(quickstart_demo, "write_demo_data", shorter)
    monkeypatch.setenv("PYTHONPATH", str(running.ROOT))
    demo = tmp_path / "a demo, once"
    assert quickstart_demo.main(["--output_dir", str(demo)]) == 0
    *_, table_with, table_without, _, plot = capsys.readouterr().out.splitlines()
    assert plot == f"plot: {demo / 'loss.png'}"
    assert (demo / "loss.png").stat().st_size > 10_000
    for line in (table_with, table_without):
        batch, updates, accuracy, correlation = re.split(r"  +", line)[1:]
        assert (batch, updates) == ("32", "400")
        assert float(accuracy) > 0.7
        assert float(correlation) > 0.5
    folders = [demo / folder for folder in quickstart_demo.RUNS]
    ours, theirs = (pd.read_csv(each / "train_metrics.csv") for each in folders)
    np.testing.assert_array_equal(ours["examples"], theirs["examples"])
    # After that the loss falls, and rounding grows.
    np.testing.assert_allclose(ours["loss"][:80], theirs["loss"][:80], atol=1e-5)
