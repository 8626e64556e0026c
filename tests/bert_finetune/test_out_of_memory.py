"""A real out-of-memory error: BERT under a limit that the plain Estimator exceeds."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from cluster_tasks import environment, tf_configs

_PROGRAM = pathlib.Path(__file__).with_name("out_of_memory_program.py")
# Sequences grow: memory runs out after hundreds of updates.
_LENGTHS = ["16:200", "64:4", "128:4"]
_DEADLINE_SECS = 300


def _start(folder, kind, limit_mb=None, lengths=_LENGTHS, tf_config=None):
    variables = environment(tf_config)
    # Its kernels crash when memory runs out; and the others round in another way, which
    # Adam makes much of where a gradient is rounding only, as that of a key's bias.
    variables["TF_ENABLE_ONEDNN_OPTS"] = "0"
    if limit_mb is not None:
        variables |= {
            "TF_CPU_ALLOCATOR_USE_BFC": "true",
            "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit_mb),
        }
    return subprocess.Popen(
        [sys.executable, str(_PROGRAM), kind, str(folder), *lengths],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _results(tasks) -> list[dict]:
    """Waits for all; returns what they printed."""
    results = []
    try:
        for task in tasks:
            output, log = task.communicate(timeout=_DEADLINE_SECS)
            assert task.returncode == 0, log[-4000:]
            results.append(json.loads(output.splitlines()[-1]))
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    return results


def _assert_same_variables(ours, theirs):
    with np.load(ours["variables"]) as our, np.load(theirs["variables"]) as their:
        assert set(our) == set(their)
        for name in their:
            np.testing.assert_allclose(our[name], their[name], atol=1e-5)


@pytest.mark.slow
@pytest.mark.once
def test_auto_trains_to_the_end_where_the_plain_estimator_dies(tmp_path):
    dies, auto, unlimited = _results(
        [
            _start(tmp_path / "dies", "plain", limit_mb=30),
            _start(tmp_path / "auto", "auto", limit_mb=30),
            _start(tmp_path / "unlimited", "plain"),
        ]
    )
    assert "died" in dies
    assert len(auto["out_of_memory_at"]) > 1
    assert min(auto["out_of_memory_at"]) >= 200  # when sequences have become longer
    assert auto["used"] == unlimited["used"] == [1]  # every example, once
    _assert_same_variables(auto, unlimited)


@pytest.mark.slow
@pytest.mark.once
def test_two_workers_under_different_limits_train_as_one_without(tmp_path):
    lengths, limits_mb = ["32:3", "128:3"], (25, 60)
    tasks = [_start(tmp_path / "unlimited", "plain", lengths=lengths)]
    configs = tf_configs("worker", "worker")
    for limit_mb, config in zip(limits_mb, configs, strict=True):
        tasks.append(_start(tmp_path / "two", "auto", limit_mb, lengths, config))
    unlimited, first, second = _results(tasks)
    counts = [
        json.loads(path.read_text())["micro_batches"]
        for path in sorted((tmp_path / "two").glob("micro_batches-worker-*.json"))
    ]
    assert len(first["out_of_memory_at"]) > len(second["out_of_memory_at"])
    assert counts[0] > 2 ** len(second["out_of_memory_at"])
    _assert_same_variables(first, unlimited)
