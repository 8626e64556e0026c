"""scripts/memory_table.py on small batches."""

import csv
import pathlib
import subprocess
import sys

import pytest

_SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "memory_table.py"


def _run(*arguments):
    command = [sys.executable, str(_SCRIPT), *map(str, arguments)]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
@pytest.mark.once
def test_peak_memory_falls_with_the_number_of_micro_batches(tmp_path):
    sizes = ["--batch_size=256", "--updates=2", "--micro_batches", 1, 8]
    done = _run(f"--output_dir={tmp_path}", "--models", "conv", *sizes)
    assert done.returncode == 0, done.stderr[-2000:]
    with open(tmp_path / "memory.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["micro_batches"] for row in rows] == ["0", "1", "8"]
    plain, whole, cut = [float(row["peak_mb"]) for row in rows]
    assert 0.8 < whole / plain < 1.2
    assert cut < plain / 3
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--output_dir must name a folder"),
        (["--updates=0"], "must be an integer >= 1. Received: '0'."),
    ],
)
def test_flags_that_do_not_fit_are_one_sentence(arguments, sentence):
    done = _run(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr
