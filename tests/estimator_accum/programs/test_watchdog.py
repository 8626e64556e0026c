"""A task without progress ends itself; a task with progress runs on."""

import contextlib
import json
import os
import pathlib
import threading
import types

import pytest
import tensorflow as tf

from estimator_accum import WatchdogHook
from estimator_accum.programs import watchdog as watchdog_module
from estimator_accum.programs.cluster import EXIT_AGAIN
from estimator_accum.programs.watchdog import LostTaskError, ProgressHook, Watchdog
from tests.helpers.processes import running

_WAITER = """
import time
from estimator_accum.programs.watchdog import Watchdog
Watchdog(0.1, "worker 1").start()
while True: time.sleep(1)
"""


def test_task_that_waits_ends_itself_with_75_and_a_sentence():
    done = running.run("-c", _WAITER)
    assert done.returncode == EXIT_AGAIN == 75
    assert "worker 1 has made no progress for 0.1 seconds, and ends" in done.stderr


class _Looks:
    """Replaces the event that ends the watch; each wait takes 2 fake seconds."""

    def __init__(self, watched, grows: int, looks: int):
        self.secs, self._watched, self._grows, self._looks = 0, watched, grows, looks

    def wait(self, secs: float) -> bool:
        assert secs > 0
        self.secs += 2
        if self.secs <= 2 * self._grows:
            self._watched.write_text("row" * self.secs)
            os.utime(self._watched, ns=(0, self.secs))
        return self.secs > 2 * self._looks


@pytest.mark.parametrize(("looks", "ends"), [(6, False), (7, True)])
def test_growing_file_beats_and_stop_ends_the_watch(tmp_path, monkeypatch, looks, ends):
    """The file grows for 10 of 12 or 14 seconds; 3 without growth are allowed."""
    events = _Looks(tmp_path / "metrics.csv", 5, looks)
    codes = []
    clock = types.SimpleNamespace(monotonic=lambda: events.secs)
    monkeypatch.setattr(watchdog_module, "time", clock)
    monkeypatch.setattr(watchdog_module.os, "_exit", codes.append)
    watchdog = Watchdog(3, "worker 1", tmp_path / "metrics.csv")
    watchdog._is_stopped = events
    watchdog._watch()
    assert codes == [EXIT_AGAIN] * ends


class _Beats(Watchdog):
    count = -1  # the constructor calls beat()

    def beat(self) -> None:
        super().beat()
        self.count += 1


def test_only_micro_steps_that_are_further_than_any_before_beat():
    with tf.Graph().as_default():
        watchdog = _Beats(60, "worker 0")
        hook = ProgressHook(watchdog, 0)
        step = tf.compat.v1.train.create_global_step()
        move = {1: step.assign_add(1), -1: step.assign_sub(1)}
        read = step.read_value()
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
            assert watchdog.count == 1  # the session
            for way, wanted in ((1, 2), (0, 2), (1, 3), (-1, 3), (0, 3), (1, 3)):
                if way:
                    session._tf_sess().run(move[way])
                session.run(read)
                assert watchdog.count == wanted


def test_session_that_starts_elsewhere_than_the_examples_is_refused():
    sentence = r"Received: micro-step 0 in a new session, after another task was lost"
    with tf.Graph().as_default(), pytest.raises(LostTaskError, match=sentence):
        tf.compat.v1.train.create_global_step()
        hook = ProgressHook(Watchdog(60, "worker 0"), 8)
        tf.compat.v1.train.MonitoredSession(hooks=[hook])


@pytest.mark.parametrize("first_global_step", [0, None])
def test_second_session_is_refused(first_global_step):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.train.create_global_step().initializer)
        hook = ProgressHook(Watchdog(60, "worker 0"), first_global_step)
        hook.begin()
        hook.after_create_session(session, None)
        with pytest.raises(LostTaskError, match=r"Start all tasks again\."):
            hook.after_create_session(session, None)


def test_refusal_of_another_task_ends_this_one_with_2(tmp_path, monkeypatch):
    (tmp_path / "refusal").write_text("worker 1: other flags")
    events = _Looks(tmp_path / "metrics.csv", 0, 1)
    codes = []
    monkeypatch.setattr(watchdog_module.os, "_exit", codes.append)
    watchdog = Watchdog(60, "chief 0")
    watchdog._is_stopped, watchdog.refusal = events, tmp_path / "refusal"
    watchdog._watch()
    assert codes == [2]


class _Saver(tf.compat.v1.train.SessionRunHook):
    """Looks at the watch of a hook where TensorFlow's saver, a later hook, saves."""

    def __init__(self, is_over):
        self._is_over, self.looks = is_over, []

    def after_run(self, run_context, run_values) -> None:
        self.looks.append(self._is_over())

    def end(self, session) -> None:
        self.looks.append(self._is_over())


def _is_over(watchdog, monkeypatch) -> bool:
    """Returns whether one look of a task that makes no progress leaves it alone."""
    codes = []
    watchdog._deadline_secs, watchdog._is_stopped = -1, threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(watchdog_module, "_SECS_BETWEEN_LOOKS", 0)
        patch.setattr(watchdog_module.os, "_exit", lambda code: _end(watchdog, codes))
        watchdog._watch()
    return not codes


def _end(watchdog, codes) -> None:
    codes.append(0)
    watchdog.stop()


@pytest.fixture
def unwatched(monkeypatch):
    """Starts no threads: `_is_over` looks."""
    monkeypatch.setattr(Watchdog, "start", Watchdog.beat)


@pytest.mark.once
def test_the_last_save_is_watched_and_nothing_behind_the_session(monkeypatch):
    """All tasks take part in a save; evaluation and export need no other task."""
    with tf.Graph().as_default():
        step = tf.compat.v1.train.create_global_step()
        move, watchdog = step.assign_add(1), Watchdog(60, "chief 0")
        saver = _Saver(lambda: _is_over(watchdog, monkeypatch))
        stop = tf.compat.v1.train.StopAtStepHook(last_step=2)
        hooks = [stop, ProgressHook(watchdog, 0), saver]
        with tf.compat.v1.train.MonitoredSession(hooks=hooks) as session:
            while not session.should_stop():
                session.run(move)
    assert saver.looks == [False] * 3
    assert _is_over(watchdog, monkeypatch)


class _Fails(tf.compat.v1.train.SessionRunHook):
    """Fails in the third micro-step, and looks at the watch while there is a session."""

    def __init__(self, error, is_over):
        self._error, self._is_over = error, is_over
        self.looks, self._count = [], 0

    def after_create_session(self, session, coord) -> None:
        self.looks.append(self._is_over())

    def before_run(self, run_context) -> None:
        self._count += 1
        if self._count == 3:
            raise self._error


@pytest.mark.once
@pytest.mark.parametrize("is_lost", [False, True])
def test_an_error_ends_the_watch_and_a_session_that_is_replaced_does_not(
    tmp_path, monkeypatch, unwatched, is_lost
):
    """A new session waits for the task that was lost."""
    _set_task(0, monkeypatch)
    hook = WatchdogHook(tmp_path, 10**6)
    error = tf.errors.UnavailableError(None, None, "") if is_lost else ValueError()
    fails = _Fails(error, lambda: _is_over(hook._watchdog, monkeypatch))
    with tf.Graph().as_default():
        step = tf.compat.v1.train.create_global_step()
        move = step.assign_add(1)
        stop = tf.compat.v1.train.StopAtStepHook(last_step=4)
        refused = contextlib.nullcontext() if is_lost else pytest.raises(ValueError)
        with (
            refused,
            tf.compat.v1.train.MonitoredSession(hooks=[fails, hook, stop]) as session,
        ):
            while not session.should_stop():
                session.run(move)
    assert fails.looks == [False] * (1 + is_lost)
    assert _is_over(hook._watchdog, monkeypatch)


@pytest.mark.once
def test_a_second_training_with_a_hook_stops_the_watch_of_the_first(
    tmp_path, monkeypatch, unwatched
):
    """The session of the first could not be created."""
    _set_task(0, monkeypatch)
    hook = WatchdogHook(tmp_path, 60)
    with tf.Graph().as_default():
        tf.compat.v1.train.create_global_step()
        hook.begin()
        first = hook._watchdog
        hook.begin()
    assert first._is_stopped.is_set() and not hook._watchdog._is_stopped.is_set()


@pytest.mark.once
def test_an_end_of_the_start_before_is_not_believed(tmp_path, monkeypatch, unwatched):
    """A worker that died before it could remove its file is a lost task."""
    _train_as(1, tmp_path, monkeypatch)
    waiting = _begin_as(0, tmp_path, monkeypatch)
    assert waiting._find_reason() is None
    _train_as(1, tmp_path, monkeypatch)  # ends at the same global_step
    assert "Received: worker 1, whose data has ended" in waiting._find_reason()


def _set_task(number, monkeypatch) -> None:
    """Makes this process a worker of 2."""
    cluster = {"worker": ["a:1", "b:2"]}
    task = {"cluster": cluster, "task": {"type": "worker", "index": number}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))


def _begin_as(number, folder, monkeypatch):
    """Returns the hook of a worker of 2 that waits in its training."""
    _set_task(number, monkeypatch)
    hook = WatchdogHook(folder, 10**6)
    with tf.Graph().as_default():
        tf.compat.v1.train.create_global_step()
        hook.begin()
    return hook


def _train_as(number, folder, monkeypatch, size=3, in_cluster=True):
    """Returns the hook of a worker of 2 that trains until its data ends."""
    if in_cluster:
        _set_task(number, monkeypatch)
    else:
        monkeypatch.setenv("TF_CONFIG", "")
    hook = WatchdogHook(folder, 10**6)
    with tf.Graph().as_default():
        step = tf.compat.v1.train.create_global_step()
        data = tf.data.Dataset.range(size)
        batch = tf.compat.v1.data.make_one_shot_iterator(data).get_next()
        with tf.control_dependencies([batch]):
            move = step.assign_add(1)
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
            while not session.should_stop():
                session.run(move)
    return hook


@pytest.mark.once
def test_a_worker_whose_data_ends_before_the_others_is_named(tmp_path, monkeypatch):
    codes, logged = [], []
    monkeypatch.setattr(watchdog_module.os, "_exit", codes.append)
    monkeypatch.setattr(watchdog_module._logger, "error", lambda *a: logged.append(a))
    waiting = _begin_as(0, tmp_path, monkeypatch)
    waiting._watchdog.stop()  # this test looks in its place
    ended = _train_as(1, tmp_path, monkeypatch)
    assert ended._find_reason() is None  # its own end
    assert ended._watchdog._is_stopped.wait(60)  # its session is closed
    sentence = (
        "Received: worker 1, whose data has ended at global_step 3, while worker 0"
    )
    assert sentence in waiting._find_reason()
    waiting._watchdog._is_stopped = _Looks(tmp_path, 0, 1)
    waiting._watchdog._deadline_secs = -1
    waiting._watchdog._watch()
    assert codes[0] == 2 and sentence in logged[0][1]
    (tmp_path / ".end_of_worker_1").unlink()  # as it does when it starts again
    waiting._watchdog._is_stopped = _Looks(tmp_path, 0, 1)
    waiting._watchdog._watch()
    assert EXIT_AGAIN in codes


@pytest.mark.once
def test_workers_whose_data_has_ended_start_again_if_one_is_lost_in_the_last_save(
    tmp_path, monkeypatch, unwatched
):
    surviving = _train_as(0, tmp_path, monkeypatch)
    _train_as(1, tmp_path, monkeypatch)
    assert surviving._find_reason() is None


@pytest.mark.once
def test_a_chief_with_an_evaluator_alone_has_no_watch(tmp_path, monkeypatch):
    cluster = {"chief": ["a:1"], "evaluator": ["b:2"]}
    task = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task))
    hook = WatchdogHook(tmp_path, 10**6)
    hook.begin()
    assert hook._watchdog is None


@pytest.mark.once
def test_one_process_has_no_watch_and_an_end_of_a_start_before_is_removed(
    tmp_path, monkeypatch
):
    assert _train_as(0, tmp_path, monkeypatch, in_cluster=False)._watchdog is None
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("TF_CONFIG", '{"model_dir": "/run"}')
    WatchdogHook(tmp_path, 60).begin()
    assert not list(tmp_path.iterdir())
    _train_as(0, tmp_path, monkeypatch)
    end = tmp_path / ".end_of_worker_0"
    assert end.read_text().startswith("3 ")
    hook = WatchdogHook(tmp_path, 60)
    with tf.Graph().as_default():
        tf.compat.v1.train.create_global_step()
        hook.begin()
    hook._watchdog.stop()
    assert not end.exists()


@pytest.mark.once
def test_a_deadline_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="must be a number > 0. Received: 0. Use"):
        WatchdogHook(tmp_path, 0)


@pytest.mark.once
@pytest.mark.parametrize("folder", ["~/run", pathlib.Path("gs://bucket/run")])
def test_a_folder_must_be_the_estimators_own(folder):
    with pytest.raises(ValueError, match="of a folder must .* Received: "):
        WatchdogHook(folder)
