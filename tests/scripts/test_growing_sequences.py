"""scripts/benchmarks/growing_sequences.py: real limits, few updates."""

import csv
import json

import pytest

from scripts.benchmarks import growing_sequences
from tests.helpers import running


@pytest.mark.slow
@pytest.mark.once
def test_auto_has_the_losses_of_a_fixed_count_that_fits(tmp_path, capsys, monkeypatch):
    train_in_process, fixed_counts = growing_sequences._train_in_process, []

    def train(micro_batches, flags):
        if micro_batches == "auto":
            return train_in_process(micro_batches, flags)
        fixed_counts.append(micro_batches)
        if len(fixed_counts) == 1:  # out of memory: more are tried
            return None
        # Without a limit, which does not change the losses of a run that fits.
        script = "scripts/benchmarks/growing_sequences.py"
        done = running.run(script, "--child", micro_batches, *lengths)
        return json.loads(done.stdout.splitlines()[-1])

    monkeypatch.setattr(growing_sequences, "_train_in_process", train)
    lengths = ["--lengths", "16:2", "128:1"]
    flags = [f"--output_dir={tmp_path}", "--limit_mb=60", *lengths]
    assert growing_sequences.main(flags) == 0
    assert "examples/s, waits included" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "growing.csv").read_text().splitlines()))
    auto = [row for row in rows if row["run"] == "auto"]
    fixed = [row for row in rows if row["run"].startswith("fixed ")]
    assert len(auto) == len(fixed) == 3
    assert auto[0]["micro_batches"] == "1"  # short sequences fit
    assert 1 < int(auto[-1]["micro_batches"]) < int(fixed[0]["micro_batches"])
    for ours, theirs in zip(auto, fixed, strict=True):
        assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), abs=1e-3)
    assert (tmp_path / "growing.png").read_bytes().startswith(b"\x89PNG")
