"""Watchdog for tasks of a cluster: TensorFlow waits forever for a lost task.

When a task of a cluster dies, the others neither fail nor continue, even after it has
come back; all tasks must restart from the last checkpoint. The launcher, Kubernetes or
Slurm can restart them once every task has ended.
"""

import logging
import os
import pathlib
import threading
import time

import tensorflow as tf

from estimator_accum.programs.cluster import EXIT_AGAIN

_logger = logging.getLogger("tensorflow.estimator_accum")

_SECS_BETWEEN_LOOKS, _EXIT_REFUSED = 0.5, 2


class Watchdog:
    """Ends this process if `beat` is not called within `deadline_secs`.

    Args:
        deadline_secs: Longest time from one beat to the next [seconds], > 0.
        task: Task name for the final log line.
        watched: File whose modification counts as a beat: an evaluator depends on the
            progress of the other tasks.

    Attributes:
        refusal: File with the sentence of a task that will never train; the process then
            ends with exit code 2. None for no such file.
    """

    def __init__(
        self, deadline_secs: float, task: str, watched: pathlib.Path | None = None
    ):
        self._deadline_secs = deadline_secs
        self._task = task
        self._watched = watched
        self.refusal: pathlib.Path | None = None
        self._seen = None
        self._is_stopped = threading.Event()
        self.beat()

    def start(self) -> None:
        """Starts the watch."""
        self.beat()
        threading.Thread(target=self._watch, daemon=True).start()

    def beat(self) -> None:
        """Reports progress."""
        self._last_beat = time.monotonic()

    def stop(self) -> None:
        """Stops the watch, before work that needs no other task."""
        self._is_stopped.set()

    def _watch(self) -> None:
        while not self._is_stopped.wait(_SECS_BETWEEN_LOOKS):
            self._look_at_file()
            if self.refusal is not None and self.refusal.exists():
                _logger.error("%s", self.refusal.read_text())
                os._exit(_EXIT_REFUSED)
            if time.monotonic() - self._last_beat > self._deadline_secs:
                _logger.error(
                    "%s has made no progress for %g seconds, and ends itself. All "
                    "tasks have to be started again; they resume from the last "
                    "checkpoint. Where a micro-step takes that long, use a larger "
                    "--watchdog_secs.",
                    self._task,
                    self._deadline_secs,
                )
                os._exit(EXIT_AGAIN)  # TensorFlow's threads would keep it alive

    def _look_at_file(self) -> None:
        if self._watched is None:
            return
        try:
            seen = self._watched.stat().st_mtime_ns
        except OSError:
            return
        if seen != self._seen:
            self._seen = seen
            self.beat()


class LostTaskError(RuntimeError):
    """Another task of the cluster has ended, and this one cannot continue."""


class ProgressHook(tf.compat.v1.train.SessionRunHook):
    """Beats at every micro-step beyond the furthest one so far.

    A task may also lose another one without waiting: its session is then recreated
    again and again. `LostTaskError` ends that, since all tasks must restart.

    Args:
        watchdog: The watchdog to beat.
        first_global_step: `global_step` at which the examples start [micro-steps];
            None with parameter servers, where other workers move it.
    """

    def __init__(self, watchdog: Watchdog, first_global_step: int | None):
        self._watchdog = watchdog
        self._first_global_step, self._furthest = first_global_step, 0
        self._has_session = False

    def begin(self) -> None:
        self._global_step = tf.compat.v1.train.get_global_step()

    def after_create_session(self, session, coord) -> None:
        global_step = session.run(self._global_step)
        if self._has_session or self._first_global_step not in (None, global_step):
            raise LostTaskError(
                "Training must continue in one session, from the micro-step that the "
                f"examples begin at. Received: micro-step {global_step} in a new "
                "session, after another task was lost. Start all tasks again."
            )
        self._has_session, self._furthest = True, global_step
        self._watchdog.beat()

    def before_run(self, run_context):
        return tf.compat.v1.train.SessionRunArgs(self._global_step)

    def after_run(self, run_context, run_values) -> None:
        if run_values.results > self._furthest:
            self._furthest = run_values.results
            self._watchdog.beat()


class EvaluationHook(tf.compat.v1.train.SessionRunHook):
    """Beats at every batch of an evaluation."""

    def __init__(self, watchdog: Watchdog):
        self._watchdog = watchdog

    def after_run(self, run_context, run_values) -> None:
        self._watchdog.beat()
