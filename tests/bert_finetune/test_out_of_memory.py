"""A real out-of-memory error: BERT under a limit that the plain Estimator exceeds."""

import json
import pathlib

import numpy as np
import pytest
import running

_PROGRAM = pathlib.Path(__file__).with_name("out_of_memory_program.py")


def _start(folder, kinds, **variables) -> running.Program:
    # Its kernels crash when memory runs out; and the others round in another way, which
    # Adam makes much of where a gradient is rounding only, as that of a key's bias.
    variables["TF_ENABLE_ONEDNN_OPTS"] = "0"
    # Sequences grow: memory runs out after updates that it allowed.
    return running.start(_PROGRAM, kinds, folder, "16:3", "128:3", **variables)


def _results(program) -> list[dict]:
    done = program.wait()
    assert done.returncode == 0
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.once
def test_auto_trains_to_the_end_where_the_plain_estimator_dies(tmp_path):
    limit = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "30"}
    with (
        _start(tmp_path / "limited", "plain,auto", **limit) as limited,
        _start(tmp_path / "unlimited", "plain") as unlimited,
    ):
        dies, auto = _results(limited)
        (unlimited,) = _results(unlimited)
    assert "died" in dies
    assert len(auto["out_of_memory_at"]) > 1
    assert min(auto["out_of_memory_at"]) >= 3  # when sequences have become longer
    assert auto["used"] == unlimited["used"] == [1]  # every example, once
    with np.load(auto["variables"]) as ours, np.load(unlimited["variables"]) as theirs:
        assert set(ours) == set(theirs)
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], atol=1e-5)
