"""The core works as well with reference variables in v1 control flow."""

import pytest

from tests.helpers.processes import running

_FOLDER = running.ROOT / "tests" / "estimator_accum"
# A test of what every update needs.
_SHORT = {
    "test_train_op.py": "state_table or inside_apply_gradients",
    "test_change.py": "cut_are and clip_by",
    "test_recompute.py": "without_bit and not branch and not wrap and _embedding",
    "hooks/test_hooks.py": "stopped_in_mid_window",
}
# A test for each part that is built differently: variables and their rows, the
# `tf.cond` of the boundary, two of them, restored windows, recomputed layers and the
# loops in them, reports, the retry after running out of memory, writes of a micro-batch.
_TESTS = {
    "test_train_op.py": "state_table or two_thousand or rows_of_the_window "
    "or mixed_dtypes or inside_apply_gradients or two_train_ops or fails_leaves",
    "test_change.py": "weights_are_those and (v1 or reverse or none_replaced) or "
    "cut_are and clip_by or refused",
    "test_equivalence.py": "numpy or clip_norm or weights_and_slots and Momentum-",
    "test_recompute.py": "without_bit and not branch and (_batch_norm or not wrap "
    "and (_dropout or _embedding or loop_with_a_variable))",
    "hooks/test_hooks.py": "stopped_in_mid_window or have_a_row or just_ends",
    "microbatch/test_memory.py": "failures_anywhere",
    "microbatch/test_inside_model_fn.py": "clipping_schedules or batch_normalization "
    "or loss_scale",
    "microbatch/test_estimators.py": "canned_estimators_train",
}


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(_SHORT, id="every_update"),
        pytest.param(_TESTS, id="every_part", marks=pytest.mark.daily),
    ],
)
def test_the_core_works_after_disable_v2_behavior(tests):
    files = [_FOLDER / file for file in tests]
    words = zip(files, tests.values(), strict=True)
    names = " or ".join(f"({file.stem} and ({word}))" for file, word in words)
    arguments = ["-q", "-p", "tests.helpers.models.v1_behavior", "-k", names]
    done = running.run("-m", "pytest", *arguments, *files, cwd=running.ROOT)
    assert done.returncode == 0, done.output[-4000:]
