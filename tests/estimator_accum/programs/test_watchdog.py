"""A task without progress ends itself; a task with progress runs on."""

import os
import types

import pytest
import tensorflow as tf

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
