"""Losses over the whole batch on two replicas, whose numbers of examples differ."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import running, whole_batch_program

pytestmark = pytest.mark.slow

v1 = tf.compat.v1
_PROGRAM = running.HELPERS / "whole_batch_program.py"


def _at_once(kind: str) -> dict[str, np.ndarray]:
    """Trains on one device, with the joined batches at once."""
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        iterator = v1.data.make_one_shot_iterator(
            whole_batch_program.dataset(kind, True)
        )
        x, replica = iterator.get_next()
        outputs = whole_batch_program.towers(x)
        loss = whole_batch_program.loss_fn(outputs)
        for i in range(2):  # of each replica's own examples, weighted by their number
            rows = tf.where(tf.equal(replica, i))[:, 0]
            share = tf.size(rows) / tf.size(replica)
            own = tuple(tf.gather(each, rows) for each in outputs)
            loss += tf.cond(
                share > 0,
                lambda own=own: whole_batch_program.loss_fn(own),
                lambda: tf.constant(0.0),
            ) * tf.cast(share, tf.float32)
        train_op = whole_batch_program.train_op_of(loss)
        with v1.train.SingularMonitoredSession() as session:
            while not session.should_stop():
                session.run(train_op)
                variables = v1.trainable_variables()
                values = session.raw_session().run(variables)
        return {v.op.name: x for v, x in zip(variables, values, strict=True)}


def _run(kind, folder, *rows) -> list[running.Done]:
    command = (_PROGRAM, kind, folder, *rows)
    if kind == "mirrored":
        return [running.run(*command)]
    with running.cluster(command, jobs=("worker", "worker")) as tasks:
        return [task.wait() for task in tasks]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        # A batch in which one replica has no examples.
        pytest.param("mirrored", (), marks=pytest.mark.once),
        # One of two workers runs out of memory after the other has its outputs.
        ("multi_worker", (9, 2)),
    ],
)
def test_two_replicas_train_as_one_device_with_the_batch_at_once(kind, rows, tmp_path):
    tasks = _run(kind, tmp_path, *rows)
    assert [task.returncode for task in tasks] == [0] * len(tasks)
    ours = json.loads(tasks[0].stdout.splitlines()[-1])
    assert ours.pop("global_step") == 3
    theirs = _at_once(kind)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, err_msg=name)
    if rows:
        count = json.loads((tmp_path / "micro_batches-worker-1.json").read_text())
        assert count["micro_batches"] == 4
