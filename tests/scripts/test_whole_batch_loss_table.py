"""scripts/benchmarks/whole_batch_loss_table.py: a small run, and the exit code."""

import csv
import json

import numpy as np
import pytest

from scripts.benchmarks import whole_batch_loss_table
from scripts.benchmarks.plan_table import EXACT_BYTES
from tests.helpers import running

_FLAGS = ["--batch_size=16", "--micro_batch_size=4", "--tokens=3", "--updates=3"]
_FLAGS += ["--rounds=1"]


@pytest.mark.once
@pytest.mark.slow
def test_replicas_train_as_one_device_does(tmp_path):
    sizes = {"batch_size": 16, "micro_batch_size": 4, "tokens": 3, "updates": 3}
    weights = []
    for way in ("micro-batches", "two replicas"):
        path = tmp_path / f"{way}.npz"
        job = json.dumps(sizes | {"way": way, "weights": str(path)})
        done = running.run(whole_batch_loss_table.__file__, "--child", job)
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["peak"] > 0 < found["secs"]
        weights.append(np.load(path))
    one, two = weights
    assert one["global_step"] == two["global_step"] == 3
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("memory", "time", "difference", "code"),
    [
        (1.15, 1.5, 1e-5, 0),
        (1.16, 1.0, 0.0, 1),
        (1.0, 1.51, 0.0, 1),
        (1.0, 1.0, 1.1e-5, 1),
    ],
)
def test_what_is_beyond_the_bounds_is_exit_code_1(
    memory, time, difference, code, tmp_path, monkeypatch
):
    outputs = 2 * 4 * 128 * 16  # bytes

    def run(job, settings=None):
        is_cut = job["way"] in ("micro-batches", "two replicas")
        np.savez(job["weights"], kernel=np.array([difference if is_cut else 0.0]))
        alone = 1e9 - outputs
        if settings == EXACT_BYTES:
            return {"peak": 1e9 * memory if job["way"] == "micro-batches" else alone}
        return {"secs": 2.0 * (time if is_cut else 1.0)}

    monkeypatch.setattr(whole_batch_loss_table, "_run", run)
    path = tmp_path / "table.csv"
    assert whole_batch_loss_table.main([*_FLAGS, f"--csv={path}"]) == code
    rows = list(csv.DictReader(path.read_text().splitlines()))
    ways = ["at once", "micro-batches", "two replicas"]
    assert [row["way"] for row in rows] == ways
    assert [float(row["time_ratio"]) for row in rows] == [1, time, time]
    assert float(rows[1]["memory_ratio"]) == memory


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        (
            "--micro_batch_size=3",
            "--micro_batch_size must divide half of --batch_size.",
        ),
        ("--updates=2", "--updates must be above 2, which are not timed."),
    ],
)
def test_flags_that_do_not_fit_are_refused(flag, sentence, capsys):
    assert whole_batch_loss_table.main([*_FLAGS, flag]) == 2
    assert sentence in capsys.readouterr().err
