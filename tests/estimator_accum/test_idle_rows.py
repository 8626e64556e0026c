"""On a CPU a sparse accumulator takes memory only for touched rows."""

import os
import sys

import numpy as np
import tensorflow as tf

from estimator_accum import make_accumulating_train_op
from estimator_accum._graph import idle_zeros
from tests.helpers.processes import running

v1 = tf.compat.v1
_ROWS, _WIDTH = 30_000, 1_024
_TABLE_BYTES = 4 * _ROWS * _WIDTH


def _resident_bytes() -> int:
    """Returns resident bytes without mapped files: libraries load as they are used."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def _bytes_of_accumulating() -> int:
    """Trains an embedding table for two windows, with two rows per micro-step.

    Returns:
        Bytes that the process takes, without TensorFlow's import and the table.
    """
    before = _resident_bytes()
    with tf.Graph().as_default(), v1.Session() as session:
        ids = v1.placeholder(tf.int32, [2])
        # A stateful initializer, which the session cannot fold into a constant and
        # keep.
        table = v1.get_variable(
            "table", initializer=lambda: tf.random.uniform([_ROWS, _WIDTH])
        )
        loss = tf.reduce_mean(tf.square(tf.gather(table, ids)))
        optimizer = v1.train.GradientDescentOptimizer(0.1)
        train_op = make_accumulating_train_op(loss, optimizer, 3)
        session.run(v1.global_variables_initializer())
        for i in range(6):
            session.run(train_op, {ids: [i, i + 1]})
        return _resident_bytes() - before - _TABLE_BYTES


def test_untouched_rows_take_no_memory():
    # A new process, because TensorFlow would reuse memory that this one has freed.
    code = (
        "from tests.estimator_accum import test_idle_rows as tests; "
        "print(tests._bytes_of_accumulating())"
    )
    done = running.run("-c", code, PYTHONPATH=os.pathsep.join(sys.path))
    taken = int(done.stdout.split()[-1])
    assert -_TABLE_BYTES / 2 < taken < _TABLE_BYTES / 2


def test_idle_zeros_are_zeros_where_the_memory_was_in_use():
    shape = [64, 64]  # too small for pages of its own
    with tf.Graph().as_default(), v1.Session() as session:
        used = tf.reduce_sum(tf.random.uniform(shape, 1.0, 2.0))
        values = idle_zeros(shape, tf.float32)
        for _ in range(20):
            session.run(used)
            np.testing.assert_array_equal(session.run(values), np.zeros(shape))
