"""A task without progress ends itself; a task with progress runs on."""

import json
import os
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


class _Stops(Watchdog):
    """Remembers the global_step at which it is stopped."""

    def stop(self) -> None:
        super().stop()
        session = tf.compat.v1.get_default_session()
        self.stopped = session.run(tf.compat.v1.train.get_global_step())


@pytest.mark.once
@pytest.mark.parametrize("last", [3, None])
def test_the_watch_ends_with_the_last_update(last):
    """Saving and closing may take any time then; with None another hook stops."""
    with tf.Graph().as_default():
        step = tf.compat.v1.train.create_global_step()
        move, watchdog = step.assign_add(1), _Stops(60, "chief 0")
        hooks = [ProgressHook(watchdog, 0 if last else None, last)]
        hooks.insert(1 if last else 0, tf.compat.v1.train.StopAtStepHook(last_step=3))
        with (
            tf.compat.v1.train.SingularMonitoredSession(hooks) as session,
            session.raw_session().as_default(),
        ):
            while not session.should_stop():
                assert not hasattr(watchdog, "stopped")
                session.run(move)
        assert watchdog.stopped == 3


def _train_as(number, folder, monkeypatch, size=3, in_cluster=True):
    """Returns the hook of a worker of 2 that trains until its data ends."""
    cluster = {"worker": ["a:1", "b:2"]}
    task = {"cluster": cluster, "task": {"type": "worker", "index": number}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(task) if in_cluster else "")
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
    ended = _train_as(1, tmp_path, monkeypatch)
    assert ended._find_reason() is None  # its own end
    assert ended._watchdog._is_stopped.wait(60)  # its session is closed
    waiting = _train_as(0, tmp_path, monkeypatch, size=2)
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
    assert end.read_text() == "3"
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
