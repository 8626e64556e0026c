"""A real out-of-memory error: BERT under a limit that the plain Estimator exceeds."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

_PROGRAM = pathlib.Path(__file__).with_name("out_of_memory_program.py")
# Sequences grow: memory runs out after hundreds of updates.
_LENGTHS = ["16:200", "64:4", "128:4"]


def _start(folder, kind, limit_mb=None):
    environment = dict(os.environ)
    if limit_mb is not None:
        environment |= {
            "TF_ENABLE_ONEDNN_OPTS": "0",  # whose kernels crash when memory runs out
            "TF_CPU_ALLOCATOR_USE_BFC": "true",
            "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(limit_mb),
        }
    return subprocess.Popen(
        [sys.executable, str(_PROGRAM), kind, str(folder), *_LENGTHS],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_auto_trains_to_the_end_where_the_plain_estimator_dies(tmp_path):
    tasks = [
        _start(tmp_path / "dies", "plain", limit_mb=30),
        _start(tmp_path / "auto", "auto", limit_mb=30),
        _start(tmp_path / "unlimited", "plain"),
    ]
    try:
        results = []
        for task in tasks:
            output, log = task.communicate(timeout=240)
            assert task.returncode == 0, log[-4000:]
            results.append(json.loads(output.splitlines()[-1]))
    finally:
        for task in tasks:
            task.kill()
    dies, auto, unlimited = results
    assert "died" in dies
    assert auto["micro_batches"] > 2  # it ran out more than once
    assert auto["used"] == unlimited["used"] == [1]  # every example, once
    with np.load(auto["variables"]) as ours, np.load(unlimited["variables"]) as theirs:
        assert set(ours) == set(theirs)
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], atol=1e-5)
