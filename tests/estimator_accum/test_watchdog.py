"""A task that makes no progress ends itself; one that does is left alone."""

import subprocess
import sys

import pytest
import tensorflow as tf

from estimator_accum.watchdog import EXIT_CODE, LostTaskError, ProgressHook, Watchdog

_WAITER = """
import pathlib, sys, time
from estimator_accum.watchdog import Watchdog
watched = pathlib.Path(sys.argv[1])
watchdog = Watchdog(3, "worker 1", watched)
watchdog.start()
print("started", flush=True)
{then}
time.sleep(60)
"""


def _waiter(then: str, watched) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", _WAITER.format(then=then), str(watched)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.once
def test_task_that_waits_ends_itself_with_75_and_a_sentence(tmp_path):
    process = _waiter("", tmp_path / "none")
    try:
        _, errors = process.communicate(timeout=50)
    finally:
        process.kill()
    assert process.returncode == EXIT_CODE == 75
    assert "worker 1 has made no progress for 3 seconds, and ends itself" in errors


@pytest.mark.slow
@pytest.mark.once
def test_growing_file_beats_and_stop_ends_the_watch(tmp_path):
    watched = tmp_path / "metrics.csv"
    waiting = "for _ in range(60): watched.open('a').write('row'); time.sleep(0.1)"
    process = _waiter(
        f"{waiting}\nwatchdog.stop(); print('alive'); sys.exit(7)", watched
    )
    try:
        output, _ = process.communicate(timeout=50)
    finally:
        process.kill()
    assert process.returncode == 7 and "alive" in output


class _Beats(Watchdog):
    count = -1  # the constructor beats

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


def test_second_session_is_refused():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.train.create_global_step().initializer)
        hook = ProgressHook(Watchdog(60, "worker 0"), 0)
        hook.begin()
        hook.after_create_session(session, None)
        with pytest.raises(LostTaskError, match=r"Start all tasks again\."):
            hook.after_create_session(session, None)
