"""The two lines of a training that a library user sees."""

import logging
import re

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    make_accumulating_train_op,
    make_accumulation_hooks,
    microbatch_model_fn,
)

_LOGGER = "tensorflow.estimator_accum.summary"
_PEAK = r"peak of the process [\d,.]+ [MG]B"


def _model_fn(steps, **options):
    def model_fn(features, labels, mode):
        slope = tf.compat.v1.get_variable(
            "slope", [3], initializer=tf.zeros_initializer()
        )
        error = tf.linalg.matvec(features, slope) - labels
        loss = tf.reduce_mean(tf.square(error))
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        if steps is None:
            step = tf.compat.v1.train.get_global_step()
            train_op, hooks = optimizer.minimize(loss, step), []
        else:
            train_op = make_accumulating_train_op(loss, optimizer, steps)
            hooks = make_accumulation_hooks(**options)
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=train_op, training_hooks=hooks
        )

    return model_fn


def _input_fn():
    data = np.ones([64, 3], np.float32), np.ones([64], np.float32)
    return tf.data.Dataset.from_tensor_slices(data).repeat().batch(4)


@pytest.fixture
def lines(caplog, tmp_path):
    """Trains and returns the lines of each training."""

    def train(model_fn, *trainings: dict) -> list[str]:
        estimator = tf.estimator.Estimator(model_fn, str(tmp_path))
        with caplog.at_level(logging.INFO, _LOGGER):
            for each in trainings:
                estimator.train(_input_fn, **each)
        return [r.getMessage() for r in caplog.records if r.name == _LOGGER]

    return train


def test_first_line_has_the_updates_of_max_steps_and_the_last_one_the_speed(lines):
    model_fn = _model_fn(8, micro_batch_size=4)
    first, last, *again = lines(model_fn, {"max_steps": 30}, {"max_steps": 44})
    assert first == (
        "effective batch 32 = 4 examples x 8 micro-steps; max_steps=30 are 3 updates and "
        "6 micro-steps more"
    )
    assert re.fullmatch(
        rf"trained 3 updates, [\d,.]+ examples per second, {_PEAK}", last
    )
    # The 6 micro-steps of before belong to the next update.
    assert "; the open window has 6 micro-steps and closes after 2 more; " in again[0]
    assert again[0].endswith(
        "; max_steps=44, from micro-step 30, are 2 updates and 4 micro-steps more"
    )
    assert again[1].startswith("trained 2 updates, ")


def test_a_resumed_window_with_fewer_micro_steps_closes_at_once(lines):
    lines(_model_fn(4), {"max_steps": 3})
    *_, first, last = lines(_model_fn(2), {"max_steps": 6})
    assert "has 3 micro-steps and closes after 1 more; max_steps=6" in first
    assert first.endswith("are 2 updates") and last.startswith("trained 2 updates")


@pytest.mark.parametrize(
    ("steps", "partial_window", "is_warned_of"),
    [
        ("max_steps", "auto", True),
        ("max_steps", "apply", False),
        ("steps", "keep", False),
    ],
)
def test_max_steps_below_an_update_are_warned_of(
    steps, partial_window, is_warned_of, lines, caplog
):
    first, _ = lines(_model_fn(8, partial_window=partial_window), {steps: 3})
    assert first.endswith(f"; {steps}=3 are 0 updates and 3 micro-steps more")
    words = "max_steps=3 counts micro-steps and ends before the next update, of 8"
    assert any(words in message for message in caplog.messages) == is_warned_of


def test_what_a_hook_cannot_know_is_left_out(lines):
    first, last = lines(_model_fn(2), {"steps": 2})
    assert first == "an update is 2 micro-steps; steps=2 are 1 update"
    assert re.fullmatch(
        rf"trained 1 update, [\d,.]+ micro-steps per second, {_PEAK}", last
    )


def test_a_number_of_micro_steps_that_changes_gives_no_updates(lines):
    first, _ = lines(_model_fn(lambda update_step: update_step + 1), {"max_steps": 2})
    assert first == "an update is 1 micro-step at first"


@pytest.mark.parametrize("steps", [None, 2], ids=["own optimizer", "this library's"])
def test_whole_batches_say_how_they_are_cut(lines, steps):
    model_fn = microbatch_model_fn(_model_fn(steps), 3)
    first, last = lines(model_fn, {"max_steps": 2})
    assert first == (
        "effective batch 4 = 2 examples x 2 micro-batches; max_steps=2 are 2 updates"
    )
    assert re.fullmatch(
        rf"trained 2 updates, [\d,.]+ examples per second, {_PEAK}", last
    )


@pytest.mark.parametrize("max_steps", [None, 12])
def test_without_counted_steps_the_line_ends_with_the_batch(max_steps, caplog):
    with tf.Graph().as_default():
        tf.compat.v1.train.get_or_create_global_step()
        loss = tf.compat.v1.get_variable("x", initializer=1.0) ** 2
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        hooks = make_accumulation_hooks()
        if max_steps is None:
            train_op = make_accumulating_train_op(loss, optimizer, 2)
        else:  # nothing moves global_step
            train_op = AccumulatingOptimizer(optimizer, 2).minimize(loss)
            hooks.append(tf.compat.v1.train.StopAtStepHook(last_step=max_steps))
        with (
            caplog.at_level(logging.INFO, _LOGGER),
            tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session,
        ):
            session.run(train_op)
    assert caplog.messages[0] == "an update is 2 micro-steps"
