"""disturb_runs.py: signals, kills or full disks change nothing; faults are reported."""

import os
import shutil

import pytest

from scripts.experiments import disturb_runs


@pytest.mark.daily
@pytest.mark.slow
@pytest.mark.once
def test_a_disturbed_run_is_compared_with_a_quiet_one(tmp_path, capsys, monkeypatch):
    short = disturb_runs._Program(["-m", "housing_example.main", "--train_updates=200"])
    updates = ["--train_updates=60", "--save_checkpoints_updates=10", "--workers=1"]
    updates += ["--effective_batch_size=20", "--max_restarts=9"]
    cluster = ["-m", "distributed.launch_local", *updates]
    programs = {"housing": short, "cluster": disturb_runs._Program(cluster, True)}
    monkeypatch.setattr(disturb_runs, "_programs", lambda _: programs)
    monkeypatch.setattr(disturb_runs, "_LONGEST_PAUSE_SECS", 0.1)
    monkeypatch.setattr(disturb_runs, "_CODES", {disturb_runs.signal.SIGKILL: -9})
    disks = int(os.geteuid() == 0)  # only root may mount one
    flags = ["--programs", "housing", "cluster", "--signals=2"]
    folder = tmp_path / "disturbed"
    flags += [f"--full_disks={disks}", f"--output_dir={folder}"]
    code = disturb_runs.main(flags)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert f"2 signals, {disks} full disks, 0 faults" in printed
    assert "restarting all tasks" in (folder / "cluster" / "log").read_text()
    quiet, disturbed = (folder / "housing" / name for name in ("quiet", "disturbed-1"))
    metrics = disturbed / "with_accumulation" / "train_metrics.csv"
    metrics.write_text(metrics.read_text().replace("\n3,", "\n4,"))
    (disturbed / "litter").touch()
    shutil.rmtree(disturbed / "without_accumulation")
    shutil.copytree(quiet / "with_accumulation", disturbed / "without_accumulation")
    text = "\n".join(disturb_runs._differences(quiet, disturbed))
    assert f"{disturbed} holds ['litter']" in text
    assert f"{metrics} is not" in text
    assert "kernel in" in text
