"""scripts/benchmarks/recompute_table.py: what is compared, and the exit code."""

import csv
import json

import pytest

from scripts.benchmarks import plan_table, recompute_table
from tests.helpers import running


@pytest.mark.once
def test_a_child_trains_and_reports_bytes_and_seconds():
    # Large enough that activations, not the update's temporaries, are the peak.
    job = json.dumps(["tiny", [64, 128], True])
    exact = plan_table.EXACT_BYTES
    done = running.run(recompute_table.__file__, "--child", job, **exact)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bytes"] > 0 and found["secs"] > 0


@pytest.mark.parametrize(
    ("memory", "time", "code"), [(0.4, 1.27, 0), (0.41, 1.0, 1), (0.3, 1.3, 1)]
)
def test_ratios_above_the_bounds_are_exit_code_1(
    memory, time, code, tmp_path, monkeypatch
):
    def run(encoder, shape, is_recomputed, *, for_bytes):
        assert (encoder, shape) == ("small", (8, 16))
        ratio = (memory if for_bytes else time) if is_recomputed else 1.0
        return {"bytes": 1e6 * ratio} if for_bytes else {"secs": ratio}

    monkeypatch.setattr(recompute_table, "_run", run)
    table = tmp_path / "table.csv"
    flags = ["--cases", "small 8x16", f"--csv={table}"]
    assert recompute_table.main(flags) == code
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert (float(row["memory_ratio"]), float(row["time_ratio"])) == (memory, time)
