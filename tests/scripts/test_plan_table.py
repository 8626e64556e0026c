"""scripts/plan_table.py: the planner against encoders that really train."""

import csv
import pathlib
import subprocess
import sys

import pytest

_SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "plan_table.py"


def _run(*arguments):
    command = [sys.executable, str(_SCRIPT), *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
@pytest.mark.once
def test_planned_peaks_are_within_15_percent_of_measured_ones(tmp_path):
    table = tmp_path / "plan.csv"
    arguments = ["--encoders", "tiny", "mini", "--shapes", "8x64", "64x128"]
    done = _run(*arguments, f"--csv={table}")
    assert done.returncode == 0, done.stdout + done.stderr
    with open(table) as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    for row in rows:
        assert 0.85 <= float(row["planned_mb"]) / float(row["measured_mb"]) <= 1.15


def test_shapes_are_checked():
    done = _run("--shapes", "8")
    assert done.returncode == 2
    assert "must be examples x tokens, such as 8x128. Received: '8'" in done.stderr
