"""Norms and clipping of sums, and the order in which sparse sums are taken."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum._accumulators import (
    add_up as add,
    commit,
    create_accumulator,
    take_window,
)
from estimator_accum._gradients import half_squared_norms, scale_and_clip
from estimator_accum._graph import ancestors
from tests.helpers.models.interfaces import start_session

pytestmark = pytest.mark.usefixtures("fresh_graph", "graph_optimizer")
v1 = tf.compat.v1


def _run(tensors):
    with v1.Session() as session:
        return session.run(tensors)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_squares_may_leave_the_range_of_half_precision(dtype):
    """300 ** 2 is beyond float16's largest number."""
    found = _run(half_squared_norms([tf.constant([300.0, 400.0], dtype)], tf.float32))
    np.testing.assert_allclose(found, [125000.0], rtol=1e-2)


def test_a_row_that_is_looked_up_twice_counts_with_the_sum_of_its_slices():
    slices = tf.IndexedSlices(tf.constant([[3.0], [1.0], [1.0]]), [2, 0, 2], [4, 1])
    assert _run(half_squared_norms([slices], tf.float32)) == [(4**2 + 1**2) / 2]


@pytest.mark.parametrize("norm", [0.5, 2.0, 8.0, float("inf"), float("nan")])
@pytest.mark.parametrize("factor", [None, 0.5])
def test_clipping_is_tensorflows_own_to_the_bit(norm, factor):
    """Any NaN or infinity makes all values NaN, not only its own."""
    sums = [tf.constant([0.3, -0.7]), tf.constant(1.1)]
    norm = tf.constant(norm)
    scale = None if factor is None else tf.constant(factor)
    ours, ours_norm = scale_and_clip(sums, scale, 1.5, norm)
    mean = [value * (factor or 1.0) for value in sums]
    theirs, theirs_norm = tf.clip_by_global_norm(mean, 1.5, norm * (factor or 1.0))
    for one, other in zip(*_run([[*ours, ours_norm], [*theirs, theirs_norm]])):
        if factor is None:
            np.testing.assert_array_equal(one, other)
        else:  # one product instead of two
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_rows_are_cleared_after_they_were_read():
    """Checks the order in the graph, since a run would rarely show a race."""
    accumulator = create_accumulator("table", tf.TensorShape([4, 1]), tf.float32, True)
    slices = tf.IndexedSlices(tf.constant([[3.0]]), tf.constant([2]))
    is_first = tf.constant(True)
    sums = add([accumulator], [slices], is_first)
    marked, added = commit([accumulator], sums, is_first)
    assert marked in ancestors([added])  # a failure in between loses no row
    with tf.control_dependencies([added]):
        (taken,), cleared = take_window([accumulator])
    assert taken.values.op.type == "ResourceGather"
    assert all(taken.values.op in ancestors([each]) for each in cleared)
    with start_session() as session:
        values, rows, _ = session.run([taken.values, taken.indices, cleared])
        assert (values.tolist(), rows.tolist()) == ([[3.0]], [2])
        assert not np.any(session.run(accumulator.total))
        assert not np.any(session.run(accumulator.touched))
