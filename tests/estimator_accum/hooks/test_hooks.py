"""Hooks of an Estimator over partial windows, restores, reports."""

import csv
import functools
import inspect
import logging
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    get_or_create_update_step,
    make_accumulating_train_op,
    make_accumulation_hooks,
)
from tests.helpers.models.interfaces import sgd
from tests.helpers.models.microbatch_runs import variables_of
from tests.helpers.models.replicas import TWO_CPUS, two_replicas
from tests.helpers.models.summaries import read_scalars

v1 = tf.compat.v1
EXAMPLES, BATCH = 88, 4  # 22 micro-steps
_random = np.random.default_rng(0)
_INPUTS = _random.normal(size=[EXAMPLES, 3]).astype(np.float32)
_IDS = _random.integers(0, 6, EXAMPLES)
_TARGETS = _random.normal(size=EXAMPLES).astype(np.float32)


def _input_fn(skipped_micro_steps=0):
    data = ({"inputs": _INPUTS, "ids": _IDS}, _TARGETS)
    dataset = tf.data.Dataset.from_tensor_slices(data)
    return dataset.skip(skipped_micro_steps * BATCH).batch(BATCH)


def _model_fn(features, labels, mode, params):
    dense = v1.get_variable("dense", [3], initializer=tf.zeros_initializer())
    table = v1.get_variable("table", [7], initializer=tf.zeros_initializer())
    predicted = tf.linalg.matvec(features["inputs"], dense)
    predicted += tf.gather(table, features["ids"])
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=predicted)
    loss = tf.reduce_mean(tf.square(predicted - labels))
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode, loss=loss)
    if params["steps"] is None:  # without this library
        step = v1.train.get_global_step()
        train_op = v1.train.AdamOptimizer(0.05).minimize(loss, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
    rate = 0.05 / (1.0 + tf.cast(get_or_create_update_step(), tf.float32))
    train_op = make_accumulating_train_op(
        loss, v1.train.AdamOptimizer(rate), params["steps"], clip_norm=1.0
    )
    hooks = make_accumulation_hooks(
        params["partial_window"], metrics_dir=params["metrics_dir"], learning_rate=rate
    )
    return tf.estimator.EstimatorSpec(mode, None, loss, train_op, training_hooks=hooks)


def _estimator(folder, steps=4, partial_window="keep", csv=None):
    params = {"steps": steps, "partial_window": partial_window, "metrics_dir": csv}
    options = {"tf_random_seed": 1, "save_checkpoints_steps": 1000}
    config = tf.estimator.RunConfig(str(folder), **options)
    return tf.estimator.Estimator(_model_fn, config=config, params=params)


def _assert_same(ours, theirs, names=None):
    for name in names or theirs:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Estimator after 22 micro-steps: five windows of 4, and 2 micro-steps kept."""
    estimator = _estimator(tmp_path_factory.mktemp("kept"))
    estimator.train(_input_fn, steps=22)
    return estimator


@pytest.fixture(scope="module")
def applied(tmp_path_factory):
    """Estimator after 22 micro-steps: five windows of 4, and one of 2."""
    folder = tmp_path_factory.mktemp("applied")
    estimator = _estimator(folder, partial_window="apply", csv=folder)
    estimator.train(_input_fn, steps=22)
    return estimator


@pytest.fixture
def info_log(caplog):
    caplog.set_level(logging.INFO, "tensorflow.estimator_accum")
    return caplog


def test_hooks_add_no_session_run_to_a_micro_step(tmp_path, count_session_runs):
    def train(steps):
        folder = str(tmp_path / f"{steps}_steps")
        # With save_checkpoints_steps TensorFlow's saving hook runs the session too.
        config = tf.estimator.RunConfig(folder, save_checkpoints_secs=1000)
        params = {"steps": 4, "partial_window": "keep", "metrics_dir": folder}
        estimator = tf.estimator.Estimator(_model_fn, config=config, params=params)
        estimator.train(_input_fn, steps=steps)

    few, many = (count_session_runs(lambda n=n: train(n)) for n in (8, 20))
    assert many - few == 20 - 8


def test_a_run_stopped_in_mid_window_goes_on_bit_for_bit(tmp_path, kept, info_log):
    """By default: `steps` and `max_steps` stop a run before its data ends."""
    stopped = _estimator(tmp_path, partial_window="auto")
    stopped.train(_input_fn, steps=10)
    assert re.findall(r"(\d) of 4 micro-steps kept in the", info_log.text) == ["2"]
    assert stopped.get_variable_value("accumulation/micro_steps") == 2
    again = _estimator(tmp_path, partial_window="auto")
    again.train(lambda: _input_fn(10), max_steps=22)
    _assert_same(variables_of(again), variables_of(kept))
    assert again.get_variable_value("update_step") == 5
    assert again.get_variable_value("accumulation/micro_steps") == 2
    default = inspect.signature(make_accumulation_hooks).parameters["partial_window"]
    assert default.default == "auto"


def test_applied_window_is_divided_by_what_it_holds(tmp_path, applied, info_log):
    """22 micro-steps at K = 4: five windows and one of 2, compared with that schedule.

    The data ends after the 22nd.
    """
    auto = _estimator(tmp_path / "auto", partial_window="auto")
    auto.train(_input_fn)
    assert len(re.findall("2 of 4 micro-steps applied as update 6", info_log.text)) == 1
    exact = _estimator(tmp_path / "exact", lambda done: tf.where(done < 5, 4, 2))
    exact.train(_input_fn, steps=22)
    trained = ["dense", "table", "dense/Adam", "table/Adam_1", "beta1_power"]
    for ours in (auto, applied):
        _assert_same(variables_of(ours), variables_of(exact), trained)
        assert ours.get_variable_value("update_step") == 6
        assert ours.get_variable_value("global_step") == 22
        assert ours.get_variable_value("accumulation/micro_steps") == 0


def test_the_last_evaluation_of_train_and_evaluate_sees_the_applied_window(tmp_path):
    estimator = _estimator(tmp_path, partial_window="apply")
    result, _ = tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(_input_fn, max_steps=22),
        tf.estimator.EvalSpec(_input_fn, steps=None),
    )
    assert result["loss"] == estimator.evaluate(_input_fn)["loss"]
    assert estimator.get_variable_value("update_step") == 6


def _train_x(micro_steps, hooks, folder=None, clip_norm=None):
    """Trains x in windows of 4 micro-steps; an update is x := x - 2."""
    with tf.Graph().as_default():
        x = v1.get_variable("x", initializer=0.0)
        train_op = make_accumulating_train_op(2 * x, sgd(), 4, clip_norm)
        options = {"checkpoint_dir": folder, "hooks": hooks()}
        with v1.train.MonitoredTrainingSession(**options) as session:
            for _ in range(micro_steps):
                session.run(train_op)


def test_apply_works_in_a_session_whose_saving_hook_comes_last(tmp_path):
    def hooks():
        saving = v1.train.CheckpointSaverHook(str(tmp_path), save_steps=2)
        return [*make_accumulation_hooks("apply"), saving, v1.train.StopAtStepHook(7)]

    _train_x(7, hooks)
    assert tf.train.load_variable(str(tmp_path), "x") == -4


class _Saving(v1.train.SessionRunHook):
    """Saves after every micro-step, as user code may."""

    def __init__(self, folder):
        self._path = str(folder / "own.ckpt")

    def after_run(self, run_context, run_values):
        saver = v1.get_collection(v1.GraphKeys.SAVERS)[0]
        step = run_context.session.run(v1.train.get_global_step())
        saver.save(run_context.session, self._path, global_step=step)


def test_saves_that_others_make_apply_nothing_before_the_end(tmp_path, applied):
    """22 micro-steps in windows of 4 are 6 updates, however often they are saved."""
    estimator = _estimator(tmp_path, partial_window="apply")
    estimator.train(_input_fn, hooks=[_Saving(tmp_path)], max_steps=22)
    _assert_same(variables_of(estimator), variables_of(applied))
    middle = tf.train.load_checkpoint(str(tmp_path / "own.ckpt-21"))
    assert middle.get_tensor("accumulation/micro_steps") == 1


def test_a_second_saving_hook_applies_nothing_before_the_end(tmp_path):
    def hooks():
        first, second = (
            v1.train.CheckpointSaverHook(str(tmp_path / name), save_steps=1)
            for name in ("first", "second")
        )
        stop = v1.train.StopAtStepHook(7)
        return [first, *make_accumulation_hooks("apply"), second, stop]

    _train_x(7, hooks)
    assert tf.train.load_variable(str(tmp_path / "first"), "x") == -4
    assert tf.train.load_variable(str(tmp_path / "second"), "x") == -4
    middle = tf.train.load_checkpoint(str(tmp_path / "second" / "model.ckpt-6"))
    assert middle.get_tensor("accumulation/micro_steps") == 2
    assert middle.get_tensor("x") == -2


@pytest.mark.parametrize("steps", [6, 8])
def test_a_session_that_just_ends_applies_its_partial_window(tmp_path, info_log, steps):
    """No hook has asked it to stop, and the data has not ended."""
    _train_x(steps, lambda: make_accumulation_hooks("apply"), str(tmp_path))
    assert tf.train.load_variable(str(tmp_path), "x") == -4
    assert tf.train.load_variable(str(tmp_path), "update_step") == 2
    assert ("partial window" in info_log.text) == (steps == 6)


def test_a_checkpoint_without_accumulation_resumes_with_it_and_back(tmp_path, info_log):
    plain = _estimator(tmp_path, steps=None)
    plain.train(_input_fn, steps=5)
    before = variables_of(plain)
    ours = _estimator(tmp_path, steps=4)
    ours.train(lambda: _input_fn(5), steps=3)
    assert "its window starts empty" in info_log.text
    after = variables_of(ours)
    _assert_same(after, before, set(before) - {"global_step"})
    assert (after["update_step"], after["global_step"]) == (5, 8)
    assert after["accumulation/micro_steps"] == 3
    again = _estimator(tmp_path, steps=None)
    again.train(lambda: _input_fn(8), steps=1)
    assert again.get_variable_value("global_step") == 9
    assert "dense/accumulator" not in again.get_variable_names()


def test_one_step_windows_resume_with_longer_ones_and_back(tmp_path, info_log):
    """The counters continue; a partial window that K = 1 cannot hold is dropped."""
    _estimator(tmp_path, steps=1).train(_input_fn, steps=5)
    ours = _estimator(tmp_path, steps=4)
    ours.train(lambda: _input_fn(5), steps=10)
    assert ours.get_variable_value("update_step") == 7
    assert "which this graph cannot" not in info_log.text
    _estimator(tmp_path, steps=1).train(lambda: _input_fn(15), steps=1)
    assert "partial window of 2 micro-steps, which this graph cannot" in info_log.text


def _rows(folder):
    table = pathlib.Path(folder, "train_metrics.csv").read_text()
    return list(csv.DictReader(table.splitlines()))


def test_metrics_have_a_row_an_update_with_the_windows_values(applied):
    rows = _rows(applied.model_dir)
    columns = {name: [float(row[name]) for row in rows] for name in rows[0]}
    assert columns["update_step"] == [1, 2, 3, 4, 5, 6]
    assert columns["global_step"] == columns["micro_steps"] == [4, 8, 12, 16, 20, 22]
    rates = [0.05 / n for n in range(1, 7)]
    np.testing.assert_allclose(columns["learning_rate"], rates, rtol=1e-6)
    # Variables start at zero: the first window's loss is its targets' mean square.
    first = np.mean(np.square(_TARGETS[: 4 * BATCH]))
    np.testing.assert_allclose(columns["loss"][0], first, rtol=1e-6)
    gradient = -2 * _INPUTS[:16].T @ _TARGETS[:16] / 16
    table = np.bincount(_IDS[:16], -2 * _TARGETS[:16] / 16, 7)
    norm = np.sqrt(np.sum(gradient**2) + np.sum(table**2))
    np.testing.assert_allclose(columns["gradient_norm"][0], norm, rtol=1e-5)
    assert min(columns["micro_steps_per_sec"]) > 0


def test_metrics_of_a_run_that_went_back_to_a_save_hold_each_update_once(tmp_path):
    estimator = _estimator(tmp_path, csv=tmp_path)
    estimator.train(_input_fn, steps=9)
    checkpoint = tf.train.latest_checkpoint(str(tmp_path))
    estimator.train(lambda: _input_fn(9), steps=11)
    expected = _rows_without_speed(tmp_path)
    # The folder as after a kill at micro-step 20: the metrics have later rows.
    v1.train.update_checkpoint_state(str(tmp_path), checkpoint)
    estimator.train(lambda: _input_fn(9), steps=11)
    assert _rows_without_speed(tmp_path) == expected


def _rows_without_speed(folder):
    names = ("update_step", "loss", "micro_steps")
    return [[row[name] for name in names] for row in _rows(folder)]


def _scalars(folder) -> dict[tuple[str, int], float]:
    """Returns TensorBoard's scalars by name and number of the update."""
    return {
        (tag.removeprefix("accumulation/"), step): value
        for tag, step, value in read_scalars(folder)
    }


def test_metrics_go_to_tensorboard_too(applied):
    scalars = _scalars(applied.model_dir)
    row = _rows(applied.model_dir)[1]
    for name in ("loss", "gradient_norm", "learning_rate", "global_step"):
        np.testing.assert_allclose(scalars[(name, 2)], float(row[name]), rtol=1e-6)


def test_tensorboard_has_what_the_csv_has_no_column_for(tmp_path):
    strategy = two_replicas()
    with tf.Graph().as_default(), strategy.scope():
        slope = v1.placeholder(tf.float32, [])
        steps = v1.placeholder_with_default(np.int64(2), [])
        v1.train.get_or_create_global_step()

        def replica():
            loss = slope * v1.get_variable("x", initializer=0.0)
            options = {"clip_norm": 1.0, "noise_scale": True}
            return make_accumulating_train_op(
                loss, sgd(), lambda update_step: steps, **options
            )

        train_op = strategy.group(strategy.extended.call_for_each_replica(replica))
        hooks = make_accumulation_hooks(
            "apply", metrics_dir=tmp_path, micro_batch_size=8
        )
        with v1.train.MonitoredTrainingSession(hooks=hooks, config=TWO_CPUS) as session:
            for value in (3, 3, 0.5, 0.5):
                session.run(train_op, {slope: value})
            for value, k in ((5, 4), (1, 4), (1, 2), (2, 4)):  # K drops in mid-window
                session.run(train_op, {slope: value, steps: k})
    scalars = _scalars(tmp_path)
    for at, clipped, held in ((1, 1, 2), (2, 0.5, 2), (3, 2 / 3, 3), (4, 0.75, 1)):
        assert scalars[("clipped_share", at)] == pytest.approx(clipped)
        assert scalars[("effective_batch_size", at)] == 2 * 8 * held
        assert scalars[("weight", at)] == 2 * held
    assert scalars[("noise_scale", 1)] == 0
    assert scalars[("noise_scale", 3)] > 0


def test_a_worker_that_is_not_the_chief_writes_no_metrics(tmp_path, monkeypatch):
    extended = type(tf.distribute.get_strategy().extended)
    for is_chief in (False, True):
        monkeypatch.setattr(extended, "should_save_summary", is_chief)
        _train_x(2, lambda: make_accumulation_hooks(metrics_dir=tmp_path))
        assert (tmp_path / "train_metrics.csv").exists() == is_chief


def test_statistics_that_a_checkpoint_lacks_cost_it_no_window(tmp_path):
    """Clipping is switched on in mid-window: only its count starts at 0."""

    def train(clip_norm, micro_steps):
        hooks = functools.partial(make_accumulation_hooks, metrics_dir=tmp_path)
        _train_x(micro_steps, hooks, str(tmp_path), clip_norm)

    def value(name):
        return tf.train.load_variable(str(tmp_path), name)

    train(None, 7)
    assert (value("update_step"), value("accumulation/micro_steps")) == (1, 3)
    train(0.5, 5)
    assert (value("update_step"), value("accumulation/micro_steps")) == (3, 0)
    assert (value("x"), value("accumulation/clipped_updates")) == (-3.0, 2)
    # The update before clipping was switched on counts as not clipped.
    assert _scalars(tmp_path)[("clipped_share", 3)] == pytest.approx(2 / 3)


def test_the_end_of_the_data_moves_nothing(tmp_path, kept):
    """The run that finds no more data fails; not even a decayed slot may differ."""
    one_step = _estimator(tmp_path / "one_step", 1)
    one_step.train(_input_fn, steps=22)
    for steps, by_steps in ((1, one_step), (4, kept)):
        by_data = _estimator(tmp_path / f"data{steps}", steps)
        by_data.train(_input_fn)
        _assert_same(variables_of(by_data), variables_of(by_steps))


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"partial_window": "drop"}, ValueError, "'auto', 'keep' and 'apply'.*'drop'"),
        ({"metrics_dir": 5}, TypeError, "`metrics_dir` must be a path.*Received: 5"),
        ({"total_updates": -1}, ValueError, "`total_updates` must be .*Received: -1"),
        ({"save_on_signal": "never"}, ValueError, "one of False, True and 'update'"),
    ],
)
def test_arguments_of_other_kinds_are_refused(options, error, sentence):
    with pytest.raises(error, match=sentence):
        make_accumulation_hooks(**options)


def test_hooks_without_an_accumulating_train_op_are_refused(tmp_path):
    estimator = _estimator(tmp_path, steps=None)
    with pytest.raises(ValueError, match="needs an accumulating train op that it can"):
        estimator.train(_input_fn, hooks=make_accumulation_hooks(), steps=1)


def test_hooks_without_a_global_step_are_refused():
    with tf.Graph().as_default():
        x = v1.get_variable("x", initializer=0.0)
        train_op = AccumulatingOptimizer(sgd(), 2).minimize(x * 1.0)
        with (
            pytest.raises(ValueError, match=r"needs a global step.*Pass tf\.compat"),
            v1.train.SingularMonitoredSession(hooks=make_accumulation_hooks()) as run,
        ):
            run.run(train_op)


def test_an_own_scaffolds_saver_has_to_be_passed_and_then_works(tmp_path, info_log):
    def train(folder, is_passed):
        def model_fn(features, labels, mode):
            weights = v1.get_variable("weights", [3])
            predicted = tf.linalg.matvec(features["inputs"], weights)
            loss = tf.reduce_mean(tf.square(predicted - labels))
            train_op = make_accumulating_train_op(loss, sgd(0.1), 4)
            saver = v1.train.Saver()
            hooks = make_accumulation_hooks("apply", saver=saver if is_passed else None)
            options = {"scaffold": v1.train.Scaffold(saver=saver), "loss": loss}
            return tf.estimator.EstimatorSpec(
                mode, train_op=train_op, training_hooks=hooks, **options
            )

        estimator = tf.estimator.Estimator(model_fn, str(folder))
        estimator.train(_input_fn, steps=6)
        return estimator.get_variable_value("update_step")

    assert train(tmp_path / "passed", True) == 2
    assert "in no checkpoint" not in info_log.text
    assert train(tmp_path / "not_passed", False) == 1
    assert "in no checkpoint" in info_log.text


def test_an_own_saver_restores_by_names_of_its_own(tmp_path):
    def session(value, has_accumulation):
        x = v1.get_variable("x", initializer=value)
        step = v1.train.get_or_create_global_step()
        saver, hooks = v1.train.Saver({"old/x": x, "global_step": step}), []
        if has_accumulation:
            make_accumulating_train_op(1.0 * x, sgd(), 2)
            hooks = make_accumulation_hooks(saver=saver)
        scaffold = v1.train.Scaffold(saver=saver)
        return x, v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(tmp_path), scaffold=scaffold, hooks=hooks
        )

    with tf.Graph().as_default():
        x, run = session(7.0, False)
        with run:
            run.run(x)
    with tf.Graph().as_default():
        x, run = session(0.0, True)
        with run:
            assert run.run(x) == 7.0


def test_a_run_on_storage_that_only_tensorflow_reads_resumes(tmp_path):
    for updates in (1, 2):
        with tf.Graph().as_default():
            tf.compat.v1.train.get_or_create_global_step()
            weight = tf.compat.v1.get_variable("w", initializer=0.0)
            train_op = make_accumulating_train_op(-weight, sgd(1.0), 2)
            hooks = make_accumulation_hooks()
            with tf.compat.v1.train.MonitoredTrainingSession(
                checkpoint_dir=f"ram:/{tmp_path}", hooks=hooks
            ) as session:
                for _ in range(2):
                    session.run(train_op)
                assert session.run(weight) == updates
