"""The core works as well with reference variables and v1 control flow."""

import pathlib

import pytest
import running

_FOLDER = pathlib.Path(__file__).parent
# A test for each part that is built differently: variables and their rows, the
# `tf.cond` of the boundary, two of them, restored windows, reports, the retry after
# running out of memory, writes of a micro-batch.
_TESTS = {
    "test_train_op.py": "state_table or two_thousand or rows_of_the_window "
    "or mixed_dtypes or inside_apply_gradients or two_train_ops or fails_leaves",
    "test_equivalence.py": "adam or momentum or numpy or clip_norm",
    "test_hooks.py": "stopped_in_mid_window or have_a_row or just_ends",
    "test_microbatch_memory.py": "failures_anywhere",
    "test_microbatch_train_op.py": "clipping_schedules or batch_normalization "
    "or loss_scale",
    "test_microbatch_estimators.py": "canned_estimators",
}


@pytest.mark.once
@pytest.mark.slow
def test_the_core_works_after_disable_v2_behavior():
    names = " or ".join(f"({file[:-3]} and ({k}))" for file, k in _TESTS.items())
    arguments = ["-q", "-p", "v1_behavior", "-k", names]
    files = [_FOLDER / file for file in _TESTS]
    done = running.run("-m", "pytest", *arguments, *files, cwd=_FOLDER.parent)
    assert done.returncode == 0, done.output[-4000:]
