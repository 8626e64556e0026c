"""scripts/benchmarks/memory_table.py on small batches."""

import csv
import functools

import pytest

from scripts.benchmarks import memory_table


@pytest.mark.slow
@pytest.mark.once
def test_peak_memory_falls_with_the_number_of_micro_batches(tmp_path, monkeypatch):
    # Measures the plain Estimator once: its later runs only correct for speed changes.
    monkeypatch.setattr(memory_table, "_run", functools.cache(memory_table._run))
    sizes = ["--batch_size=160", "--updates=1", "--micro_batches", "16"]
    flags = [f"--output_dir={tmp_path}", "--models", "conv", *sizes]
    assert memory_table.main(flags) == 0
    rows = list(csv.DictReader((tmp_path / "memory.csv").read_text().splitlines()))
    assert [row["micro_batches"] for row in rows] == ["0", "16"]
    plain, cut = [float(row["peak_mb"]) for row in rows]
    assert cut < plain / 3
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
