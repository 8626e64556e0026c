"""A partial window whose update depends on tensors of the micro-batch."""

import contextlib
import types

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    get_or_create_update_step,
    make_accumulating_train_op,
    make_accumulation_hooks,
)
from estimator_accum.hooks import _end_of_data
from tests.helpers.models.interfaces import sgd

v1 = tf.compat.v1
K, SIZE = 4, 2
X = np.random.default_rng(0).normal(size=[6 * SIZE]).astype(np.float32)


def _decayed():
    return 0.5 / (1.0 + tf.cast(get_or_create_update_step(), tf.float32))


def _behind_update_ops(x):
    """Returns a schedule that runs after the update ops, as TF1's guides show."""
    mean = v1.get_variable("mean", initializer=0.0, trainable=False)
    update = v1.assign(mean, 0.9 * mean + 0.1 * tf.reduce_mean(x))
    v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, update)
    with tf.control_dependencies([update]):
        return _decayed()


def _by_size(x):
    return _decayed() * tf.cast(tf.shape(x)[0], tf.float32) / SIZE


def _beside_a_summary(x):
    with tf.control_dependencies([x]):
        v1.summary.scalar("update", get_or_create_update_step().read_value())
    return _decayed()


def _estimator(folder, make_rate, **options):
    def model_fn(features, labels, mode):
        w = v1.get_variable("w", initializer=0.0)
        rate = make_rate(features)
        updates = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
        with tf.control_dependencies(updates):
            options["update_ops"] = updates
            loss = w * tf.reduce_mean(features)
            train_op = make_accumulating_train_op(loss, sgd(rate), K, **options)
        hooks = make_accumulation_hooks(metrics_dir=folder, learning_rate=rate)
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=train_op, training_hooks=hooks
        )

    return tf.estimator.Estimator(model_fn, model_dir=str(folder))


_OPTIONS = {"clip_norm": 10.0, "on_nonfinite": "skip_window"}


@pytest.mark.parametrize(
    ("make_rate", "options", "control_flow"),  # each two of them together
    [
        (_behind_update_ops, {}, "v1"),
        (_behind_update_ops, _OPTIONS, "v2"),
        (_by_size, {}, "v2"),
        (_by_size, _OPTIONS, "v1"),
        (_beside_a_summary, {}, "v1"),
        (_beside_a_summary, _OPTIONS, "v2"),
    ],
    indirect=["control_flow"],
)
def test_a_partial_window_is_applied_like_a_whole_one(
    make_rate, options, control_flow, tmp_path
):
    estimator = _estimator(tmp_path, make_rate, **options)
    estimator.train(lambda: tf.data.Dataset.from_tensor_slices(X).batch(SIZE))
    expected = -0.5 * X[: K * SIZE].mean() - 0.25 * X[K * SIZE :].mean()
    assert estimator.get_variable_value("w") == pytest.approx(expected)
    assert estimator.get_variable_value("update_step") == 2
    if make_rate is _behind_update_ops:  # updated once per micro-step
        mean = 0.0
        for micro_batch in np.split(X, 6):
            mean = 0.9 * mean + 0.1 * micro_batch.mean()
        assert estimator.get_variable_value("mean") == pytest.approx(mean)
    rows = np.genfromtxt(tmp_path / "train_metrics.csv", delimiter=",", names=True)
    assert rows["learning_rate"].tolist()[0] == 0.5


def test_what_no_micro_step_has_told_leaves_the_window_open(tmp_path, caplog):
    estimator = _estimator(tmp_path, _by_size)
    micro_batches = tf.data.Dataset.from_tensor_slices
    estimator.train(lambda: micro_batches(X).batch(SIZE), steps=6)
    estimator.train(lambda: micro_batches(X[:0]).batch(SIZE))
    assert (
        "2 of 4 micro-steps kept: the update reads values of a micro-batch"
        in caplog.text
    )
    assert estimator.get_variable_value("accumulation/micro_steps") == 2
    estimator.train(lambda: micro_batches(X[:SIZE]).batch(SIZE))
    assert estimator.get_variable_value("update_step") == 2


_END = contextlib.suppress(tf.errors.OutOfRangeError)


def _ignore(value):
    """Stands in for an evaluation."""


def _feed(run, batch, train):
    while True:
        train(run(batch))


def _feed_until_caught(run, batch, train):
    with _END:
        _feed(run, batch, train)


def _feed_views(run, data, train):
    while True:
        train(run([data.batch])[0][None][0, :1])


def _feed_with_one_ahead(run, data, train):
    value = run(data.batch)
    try:
        while True:
            following = run(data.batch)
            train(value)
            value = following
    except tf.errors.OutOfRangeError:
        train(value)


def _feed_from_last_to_first(run, data, train):
    values = []
    _feed_until_caught(run, data.batch, values.append)
    for value in reversed(values):
        train(value)


def _feed_copies(run, data, train):
    while True:
        train(run(data.batch) + 0)


def _feed_copies_with_one_ahead(run, data, train):
    _feed_with_one_ahead(lambda batch: run(batch) + 0, data, train)


def _feed_from_a_branch(run, data, train):
    def read(batch):
        return run(batch, {data.is_first: True})

    _feed_until_caught(read, data.of_branch, train)


def _feed_in_turn(run, data, train):
    while True:  # the end of `other` is the first
        train(run(data.batch))
        train(run(data.other))


def _feed_then_evaluate_the_same(run, data, train):
    _feed_until_caught(run, data.batch, train)
    run(data.start)
    _feed_until_caught(run, data.batch, _ignore)


def _stop(run, data, train):
    for _ in range(3):
        train(run(data.batch))


def _stop_in_the_second_set(run, data, train):
    _feed_until_caught(run, data.other, train)
    for _ in range(2):
        train(run(data.batch))


def _stop_then_read_other_data(run, data, train):
    _stop(run, data, train)
    _feed(run, data.other, _ignore)


def _evaluate_after_each(run, data, train):
    for _ in range(3):
        train(run(data.batch))
        _feed_until_caught(run, data.other, _ignore)


def _feed_copies_in_a_loop_that_catches(run, data, train):
    with _END:
        _feed_copies(run, data, train)


def _feed_arrays_and_evaluate_after_each(run, data, train):
    for value in (1.0, 2.0, 4.0):
        train(np.array([value], np.float32))
        _feed_until_caught(run, data.other, _ignore)


def _stop_then_evaluate_the_same(run, data, train):
    _stop(run, data, train)
    run(data.start)
    _feed_until_caught(run, data.batch, _ignore)


def _value_at_the_end(loop, seen_as=lambda x: x):
    """Returns a weight after a loop's data; the model gets `seen_as` of each x."""
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        iterators = [
            v1.data.make_initializable_iterator(
                tf.data.Dataset.from_tensor_slices(values).batch(1)
            )
            for values in ([1.0, 2.0, 4.0], [8.0])
        ]
        batch, other = (iterator.get_next() for iterator in iterators)
        start, start_other = (iterator.initializer for iterator in iterators)
        data = types.SimpleNamespace(batch=batch, other=other, start=start)
        data.is_first = v1.placeholder(tf.bool, [])
        data.of_branch = tf.cond(
            data.is_first, *(iterator.get_next for iterator in iterators)
        )
        x, w = v1.placeholder(tf.float32, [1]), v1.get_variable("w", initializer=0.0)
        train_op = make_accumulating_train_op(w * seen_as(x)[0], sgd(1.0), 2)
        values = _ValuesAtTheEnd(w)
        hooks = [*make_accumulation_hooks(), values]
        with v1.train.MonitoredSession(hooks=hooks) as session:
            session.run([start, start_other])
            loop(session.run, data, lambda value: session.run(train_op, {x: value}))
    return values.at_the_end


@pytest.mark.once
@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (lambda run, data, train: _feed(run, data.batch, train), -5.5),
        (_feed_views, -5.5),
        (_feed_with_one_ahead, -5.5),
        (_feed_from_last_to_first, -4.0),
        (_feed_copies, -5.5),
        (_feed_copies_with_one_ahead, -5.5),
        (_feed_from_a_branch, -5.5),
        (_feed_in_turn, -6.5),
        (_feed_then_evaluate_the_same, -5.5),
        (_stop, -1.5),
        (_stop_in_the_second_set, -4.5),
        (_stop_then_read_other_data, -1.5),
        (_evaluate_after_each, -1.5),
        (_feed_copies_in_a_loop_that_catches, -5.5),
        (_feed_arrays_and_evaluate_after_each, "unknown"),
        (_stop_then_evaluate_the_same, "unknown"),
    ],
)
def test_the_end_of_data_is_seen_where_a_loop_feeds(loop, expected, caplog):
    is_unknown = expected == "unknown"
    assert _value_at_the_end(loop) == (-1.5 if is_unknown else expected)
    assert ('`partial_window` must be "apply" or "keep"' in caplog.text) == is_unknown


@pytest.mark.once
def test_python_in_a_model_that_is_fed_reads_no_batch():
    def seen_as(x):
        return tf.ensure_shape(tf.numpy_function(lambda x: x, [x], tf.float32), [1])

    assert _value_at_the_end(_feed_copies_with_one_ahead, seen_as) == -5.5


@pytest.mark.once
def test_the_owner_of_a_sessions_memory_is_not_kept():
    with tf.Graph().as_default(), v1.Session() as session:
        value = session.run(tf.random.normal([4]))  # a constant's has no owner
    arrays = [*_end_of_data._arrays_of([value[1:]])]
    assert len(arrays) == 2 and {type(array) for array in arrays} == {np.ndarray}


@pytest.mark.once
@pytest.mark.parametrize(("steps", "expected"), [(9, -5.5), (3, -1.5)])
def test_the_end_of_data_is_seen_behind_step_functions(steps, expected):
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        data = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 4.0])
        batch = v1.data.make_one_shot_iterator(data).get_next()
        x, w = v1.placeholder(tf.float32, []), v1.get_variable("w", initializer=0.0)
        train_op = make_accumulating_train_op(w * x, sgd(1.0), 2)
        values = _ValuesAtTheEnd(w)
        hooks = [*make_accumulation_hooks(), values]

        def feed(step_context):
            if step_context.session.run(step) == steps:
                step_context.request_stop()
            value = step_context.session.run(batch)
            step_context.run_with_hooks(train_op, {x: value})

        with v1.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run_step_fn(feed)
    assert values.at_the_end == expected


@pytest.mark.once
@pytest.mark.parametrize("has_hooks", [True, False])
def test_step_functions_train_the_same_windows(has_hooks):
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        data = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 4.0])
        x = v1.data.make_one_shot_iterator(data).get_next()
        w = v1.get_variable("w", initializer=0.0)
        train_op = make_accumulating_train_op(w * x, sgd(1.0), 2)
        values = _ValuesAtTheEnd(w)

        def train(step_context):
            session = step_context.session
            (step_context.run_with_hooks if has_hooks else session.run)(train_op)

        hooks = [*make_accumulation_hooks(), values]
        with v1.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run_step_fn(train)
    assert values.at_the_end == -5.5


@pytest.mark.once
def test_the_end_of_an_evaluation_is_not_that_of_the_data():
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        data = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 4.0, 8.0])
        batch = v1.data.make_one_shot_iterator(data).get_next()
        examples = v1.data.make_initializable_iterator(data)
        start, example = examples.initializer, examples.get_next()
        x, w = v1.placeholder(tf.float32, []), v1.get_variable("w", initializer=0.0)
        train_op = make_accumulating_train_op(w * x, sgd(1.0), 2)
        values, stop = _ValuesAtTheEnd(w), v1.train.StopAtStepHook(last_step=3)
        hooks = [*make_accumulation_hooks(), values, stop]
        with v1.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run(train_op, {x: session.run(batch)})
                if not session.should_stop():
                    session.run(start)
                    with contextlib.suppress(tf.errors.OutOfRangeError):
                        while True:
                            session.run(example)
    assert values.at_the_end == -1.5  # the third is kept


class _ValuesAtTheEnd(v1.train.SessionRunHook):
    """Reads a variable after the hooks before it have ended."""

    def __init__(self, variable):
        self._value = variable.read_value()

    def end(self, session):
        self.at_the_end = session.run(self._value)


@pytest.mark.once
def test_a_rate_to_report_is_a_scalar(tmp_path):
    for rate in ("0.1", True, [0.1], sgd()):
        with pytest.raises(TypeError, match="`learning_rate` must be a scalar Tensor"):
            make_accumulation_hooks(learning_rate=rate)
    with tf.Graph().as_default():
        for rate in (v1.placeholder(tf.float32), np.array(0.25)):
            make_accumulation_hooks(learning_rate=rate)
        v1.train.get_or_create_global_step()
        w = v1.get_variable("w", initializer=0.0)
        train_op = make_accumulating_train_op(w, sgd(), 2)
        hooks = make_accumulation_hooks(metrics_dir=tmp_path, learning_rate=0.25)
        with v1.train.MonitoredSession(hooks=hooks) as session:
            session.run(train_op)
            session.run(train_op)
    rows = np.genfromtxt(tmp_path / "train_metrics.csv", delimiter=",", names=True)
    assert rows["learning_rate"] == 0.25
