"""Progress of evaluations or predictions."""

import logging

import pytest
import tensorflow as tf

from estimator_accum.programs.bars import BatchBar

pytestmark = pytest.mark.once


def _evaluate(bar):
    with tf.Graph().as_default():
        dataset = tf.data.Dataset.range(3)
        batch = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
        with tf.compat.v1.train.MonitoredSession(hooks=[bar]) as session:
            while not session.should_stop():
                session.run(batch)


def test_every_batch_of_every_evaluation_is_shown(every_line, capsys, caplog):
    caplog.set_level(logging.WARNING, "tensorflow.estimator_accum")
    bar = BatchBar("evaluation", 3)
    for _ in range(2):
        _evaluate(bar)
    lines = [line.rpartition(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == [f"evaluation: batch {n} of 3" for n in (1, 2, 3)] * 2


def test_a_short_evaluation_prints_nothing(capsys, caplog):
    caplog.set_level(logging.WARNING, "tensorflow.estimator_accum")
    _evaluate(BatchBar("evaluation", 3))
    assert capsys.readouterr().err == ""
