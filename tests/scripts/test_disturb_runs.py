"""disturb_runs.py: a signal and a full disk change nothing; faults are reported."""

import os
import shutil
import sys

import pytest

from scripts.experiments import disturb_runs


@pytest.mark.slow
@pytest.mark.once
def test_a_stopped_run_is_compared_with_a_quiet_one(tmp_path, capsys, monkeypatch):
    short = [sys.executable, "-m", "housing_example.main", "--train_updates=200"]
    monkeypatch.setattr(disturb_runs, "_commands", lambda _: {"housing": short})
    disks = int(os.geteuid() == 0)  # only root may mount one
    flags = ["--programs", "housing", "--signals=1", f"--full_disks={disks}"]
    folder = tmp_path / "disturbed"
    code = disturb_runs.main([*flags, f"--output_dir={folder}"])
    assert code == 0, capsys.readouterr().out
    assert f"1 signals, {disks} full disks, 0 faults" in capsys.readouterr().out
    quiet, stopped = folder / "housing" / "quiet", folder / "housing" / "stopped-1"
    metrics = stopped / "with_accumulation" / "train_metrics.csv"
    metrics.write_text(metrics.read_text().replace("\n3,", "\n4,"))
    (stopped / "litter").touch()
    shutil.rmtree(stopped / "without_accumulation")
    shutil.copytree(quiet / "with_accumulation", stopped / "without_accumulation")
    found = "\n".join(disturb_runs._differences(quiet, stopped))
    assert f"{stopped} holds ['litter']" in found
    assert f"{metrics} is not" in found
    assert "kernel in" in found
