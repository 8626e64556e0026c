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
from estimator_accum.hooks import _summary
from tests.helpers.models.little_memory import Memory

_LOGGER = "tensorflow.estimator_accum.summary"
_COUNT_MICRO_STEPS = "; max_steps and steps count micro-steps"
_PEAK = r"peak of the process [\d,.]+ [MG]B(, peak of the model [\d,.]+ [kMG]B)?"
_SUMS = ", sums of gradients 4 kB"


def _model_fn(steps, change=tf.identity, **options):
    def model_fn(features, labels, mode):
        features = change(features)
        slope = tf.compat.v1.get_variable(
            "slope", [1000], initializer=tf.zeros_initializer()
        )
        error = tf.linalg.matvec(features, slope[:3]) - labels
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
            for training in trainings:
                estimator.train(_input_fn, **training)
        return [r.getMessage() for r in caplog.records if r.name == _LOGGER]

    return train


def test_lines_have_the_batch_the_speed_and_the_open_window(lines):
    model_fn = _model_fn(8, micro_batch_size=4)
    first, last, *again = lines(model_fn, {"max_steps": 30}, {"max_steps": 44})
    batch, clock = "effective batch 32 = 4 examples x 8 micro-steps", _COUNT_MICRO_STEPS
    assert first == batch + clock
    speed = rf"trained 3 updates, [\d,.]+ examples per second, {_PEAK}{_SUMS}"
    assert re.fullmatch(f"{speed}; the open window has 6 of 8 micro-steps", last)
    # The 6 micro-steps of before belong to the next update.
    opened = "; the open window has 6 micro-steps and closes after 2 more"
    assert again[0] == batch + opened + clock
    assert again[1].startswith("trained 2 updates, ")
    assert again[1].endswith("; the open window has 4 of 8 micro-steps")


def test_a_resumed_window_with_fewer_micro_steps_closes_at_once(lines):
    lines(_model_fn(4), {"max_steps": 3})
    *_, first, last = lines(_model_fn(2), {"max_steps": 6})
    assert "has 3 micro-steps and closes after 1 more; max_steps" in first
    assert last.startswith("trained 2 updates") and "open window" not in last


@pytest.mark.parametrize(
    ("partial_window", "end"),
    [
        ("auto", "trained 0 updates, .*; the open window has 3 of 8 micro-steps"),
        ("apply", "trained 1 update, .*B"),
    ],
)
def test_steps_below_an_update_train_none_unless_it_is_applied(
    partial_window, end, lines, caplog
):
    _, last = lines(_model_fn(8, partial_window=partial_window), {"max_steps": 3})
    assert re.fullmatch(end, last)
    words = (
        "The first update needs 8 micro-steps. Received: 3, so no weight has changed"
    )
    is_warned_of = [words in message for message in caplog.messages]
    assert any(is_warned_of) == (partial_window == "auto")


def test_the_examples_of_a_micro_batch_are_those_of_the_data_set(lines):
    first, last = lines(_model_fn(2), {"steps": 2})
    batch = "effective batch 8 = 4 examples x 2 micro-steps"
    assert first == f"{batch}{_COUNT_MICRO_STEPS}"
    assert re.fullmatch(
        rf"trained 1 update, [\d,.]+ micro-steps per second, {_PEAK}{_SUMS}", last
    )


@pytest.mark.parametrize(
    ("steps", "first_line"),
    [
        (
            lambda update_step: update_step + 1,
            f"1 micro-step at first{_COUNT_MICRO_STEPS}",
        ),
        (1, "1 micro-step"),
    ],
    ids=["changing", "1"],
)
def test_a_step_that_is_always_an_update_needs_no_word(steps, first_line, lines):
    first, _ = lines(_model_fn(steps), {"max_steps": 2})
    assert first == f"effective batch 4 = 4 examples x {first_line}"


@pytest.mark.parametrize("steps", [None, 2], ids=["own optimizer", "this library's"])
def test_whole_batches_say_how_they_are_cut(lines, steps):
    model_fn = microbatch_model_fn(_model_fn(steps), 3)
    first, last = lines(model_fn, {"max_steps": 2})
    assert first == "effective batch 4 = 2 examples x 2 micro-batches"
    assert re.fullmatch(
        rf"trained 2 updates, [\d,.]+ examples per second, {_PEAK}", last
    )


@pytest.mark.parametrize(
    ("examples", "end"),
    [
        (4, "batches fit in memory unsplit"),
        (2, "micro-batches per batch: 2, since 1 ran out of memory"),
    ],
)
def test_last_line_says_what_memory_has_decided(examples, end, lines):
    memory = Memory(lambda rows: rows <= examples)
    model_fn = microbatch_model_fn(_model_fn(2, memory.allocate), "auto")
    assert lines(model_fn, {"max_steps": 2})[-1].endswith(f"; {end}")


def test_memory_of_the_model_is_that_of_this_training(lines, monkeypatch):
    sizes = [5e6, 98.1e6, 98.1e6, 98.1e6]  # at the beginning, at the end
    peaks = lambda: {"the process": 8e8, "the model": sizes.pop(0)}
    monkeypatch.setattr(_summary, "peak_bytes", peaks)
    _, first, _, again = lines(_model_fn(2), {"steps": 2}, {"steps": 2})
    process, model = "peak of the process 800.0 MB", "peak of the model 98.1 MB"
    assert first.endswith(f", {process}, {model}{_SUMS}")
    assert again.endswith(f", {process}{_SUMS}")


def test_steps_of_a_clock_that_the_caller_moves_are_not_described(caplog):
    with tf.Graph().as_default():
        tf.compat.v1.train.get_or_create_global_step()
        loss = tf.compat.v1.get_variable("x", initializer=1.0) ** 2
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        train_op = AccumulatingOptimizer(optimizer, 2).minimize(loss)
        with (
            caplog.at_level(logging.INFO, _LOGGER),
            tf.compat.v1.train.MonitoredTrainingSession(
                hooks=make_accumulation_hooks()
            ) as session,
        ):
            session.run(train_op)
    assert caplog.messages[0] == "an update is 2 micro-steps"
