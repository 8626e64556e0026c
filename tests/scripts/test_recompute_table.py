"""scripts/benchmarks/recompute_table.py: what is compared, and the exit code."""

import csv
import json
import re

import pytest

from scripts.benchmarks import plan_table, recompute_table
from tests.helpers import running


@pytest.mark.once
@pytest.mark.parametrize("what", ["bytes", "secs", "weights"])
def test_a_child_trains_and_reports(what):
    # Large enough that activations, not the update's temporaries, are the peak.
    shape = [64, 128] if what == "bytes" else [2, 8]
    job = ["tiny", *shape, *([1, True] if what == "weights" else [2, True])]
    exact = plan_table.EXACT_BYTES
    child = json.dumps([what, *job])
    done = running.run(recompute_table.__file__, "--child", child, **exact)
    found = json.loads(done.stdout.splitlines()[-1])
    if what == "bytes":
        assert found["peak"] > found["activations"] > 0
    elif what == "secs":
        assert found > 0
    else:
        assert "output_weights:0" in found


@pytest.mark.parametrize(
    ("memory", "time", "planned", "digest", "code"),
    [
        (0.4, 1.27, 1.15, "same", 0),
        (0.41, 1.0, 1.0, "same", 1),
        (0.3, 1.3, 1.0, "same", 1),
        (0.3, 1.2, 1.16, "same", 1),
        (0.3, 1.2, 1.0, "other", 1),
    ],
)
def test_what_is_beyond_the_bounds_is_exit_code_1(
    memory, time, planned, digest, code, tmp_path, monkeypatch, capsys
):
    def run(what, encoder, examples, tokens, steps, recompute):
        assert (encoder, examples, tokens) == ("tiny", 8, 16)
        if what == "weights":
            return {"w:0": digest if recompute else "same", "b:0": "same"}
        assert steps in (1, 4)
        if what == "secs":
            return 2.0 * (time if recompute else 1.0)
        plan = recompute_table.memory_of(
            plan_table.make_config("tiny", dropout=True),
            8 // steps,
            16,
            is_accumulating=steps > 1,
            is_recomputed=recompute,
        )
        return {
            "peak": plan.peak / planned,
            "activations": 1e8 * (memory if recompute else 1),
        }

    monkeypatch.setattr(recompute_table, "_run", run)
    files = tmp_path / "table.csv", tmp_path / "table.png"
    flags = ["--cases", "tiny 8x16", "--micro_steps", "1", "4", "16"]
    flags += [f"--csv={files[0]}", f"--plot={files[1]}"]
    assert recompute_table.main(flags) == code
    rows = list(csv.DictReader(files[0].read_text().splitlines()))
    ways = [(row["micro_steps"], row["recompute"]) for row in rows]
    assert ways == [("1", "False"), ("1", "True"), ("4", "False"), ("4", "True")]
    assert [float(row["time_ratio"]) for row in rows] == [1, time, 1, time]
    assert {float(row["planned_over_peak"]) for row in rows} == {planned}
    assert files[1].read_bytes().startswith(b"\x89PNG")
    different = int(digest == "other")
    assert f"after 20 updates {different} of 2 variables" in capsys.readouterr().out


def test_the_first_number_of_micro_steps_is_one(capsys):
    assert recompute_table.main(["--micro_steps", "2", "4"]) == 2
    sentence = (
        r"--micro_steps must be integers >= 1 that begin with 1\. Received: \[2, 4\]"
    )
    assert re.search(sentence, capsys.readouterr().err)
