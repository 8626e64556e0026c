"""The core's tests hold as well with reference variables and v1 control flow."""

import pathlib
import subprocess
import sys

import pytest

_FOLDER = pathlib.Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [
        "test_train_op.py",
        "test_equivalence.py",
        "test_hooks.py",
        "test_microbatch_memory.py",
        "test_microbatch_train_op.py",
        "test_microbatch_estimators.py",
    ],
)
def test_the_core_works_after_disable_v2_behavior(file):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "v1_behavior", _FOLDER / file],
        check=False,
        cwd=_FOLDER.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
