"""Facts that every micro-batch checks."""

import pytest
import tensorflow as tf

from estimator_accum.rows.guards import EqualEntries, LastEntry

_INDICES = tf.constant([[0, 0], [0, 3], [2, 1]], tf.int64)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize(
    "others, holds, holds_unsplit",
    [
        ([[0, 2], [0, 4], [2, 0]], True, True),
        ([[0, 2], [2, 4], [2, 0]], False, True),
        ([[0, 2], [2, 0]], False, False),
        ([[0, 2]], False, False),  # which one would be repeated for all entries
    ],
)
def test_sparse_tensors_must_have_as_many_entries_of_each_example(
    others, holds, holds_unsplit, is_whole
):
    guard = EqualEntries(_INDICES, tf.constant(others, tf.int32))
    result = guard.holds(tf.constant(3, tf.int64), tf.constant(is_whole))
    assert bool(result) == (holds_unsplit if is_whole else holds)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize(
    "others, holds, holds_unsplit",
    [
        ([0, 2, 2, 3], True, True),
        ([0, 1, 2, 3], False, True),
        ([0, 2, 2, 4], False, False),
    ],
)
def test_ragged_tensors_must_have_as_many_entries_of_each_example(
    others, holds, holds_unsplit, is_whole
):
    guard = EqualEntries(tf.constant([0, 2, 2, 3], tf.int64), tf.constant(others))
    result = guard.holds(tf.constant(3, tf.int64), tf.constant(is_whole))
    assert bool(result) == (holds_unsplit if is_whole else holds)


@pytest.mark.parametrize(
    "rows, is_last, holds",
    [(3, True, True), (4, True, False), (4, False, True)],
)
def test_the_last_row_of_a_batch_must_have_an_entry(rows, is_last, holds):
    rows = tf.constant(rows, tf.int64)
    guard = LastEntry(_INDICES[:, 0], rows, tf.constant(is_last))
    assert bool(guard.holds(rows, tf.constant(True))) == holds
