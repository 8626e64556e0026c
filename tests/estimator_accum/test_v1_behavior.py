"""The core's tests hold as well with reference variables and v1 control flow."""

import pathlib
import subprocess
import sys

import pytest

_FOLDER = pathlib.Path(__file__).parent


_FILES = (
    "test_train_op.py",
    "test_equivalence.py",
    "test_hooks.py",
    "test_microbatch_memory.py",
    "test_microbatch_train_op.py",
    "test_microbatch_estimators.py",
)


@pytest.mark.once
@pytest.mark.slow
def test_the_core_works_after_disable_v2_behavior():
    files = [_FOLDER / file for file in _FILES]
    is_told_by_float64 = "not (big_batch and float32)"
    arguments = ["-q", "-p", "v1_behavior", "-k", is_told_by_float64, *files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        check=False,
        cwd=_FOLDER.parent,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:]
