"""scripts/growing_sequences.py: real limits, few updates."""

import csv
import pathlib
import subprocess
import sys

import pytest

_SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "growing_sequences.py"


def _run(*arguments):
    return subprocess.run(
        [sys.executable, str(_SCRIPT), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.slow
@pytest.mark.once
def test_auto_and_the_fixed_count_that_survives_have_the_same_losses(tmp_path):
    lengths = ["16:6", "128:2"]
    done = _run(f"--output_dir={tmp_path}", "--limit_mb=60", "--lengths", *lengths)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "examples/s, waits included" in done.stdout
    with open(tmp_path / "growing.csv") as file:
        rows = list(csv.DictReader(file))
    auto = [row for row in rows if row["run"] == "auto"]
    fixed = [row for row in rows if row["run"].startswith("fixed ")]
    assert len(auto) == len(fixed) == 8
    assert auto[0]["micro_batches"] == "1"  # short sequences fit
    assert 1 < int(auto[-1]["micro_batches"]) <= int(fixed[0]["micro_batches"])
    for ours, theirs in zip(auto, fixed, strict=True):
        assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), abs=1e-3)
    assert (tmp_path / "growing.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--output_dir must name a folder"),
        (["--lengths", "16"], "must be tokens:updates, such as 16:100. Received: '16'"),
        (["--lengths", "0:3"], "must be tokens:updates, such as 16:100. Received: '0"),
    ],
)
def test_flags_of_growing_sequences_are_checked(arguments, sentence):
    done = _run(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
