"""Checks of the finished graph, before a session first runs it."""

import types

import pytest
import tensorflow as tf

from estimator_accum import make_accumulating_train_op, make_accumulation_hooks
from estimator_accum.checks import repeated_writes
from estimator_accum.graph import copies as copies_of_operations
from tests.helpers.models.interfaces import after_each, fed_gradients, sgd
from tests.helpers.models.script_models import Assigning

v1 = tf.compat.v1


def _train_op(steps, value=0.0):
    _, (variable,), loss = fed_gradients(value)
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
    warned = [
        message for message in caplog.messages if "make_accumulation_hooks()" in message
    ]
    assert len(warned) == is_warned_of


@pytest.mark.parametrize("is_supervised", [False, True])
def test_a_loop_of_its_own_needs_no_hooks(is_supervised, fresh_graph, caplog):
    train_op = _train_op(2)[2]
    if is_supervised:
        v1.train.Supervisor().prepare_or_wait_for_session().close()
    else:
        after_each(train_op, [], [])
    assert not [m for m in caplog.messages if "make_accumulation_hooks()" in m]


def _adam(variable, loss):
    return v1.train.AdamOptimizer(0.1).minimize(loss, None, [variable])


def _by_bert(variable, loss):
    return Assigning(0.1).apply_gradients([(tf.gradients(loss, variable)[0], variable)])


def _by_hand(variable, loss):
    return variable.assign_sub(0.1 * tf.gradients(loss, variable)[0])


def _of_a_row(variable, loss):
    return v1.scatter_sub(variable, [0], tf.gradients(loss, variable)[0][:1])


def _decayed(variable, loss):
    return variable.assign(0.9 * variable)


def _clipped(variable, loss):
    return variable.assign(tf.minimum(variable, 1.0))


def _normalized(variable, loss):
    return variable.assign(tf.nn.l2_normalize(variable))


def _masked(variable, loss):
    return variable.assign_sub(variable * [0.0, 1.0])


def _padded(variable, loss):
    return v1.scatter_update(variable, [0], [0.0])


def _counts_in(call):
    """Returns a write, by functions that also read the variable, of another one."""

    def write(variable, loss):
        count = _state("count", 0.0)
        return call(lambda: count.assign_add(tf.reduce_sum(variable)))

    return write


def _writes_in(call):
    def write(variable, loss):
        count = _state("count", 0.0)
        return call(lambda: count + tf.reduce_sum(variable.assign_sub([0.1, 0.1])))

    return write


def _behind_a_branch(variable, loss):
    """Writes, in a function, the one of two variables that a branch chooses."""
    other = _state("other", [1.0, 1.0])

    def write():
        is_other = tf.reduce_sum(other) < 0.0
        handle = tf.cond(is_other, lambda: other.handle, lambda: variable.handle)
        tf.raw_ops.AssignVariableOp(resource=handle, value=other + 1.0)
        return tf.reduce_sum(other)

    return tf.function(write)()


def _function(body):
    return tf.function(body)()


def _nested(body):
    return tf.function(lambda: tf.cond(tf.constant(True), tf.function(body), body))()


def _loop(body):
    return tf.while_loop(lambda i: i < 2.0, lambda i: i + body(), [0.0])


def _branch(body):
    return tf.cond(tf.constant(True), body, lambda: 0.0)


def _loop_in_function(body):
    return tf.function(lambda: _loop(tf.function(body)))()


def _in_order(first, second):
    """Returns two writes, of which the second waits for the first and reads after it."""

    def write(variable, loss):
        with tf.control_dependencies([first(variable)]):
            return second(variable)

    return write


def _in_any_order(first, second):
    return lambda variable, loss: tf.group(first(variable), second(variable))


def _bounded(variable, bound=0.1):
    return variable.assign(tf.minimum(variable.read_value(), bound))


def _scaled(variable):
    return variable.assign(tf.nn.l2_normalize(variable.read_value()))


def _bounded_by(change, order):
    """Returns a write that bounds the variable by another, which `change` writes."""

    def write(variable, loss):
        bound = _state("bound", 1.0)

        def use(variable):
            return _bounded(variable, bound.read_value())

        return order(lambda _: change(bound), use)(variable, loss)

    return write


def _count(bound):
    return bound.assign_add(1.0)


def _pruned_by(use):
    """Returns a write by a mask in a variable."""

    def write(variable, loss):
        return variable.assign(use(_state("mask", [1.0, 0.0]), variable.read_value()))

    return write


_UNSETTLED_PAIRS = [
    _pruned_by(lambda mask, value: mask * value),
    _in_order(_bounded, _scaled),
    _in_any_order(_bounded, _scaled),
    _in_any_order(_scaled, lambda variable: _bounded(variable, 1.0)),
    _bounded_by(_count, _in_order),
    _bounded_by(_count, _in_any_order),
    _bounded_by(_bounded, _in_any_order),
]
_SETTLED_PAIRS = [
    _pruned_by(lambda mask, value: tf.where(mask > 0, value, 0.0)),
    _in_order(_scaled, lambda variable: _bounded(variable, 1.0)),
    _in_order(lambda variable: _bounded(variable, 1.0), _scaled),
    _bounded_by(_bounded, _in_order),
    _bounded_by(lambda bound: bound.assign(0.5), _in_any_order),
]
_CALLS = [_function, _nested, _loop, _branch, _loop_in_function]
_WRITES_IN_CALLS = [*map(_writes_in, _CALLS)]
_COUNTS_IN_CALLS = [*map(_counts_in, _CALLS)]
_CHANGES = [_adam, _by_bert, _by_hand, _of_a_row, _decayed, *_UNSETTLED_PAIRS]
_CHANGES += [_behind_a_branch, *_WRITES_IN_CALLS]
_SETTLED = [_clipped, _normalized, _masked, _padded, *_SETTLED_PAIRS]
_SETTLED += _COUNTS_IN_CALLS
# They differ in control flow v1.
_IN_FUNCTIONS = [_behind_a_branch, *_WRITES_IN_CALLS, *_COUNTS_IN_CALLS]


@pytest.mark.parametrize(
    ("write", "control_flow"),
    [(write, "v2") for write in (*_CHANGES, *_SETTLED)]
    + [(write, "v1") for write in (_adam, _clipped, *_IN_FUNCTIONS)],
    indirect=["control_flow"],
)
def test_only_a_write_that_may_be_repeated_is_taken_beside_a_window(
    write, control_flow, fresh_graph
):
    variable, loss, train_op = _train_op(2, [0.0, 0.0])
    both = tf.group(train_op, write(variable, loss))
    if write in _SETTLED:
        return after_each(both, [], [])
    received = "by anything else.* Received: variable_0, written by .*after_update_ops"
    with pytest.raises(ValueError, match=received):
        after_each(both, [], [])


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (lambda v: tf.minimum(v, 1.0), True),
        (lambda v: v - tf.gather(v, [0]), False),
        (lambda v: tf.linalg.cholesky(-tf.matmul(v, v, transpose_b=True)), False),
    ],
)
def test_a_write_of_a_cluster_is_tried_in_this_process(
    value, answer, fresh_graph, monkeypatch
):
    copies = []

    def insert(*arguments):
        copies.append(copies_of_operations.insert(*arguments))
        return copies[-1]

    monkeypatch.setattr(repeated_writes, "insert", insert)
    with tf.device("/job:worker/task:1/device:CPU:0"):
        variable = v1.get_variable("v", [2, 2], use_resource=True)
        write = variable.assign(value(variable))
        writers = types.SimpleNamespace(of=lambda variable: [write.op])
        assert repeated_writes.changes_once(variable.op, writers) == answer
    assert len(copies) <= 2  # for f(x) and f(f(x)) of all random values


def test_an_update_in_a_run_of_its_own_is_taken(fresh_graph):
    variable, loss, train_op = _train_op(2)
    _adam(variable, loss)
    after_each(train_op, [], [])


def _state(name, value, trainable=False):
    return v1.get_variable(name, initializer=value, trainable=trainable)


def _averaged(variable, loss):
    average = _state("average", [0.0])
    return loss, average.assign(0.9 * average + 0.1 * variable)


def _counted(variable, loss):
    clock = _state("clock", 0.0)
    return loss * tf.minimum(1.0, clock / 9.0), clock.assign_add(1.0)


def _annealed(variable, loss):
    temperature = _state("temperature", 1.0)
    return loss * temperature, temperature.assign(0.99 * temperature)


def _trained_beside(variable, loss):
    other = _state("other", 1.0, True)
    return loss * other, sgd().minimize(loss * other, None, [other])


def _counted_only(variable, loss):
    return loss, _state("clock", 0.0).assign_add(1.0)


def _copied(variable, loss):
    return loss, _state("copy", [0.0]).assign(variable)


def _of_micro_batch(variable, loss):
    mean = _state("mean", 0.0)
    return loss * mean, mean.assign(0.9 * mean + 0.1 * loss)


def _drawn(variable, loss):
    generator = tf.random.Generator.from_seed(1)
    return loss * generator.uniform([]), tf.no_op()


def _registered(write):
    """Returns a write that UPDATE_OPS run."""

    def register(variable, loss):
        loss, written = write(variable, loss)
        v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, written.op)
        return loss, tf.no_op()

    return register


def _counted_in(call):
    """Returns a counter that functions increase, and the loss reads."""

    def write(variable, loss):
        clock = _state("clock", 0.0)
        count = call(lambda: clock.assign_add(1.0))
        return loss * tf.minimum(1.0, clock / 9.0), count

    return write


def _returned(variable, loss):
    clock = _state("clock", 0.0)
    return loss * tf.function(lambda: clock.assign_add(1.0))(), tf.no_op()


def _counted_only_in_function(variable, loss):
    calls = _state("calls", 0.0)

    def compute(loss):
        calls.assign_add(1.0)
        return 2.0 * loss

    return tf.function(compute)(loss), tf.no_op()


def _of_micro_batch_in_function(variable, loss):
    mean = _state("mean", 0.0)
    written = tf.function(lambda x: mean.assign(0.9 * mean + 0.1 * x))(loss)
    return loss * mean, written


def _of_micro_batch_in_a_second_call(variable, loss):
    mean = _state("mean", 0.0)
    add = tf.function(lambda x: mean.assign(0.9 * mean + 0.1 * x))
    written = tf.function(lambda x: (add(tf.constant(0.0)), add(x)))(loss)
    return loss * mean, tf.group(written)


_ONCE_PER_BATCH = [_averaged, _counted, _annealed, _trained_beside, _returned]
_ONCE_PER_BATCH += [_registered(_counted)]
_ONCE_PER_BATCH += map(_counted_in, [_function, _nested])
_FOR_EACH = [_counted_only, _copied, _of_micro_batch, _drawn]
_FOR_EACH += [_counted_only_in_function, _of_micro_batch_in_function]
_FOR_EACH += [_of_micro_batch_in_a_second_call]
_FOR_EACH += map(_registered, [_averaged, _counted_only, _of_micro_batch])


@pytest.mark.parametrize(
    ("write", "control_flow"),
    [(write, "v2") for write in (*_ONCE_PER_BATCH, *_FOR_EACH)]
    + [(write, "v1") for write in (*_ONCE_PER_BATCH[-2:], _counted_only)],
    indirect=["control_flow"],
)
def test_a_write_that_a_batch_makes_once_is_warned_of(
    write, control_flow, fresh_graph, caplog
):
    _, (variable,), loss = fed_gradients([0.0])
    loss, written = write(variable, loss)
    train_op = make_accumulating_train_op(loss, sgd(), 2, var_list=[variable])
    after_each(tf.group(train_op, written), [], [])
    assert len(caplog.messages) == (write in _ONCE_PER_BATCH)
    assert all(
        "every micro-step, where a big batch writes" in m for m in caplog.messages
    )
