"""Clipping of sums by their norm."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import get_windows, make_accumulating_train_op, microbatch_model_fn
from estimator_accum.graph.walks import ancestors
from tests.helpers.models.interfaces import (
    after_each,
    fed_gradients,
    sgd,
    start_session,
)
from tests.helpers.models.microbatch_runs import spec_of

pytestmark = pytest.mark.usefixtures("fresh_graph", "graph_optimizer")
v1 = tf.compat.v1


def _norm_of(loss):
    """Returns the norm that a window of one micro-step reports."""
    train_op = make_accumulating_train_op(loss, sgd(), 1)
    (window,) = get_windows()
    with start_session() as session:
        return session.run([window.gradient_norm, train_op])[0]


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_squares_may_leave_the_range_of_half_precision(dtype):
    """300 ** 2 is beyond float16's largest number."""
    x = v1.get_variable("x", initializer=tf.zeros([2], dtype))
    loss = tf.reduce_sum(x * tf.constant([300.0, 400.0], dtype))
    np.testing.assert_allclose(_norm_of(loss), 500.0, rtol=1e-2)


def test_a_row_that_is_looked_up_twice_counts_with_the_sum_of_its_slices():
    table = v1.get_variable("table", [4, 1])
    loss = tf.reduce_sum(tf.gather(table, [2, 0, 2])[:, 0] * [3.0, 1.0, 1.0])
    assert _norm_of(loss) == pytest.approx((4**2 + 1**2) ** 0.5)


@pytest.mark.parametrize("size", [0.3, 1.0, 1e3, 1e25])
@pytest.mark.parametrize("steps", [1, 2])
def test_clipping_is_tensorflows_own_to_the_bit(size, steps):
    """An infinite norm makes all values NaN."""
    fed, variables, loss = fed_gradients([0.0, 0.0], 0.0)
    train_op = make_accumulating_train_op(loss, sgd(), steps, clip_norm=1.5)
    mean = [np.float32([0.3, -0.7]) * np.float32(size), np.float32(1.1 * size)]
    clipped, _ = tf.clip_by_global_norm([tf.constant(value) for value in mean], 1.5)
    feeds = [dict(zip(fed, mean, strict=True))] * steps
    values = after_each(train_op, feeds, [*variables, *clipped])[-1]
    for ours, theirs in zip(values[:2], values[2:], strict=True):
        np.testing.assert_array_equal(ours, -theirs)


def test_rows_are_cleared_after_they_were_read():
    """Checks the order in the graph, since a run would rarely show a race."""

    def model_fn(features, mode):
        table = v1.get_variable("table", [4, 1])
        loss = tf.reduce_mean(tf.gather(table, features))
        return spec_of(mode, loss, make_accumulating_train_op(loss, sgd(), 1))

    rows = v1.data.make_one_shot_iterator(tf.data.Dataset.from_tensors([2, 1]))
    v1.train.get_or_create_global_step()
    spec = microbatch_model_fn(model_fn, 2)(
        rows.get_next(), mode=tf.estimator.ModeKeys.TRAIN
    )
    operations = spec.train_op.graph.get_operations()

    def users(handle, kind):
        return [
            operation
            for operation in operations
            if operation.type == kind and operation.inputs[0].op.name == handle
        ]

    (read,) = users("table/accumulator", "ResourceGather")
    cleared = [
        operation
        for handle in ("table/accumulator", "table/accumulator_rows")
        for operation in users(handle, "ResourceScatterUpdate")
        if operation in ancestors([spec.train_op])
    ]
    assert len(cleared) == 2
    assert all(read in ancestors([operation]) for operation in cleared)
    (added,) = users("table/accumulator", "ResourceScatterAdd")
    marked = users("table/accumulator_rows", "ResourceScatterUpdate")
    # A failure in between loses no row.
    assert any(
        operation in ancestors([added])
        for operation in marked
        if operation not in cleared
    )


@pytest.mark.once
def test_slices_may_be_of_embeddings_alone():
    table = v1.get_variable("table", [4, 1], initializer=v1.zeros_initializer())
    words = v1.placeholder_with_default([2, 0, 2], [3])
    loss = tf.reduce_sum(tf.gather(table, words)[:, 0] * [2.0, 1.0, 2.0])
    options = {"clip_norm": 1.5, "sparse_norm": "slices"}
    train_op = make_accumulating_train_op(loss, sgd(), 2, **options)
    session = start_session()
    for _ in range(2):
        session.run(train_op)
    # As of one batch with six slices, each half of these: a norm of 3 / sqrt(2).
    assert session.run(table)[2, 0] == pytest.approx(-4 * 1.5 * 2**0.5 / 3)
