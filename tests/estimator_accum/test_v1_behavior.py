"""The core works as well with reference variables and v1 control flow."""

import pathlib

import pytest
import running

_FOLDER = pathlib.Path(__file__).parent
# What each of these files asks where variables, the `tf.cond` of the boundary, sparse
# sums or the retry after running out of memory are made otherwise.
_TESTS = {
    "test_train_op.py": "twelve or state_table or two_thousand or rows_of_the_window "
    "or mixed_dtypes or inside_apply_gradients or two_train_ops or fails_leaves",
    "test_equivalence.py": "adam or momentum or schedule or numpy or clip_norm",
    "test_hooks.py": "stopped_in_mid_window or partial_window_is_divided "
    "or without_accumulation_resumes or have_a_row_an_update",
    "test_microbatch_memory.py": "comes_late or 200_failures",
    "test_microbatch_train_op.py": "the_batchs or token_weighted or batch_normalization "
    "or loss_scale",
    "test_microbatch_estimators.py": "two_train_ops or canned",
}


@pytest.mark.once
@pytest.mark.slow
def test_the_core_works_after_disable_v2_behavior():
    for file, names in _TESTS.items():
        arguments = ["-q", "-p", "v1_behavior", "-k", names, _FOLDER / file]
        done = running.run("-m", "pytest", *arguments, cwd=_FOLDER.parent)
        assert done.returncode == 0, done.output[-4000:]
