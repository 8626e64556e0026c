"""What is seen in the finished graph, before a session first runs it."""

import pytest
import tensorflow as tf

from estimator_accum import make_accumulating_train_op, make_accumulation_hooks
from tests.helpers.models.interfaces import after_each, fed_gradients, sgd

v1 = tf.compat.v1
pytestmark = pytest.mark.usefixtures("control_flow")


def _train_op(steps):
    _, (variable,), loss = fed_gradients(0.0)
    return variable, loss, make_accumulating_train_op(loss, sgd(), steps)


def _evaluates():
    v1.get_variable("eval_step", [], collections=[v1.GraphKeys.EVAL_STEP])


@pytest.mark.parametrize(
    ("steps", "prepare", "is_warned_of"),
    [
        (2, list, True),
        (2, make_accumulation_hooks, False),
        (1, list, False),
        (2, _evaluates, False),
    ],
)
def test_missing_hooks_are_warned_of_once(
    steps, prepare, is_warned_of, fresh_graph, caplog
):
    _train_op(steps)
    with v1.train.MonitoredSession(hooks=prepare()):
        pass
    warned = [each for each in caplog.messages if "make_accumulation_hooks()" in each]
    assert len(warned) == is_warned_of


def test_a_plain_session_needs_no_hooks(fresh_graph, caplog):
    after_each(_train_op(2)[2], [], [])
    assert not caplog.messages


def test_an_update_beside_a_window_is_refused(fresh_graph):
    variable, loss, train_op = _train_op(2)
    both = tf.group(
        train_op, v1.train.AdamOptimizer(0.1).minimize(loss, None, [variable])
    )
    with pytest.raises(
        ValueError, match="by another optimizer.* Received: variable_0, up"
    ):
        after_each(both, [], [])


def test_an_update_in_a_run_of_its_own_is_taken(fresh_graph):
    variable, loss, train_op = _train_op(2)
    sgd().minimize(loss, None, [variable])
    decayed = tf.group(train_op, v1.assign(variable, tf.minimum(variable, 1.0)))
    after_each(decayed, [], [])
