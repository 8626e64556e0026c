"""save_on_signal: training that a signal stops resumes as if there were no signal."""

import os
import signal
import threading

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    get_or_create_update_step,
    make_accumulating_train_op,
    make_accumulation_hooks,
    watch_signals,
)
from estimator_accum.compat import enable_estimator
from tests.helpers.models.replicas import TWO_CPUS, two_replicas
from tests.helpers.processes import running

pytestmark = pytest.mark.once

enable_estimator()
v1 = tf.compat.v1
K, MICRO_STEPS = 4, 14
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_UNWATCHED = signal.getsignal(signal.SIGTERM)
X = np.random.default_rng(0).normal(size=[MICRO_STEPS, 3]).astype(np.float32)


class _Fail(v1.train.SessionRunHook):
    def after_run(self, run_context, run_values):
        raise ArithmeticError


class _Send(v1.train.SessionRunHook):
    """Sends a signal after a micro-step."""

    def __init__(self, number, micro_step):
        self._number, self._left = number, micro_step
        self.has_ended = False

    def after_run(self, run_context, run_values):
        self._left -= 1
        if self._left == 0:
            running.signal_training(self._number)

    def end(self, session):
        self.has_ended = True


def _train(folder, *hooks, behind=(), config=None, **options):
    """Trains from the last checkpoint to the end of the data."""

    def model_fn(features, labels, mode):
        w = v1.get_variable("w", initializer=[1.0, 2.0, 3.0])
        loss = tf.square(tf.tensordot(features, w, 1) - 1.0)
        rate = v1.train.polynomial_decay(0.1, get_or_create_update_step(), 5)
        train_op = make_accumulating_train_op(loss, v1.train.AdamOptimizer(rate), K)
        options.setdefault("save_on_signal", True)
        ours = make_accumulation_hooks(metrics_dir=folder, **options)
        # The signal is sent before the library's hooks see the end of the micro-step.
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=train_op, training_hooks=[*hooks, *ours, *behind]
        )

    done = _values(folder, "global_step").get("global_step", 0)
    estimator = tf.estimator.Estimator(model_fn, str(folder), config)
    estimator.train(lambda: tf.data.Dataset.from_tensor_slices((X[done:], X[done:, 0])))


def _values(folder, *names):
    path = tf.train.latest_checkpoint(str(folder))
    if path is None:
        return {}
    reader = tf.train.load_checkpoint(path)
    names = names or reader.get_variable_to_shape_map()
    return {name: reader.get_tensor(name) for name in names}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    _train(folder)
    return _values(folder), _rows(folder)


def _rows(folder):
    """Returns the rows of the metrics, without their speeds."""
    rows = np.genfromtxt(folder / "train_metrics.csv", delimiter=",", skip_header=1)
    return rows[:, :-1]


@pytest.mark.parametrize(
    "number, code, micro_step, options, said",
    [
        (signal.SIGTERM, 143, 6, {}, "saved at update 1, micro-step 2 of 4; the same"),
        (signal.SIGINT, 130, 1, {}, "saved at update 0, micro-step 1 of 4; the same"),
        (signal.SIGUSR1, 75, 4, {}, "saved at update 1; the same command resumes."),
        (signal.SIGTERM, 143, 6, {"save_on_signal": "update"}, "saved at update 2; t"),
        (signal.SIGTERM, 143, 6, {"partial_window": "apply"}, "micro-step 2 of 4"),
    ],
)
def test_a_run_that_a_signal_stops_goes_on_bit_for_bit(
    number, code, micro_step, options, said, undisturbed, tmp_path, caplog
):
    handlers = [signal.getsignal(number) for number in _SIGNALS]
    send = _Send(number, micro_step)
    with pytest.raises(SystemExit) as stopped:
        _train(tmp_path, send, **options)
    assert stopped.value.code == code and send.has_ended
    assert said in caplog.messages[-1]
    done = micro_step if options != {"save_on_signal": "update"} else 8
    assert _values(tmp_path)["global_step"] == done
    assert handlers == [signal.getsignal(number) for number in _SIGNALS]
    _train(tmp_path, **options)
    values = _values(tmp_path)
    for name, value in undisturbed[0].items():
        np.testing.assert_array_equal(values[name], value, err_msg=name)
    np.testing.assert_array_equal(_rows(tmp_path), undisturbed[1])


def test_a_signal_stops_a_loop_that_runs_any_train_op(fresh_graph, tmp_path, caplog):
    train_ops = []
    for name in "wv":
        variable = v1.get_variable(name, initializer=0.0)
        optimizer = v1.train.GradientDescentOptimizer(1.0)
        train_ops.append(
            make_accumulating_train_op(-variable, optimizer, K, var_list=[variable])
        )
    hooks = [_Send(signal.SIGTERM, 6), *make_accumulation_hooks(save_on_signal=True)]
    with (
        pytest.raises(SystemExit),
        v1.train.MonitoredTrainingSession(checkpoint_dir=tmp_path, hooks=hooks) as run,
    ):
        for _ in range(MICRO_STEPS):
            if not run.should_stop():
                run.run(train_ops[1])
    assert _values(tmp_path)["global_step"] == 6
    assert "saved at update 1, micro-step 2 of 4; the same" in caplog.messages[-1]


def test_several_replicas_stop_after_the_window(tmp_path):
    config = tf.estimator.RunConfig(
        train_distribute=two_replicas(), session_config=TWO_CPUS
    )
    with pytest.raises(SystemExit):
        _train(tmp_path, _Send(signal.SIGTERM, 2), config=config)
    assert _values(tmp_path)["global_step"] == 4


def test_nothing_is_called_saved_before_it_is(tmp_path, caplog):
    class FullDisk(v1.train.CheckpointSaverHook):
        def end(self, session):
            assert "saved at" not in caplog.text
            raise OSError("full")

    saver = FullDisk(str(tmp_path), save_steps=100)
    with pytest.raises(OSError, match="full"):
        _train(tmp_path, _Send(signal.SIGTERM, 2), behind=[saver])
    assert "saved at" not in caplog.text


def test_a_signal_before_the_last_save_of_a_later_hook_waits_for_it(
    undisturbed, tmp_path
):
    class Late(v1.train.CheckpointSaverHook):
        def end(self, session):
            running.signal_training(signal.SIGTERM)
            super().end(session)

    def too_early(*_):
        raise InterruptedError

    signal.signal(signal.SIGTERM, too_early)
    try:
        with pytest.raises(SystemExit, match="143"):
            _train(tmp_path, behind=[Late(str(tmp_path), save_steps=100)])
        assert signal.getsignal(signal.SIGTERM) == too_early
    finally:
        signal.signal(signal.SIGTERM, _UNWATCHED)
    np.testing.assert_array_equal(_values(tmp_path)["w"], undisturbed[0]["w"])


def test_training_in_another_thread_ends_the_main_one(undisturbed, tmp_path):
    watch_signals()
    assert signal.getsignal(signal.SIGTERM) != _UNWATCHED
    args = (tmp_path, _Send(signal.SIGTERM, 6))
    thread = threading.Thread(target=_train, args=args)
    with pytest.raises(SystemExit) as stopped:
        thread.start()
        running.wait_until(lambda: False)
    assert stopped.value.code == 143
    assert _values(tmp_path)["global_step"] == 6
    assert signal.getsignal(signal.SIGTERM) == _UNWATCHED


def test_training_in_another_thread_that_nobody_watches_says_so(tmp_path, caplog):
    thread = threading.Thread(target=_train, args=[tmp_path])
    thread.start()
    thread.join()
    assert "Call estimator_accum.watch_signals() there before" in caplog.text
    assert _values(tmp_path)["global_step"] == MICRO_STEPS


def test_watching_signals_in_another_thread_is_refused():
    has_refused = threading.Event()

    def watch():
        with pytest.raises(ValueError, match="must be called in the main thread"):
            watch_signals()
        has_refused.set()

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert has_refused.is_set()


def test_signals_do_what_they_did_where_training_has_failed(tmp_path):
    received = []

    def note(number, frame):
        received.append(number)

    before = signal.signal(signal.SIGUSR1, note)
    try:
        with pytest.raises(ArithmeticError):
            _train(tmp_path, _Fail())
        # After an error no hook's end() runs.
        assert signal.getsignal(signal.SIGUSR1) != note
        os.kill(os.getpid(), signal.SIGUSR1)
        running.wait_until(lambda: received)
        assert received == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) == note
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_training_after_one_that_failed_hears_signals(tmp_path):
    with pytest.raises(ArithmeticError):
        _train(tmp_path / "failed", _Fail())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # by other code
    with pytest.raises(SystemExit):
        _train(tmp_path / "next", _Send(signal.SIGINT, 2))
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_second_signal_ends_a_micro_step_that_computes(tmp_path):
    program = f"""
import sys, pathlib
sys.path.insert(0, {str(running.ROOT)!r})
import tensorflow as tf
from tests.estimator_accum.hooks import test_signals
class Stay(tf.compat.v1.train.SessionRunHook):
    def begin(self):
        self.never = tf.queue.FIFOQueue(1, tf.float32).dequeue()
    def before_run(self, run_context):
        pathlib.Path({str(tmp_path / "computes")!r}).touch()
        return tf.compat.v1.train.SessionRunArgs(self.never)
test_signals._train(pathlib.Path({str(tmp_path)!r}), Stay())
"""
    with running.start("-c", program) as run:
        running.wait_until((tmp_path / "computes").exists, run)
        run.process.send_signal(signal.SIGUSR1)
        running.wait_until(lambda: "a second signal" in run.done().stderr, run)
        assert run.process.poll() is None
        run.process.send_signal(signal.SIGTERM)
        assert run.wait().returncode == 143
