"""four_runs.py, with two of the four runs, for a few updates."""

import pytest

from scripts.experiments import four_runs


def test_all_four_have_one_effective_batch():
    for run in four_runs.RUNS:
        steps = run.gradient_accumulation_steps
        assert run.workers * run.micro_batch_size * steps == 200
    assert four_runs.RUNS[3].label == "2 workers x 50, K=2"
    assert len({run.folder for run in four_runs.RUNS}) == 4


@pytest.mark.slow
@pytest.mark.once
def test_runs_are_compared_and_drawn(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(four_runs, "RUNS", four_runs.RUNS[:2])
    flags = [f"--output_dir={tmp_path / 'runs'}", "--train_updates=2"]
    assert four_runs.main(flags) == 0
    output = capsys.readouterr().out
    assert "largest difference of any weight from 1 worker x 200, K=1" in output
    assert (tmp_path / "runs" / "four_runs.png").stat().st_size > 10_000
    # Both runs are complete now. Then a weight that differs by more than is allowed:
    monkeypatch.setattr(four_runs, "_LARGEST_DIFFERENCE", -1.0)
    assert four_runs.main(flags) == 1


def test_run_that_fails_gives_its_exit_code(tmp_path):
    flags = [f"--output_dir={tmp_path / 'runs'}", "--train_updates=0"]
    assert four_runs.main(flags) == 2
