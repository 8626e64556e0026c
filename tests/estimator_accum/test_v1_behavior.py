"""The core's tests hold as well with reference variables and v1 control flow."""

import pathlib
import subprocess
import sys

import pytest

_FOLDER = pathlib.Path(__file__).parent
_TESTS = (
    "test_train_op.py",
    "test_equivalence.py",
    "test_hooks.py::test_a_run_stopped_in_mid_window_goes_on_bit_for_bit",
    "test_hooks.py::test_apply_divides_a_partial_window_by_what_it_holds",
    "test_hooks.py::test_a_checkpoint_without_accumulation_resumes_with_it_and_back",
    "test_hooks.py::test_metrics_have_a_row_an_update_with_the_windows_values",
    "test_microbatch_memory.py",
    "test_microbatch_train_op.py",
    "test_microbatch_estimators.py",
)


@pytest.mark.once
@pytest.mark.slow
def test_the_core_works_after_disable_v2_behavior():
    tests = [str(_FOLDER / test) for test in _TESTS]
    optimizers = "not big_batch or adam or momentum"  # of those that equivalence takes
    arguments = ["-q", "-p", "v1_behavior", "-k", optimizers, *tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        check=False,
        cwd=_FOLDER.parent,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:]
