"""Losses over the whole batch on two replicas, whose numbers of examples differ."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.processes import strategy_program

pytestmark = [pytest.mark.once, pytest.mark.slow]

v1 = tf.compat.v1


def _at_once(kind: str) -> tuple[dict[str, np.ndarray], float]:
    """Trains on one device; returns weights and the loss of the last joined batch."""
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        iterator = v1.data.make_one_shot_iterator(strategy_program.batches(kind, True))
        x, replica = iterator.get_next()
        outputs = strategy_program.towers(x)
        loss = joint = strategy_program.loss_fn(outputs)
        for i in range(2):  # of each replica's own examples, weighted by their number
            rows = tf.where(tf.equal(replica, i))[:, 0]
            share = tf.size(rows) / tf.size(replica)
            parts = tuple(tf.gather(output, rows) for output in outputs)
            loss += tf.cond(
                share > 0,
                lambda parts=parts: strategy_program.loss_fn(parts),
                lambda: tf.constant(0.0),
            ) * tf.cast(share, tf.float32)
        train_op = strategy_program.train_op_of(loss)
        with v1.train.SingularMonitoredSession() as session:
            while not session.should_stop():
                _, last = session.run([train_op, joint])
                variables = v1.trainable_variables()
                values = session.raw_session().run(variables)
        weights = {v.op.name: x for v, x in zip(variables, values, strict=True)}
        return weights, last


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        # A batch in which one replica has no examples.
        ("mirrored", []),
        # One of two workers runs out of memory after the other has its outputs.
        ("multi_worker", ["fits=9,2"]),
    ],
)
def test_two_replicas_train_as_one_device_with_the_batch_at_once(
    kind, options, tmp_path
):
    ours = strategy_program.result("whole_batch", kind, tmp_path, *options)
    assert ours["global_step"] == 3
    weights, loss = _at_once(kind)
    for name, value in weights.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, err_msg=name)
    if options:
        count = json.loads((tmp_path / "micro_batches-worker-1.json").read_text())
        assert count["micro_batches"] == 4
        at_end = float((tmp_path / "at_end").read_text())
        np.testing.assert_allclose(at_end, loss, rtol=1e-5)
