"""Watchdog for tasks of a cluster: TensorFlow waits forever for a lost task.

When a task of a cluster dies, the others neither fail nor continue, even after it has
come back; all tasks must restart from the last checkpoint. The launcher, Kubernetes or
Slurm can restart them once every task has ended.
"""

import contextlib
import logging
import os
import pathlib
import secrets
import threading
import time
from collections.abc import Callable

import tensorflow as tf

from estimator_accum.programs.cluster import EXIT_AGAIN, Cluster
from estimator_accum.programs.tf_config import read_json
from estimator_accum.reports._files import path_in

_logger = logging.getLogger("tensorflow.estimator_accum")

_SECS_BETWEEN_LOOKS, _EXIT_REFUSED = 0.5, 2


class Watchdog:
    """Ends this process if `beat` is not called within `deadline_secs`.

    Args:
        deadline_secs: Longest time from one beat to the next [seconds], > 0.
        task: Task name for the final log line.
        watched: File whose modification counts as a beat: an evaluator depends on the
            progress of the other tasks.
        find_reason: Function that returns a sentence if a restart does not help; the
            process then ends with exit code 2. None for no such function.

    Attributes:
        refusal: File with the sentence of a task that will never train; the process then
            ends with exit code 2. None for no such file.
    """

    def __init__(
        self,
        deadline_secs: float,
        task: str,
        watched: pathlib.Path | None = None,
        find_reason: Callable[[], str | None] | None = None,
    ):
        self._deadline_secs = deadline_secs
        self._task = task
        self._watched = watched
        self._find_reason = find_reason
        self.refusal: pathlib.Path | None = None
        self._seen = None
        self._is_over = lambda: False
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

    def stop_when(self, is_over: Callable[[], bool]) -> None:
        """Stops the watch when a function returns True; it replaces the one before."""
        self._is_over = is_over

    def _watch(self) -> None:
        while not self._is_stopped.wait(_SECS_BETWEEN_LOOKS):
            if self._is_over():
                self.stop()
                return
            self._look_at_file()
            if self.refusal is not None and self.refusal.exists():
                refusal = self.refusal.read_text(encoding="utf-8", errors="replace")
                _logger.error("%s", refusal)
                os._exit(_EXIT_REFUSED)
            if time.monotonic() - self._last_beat > self._deadline_secs:
                self._give_up()

    def _give_up(self) -> None:
        reason = self._find_reason and self._find_reason()
        if reason:
            _logger.error("%s", reason)
            os._exit(_EXIT_REFUSED)
        _logger.error(
            "%s has made no progress for %g seconds, and ends itself. All tasks have to "
            "be started again; they resume from the last checkpoint. Where a micro-step "
            "takes that long, use a larger watchdog_secs.",
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

    The watch ends when the session closes: until then the hooks' `end` may save, in which
    all tasks take part. The work behind it needs no other task.

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
        self._coordinator = coord
        self._watchdog.beat()

    def before_run(self, run_context):
        return tf.compat.v1.train.SessionRunArgs(self._global_step)

    def after_run(self, run_context, run_values) -> None:
        if run_values.results > self._furthest:
            self._furthest = run_values.results
            self._watchdog.beat()

    def end(self, session) -> None:
        self._watchdog.beat()
        self._watchdog.stop_when(self._coordinator.should_stop)


class WatchdogHook(tf.compat.v1.train.SessionRunHook):
    """Ends a task of a cluster that waits for another task, which TensorFlow does forever.

        cluster = set_tf_config()
        hooks = [WatchdogHook(model_dir, watchdog_secs=300)]
        train_spec = tf.estimator.TrainSpec(input_fn, max_steps=1000, hooks=hooks)

    For `TrainSpec(hooks=...)` of each task, in scripts of your own. The process ends
    with exit code 75 if `global_step` stays for `watchdog_secs`, since all tasks must be
    started again, or with 2 if the data of another worker has ended, which the last line
    of the log names. In a process alone, or with an evaluator alone, the
    hook does nothing.

    Args:
        model_dir: Folder of the Estimator, which all tasks share.
        watchdog_secs: Longest time from one micro-step to the next, such as that of a
            checkpoint's save or of the first micro-step [seconds], > 0.

    Raises:
        ValueError: If `watchdog_secs` is not positive, or `model_dir` begins with ~ or is
            an address without its second slash; later, when training begins, if
            `TF_CONFIG` describes a cluster that cannot train.
    """

    def __init__(self, model_dir: str | os.PathLike, watchdog_secs: float = 300):
        if not watchdog_secs > 0:
            raise ValueError(
                "`watchdog_secs` must be a number > 0. "
                f"Received: {watchdog_secs}. Use the seconds of the longest micro-step."
            )
        self._model_dir, self._watchdog_secs = path_in(model_dir), watchdog_secs
        self._watchdog = None

    def begin(self) -> None:
        cluster = Cluster()
        if os.environ.get("TF_CONFIG"):
            cluster = read_json(os.environ["TF_CONFIG"])
        if self._watchdog is not None:  # of a session that could not be created
            self._watchdog.stop()
        self._cluster, self._watchdog = cluster, None
        others = cluster.num_workers - 1 + len(cluster.servers)
        if not others or cluster.is_evaluator:  # nobody waits for an evaluator
            return
        self._global_step = tf.compat.v1.train.get_global_step()
        self._furthest, self._is_running, self._has_ended = -1, False, False
        end = self._end_of(cluster.name)
        if tf.io.gfile.exists(end):
            tf.io.gfile.remove(end)
        # Files of the start before: no task ends before all have begun.
        self._ends_before = self._ends_of_others()
        self._watchdog = Watchdog(
            self._watchdog_secs, cluster.name, find_reason=self._find_reason
        )
        self._watchdog.start()

    def after_create_session(self, session, coord) -> None:
        self._coordinator = coord
        if self._watchdog is None:
            return
        # TensorFlow calls no hook after an error, but unlocks the graph. While a session
        # is replaced, which waits for the other tasks, the graph stays locked.
        self._watchdog.stop_when(
            lambda: coord.should_stop() and not session.graph.finalized
        )

    def before_run(self, run_context):
        if self._watchdog is None:
            return None
        self._is_running = True
        return tf.compat.v1.train.SessionRunArgs(self._global_step)

    def after_run(self, run_context, run_values) -> None:
        self._is_running = False
        if self._watchdog is not None and run_values.results > self._furthest:
            self._furthest = run_values.results
            self._watchdog.beat()

    def end(self, session) -> None:
        if self._watchdog is None:
            return
        self._watchdog.beat()
        self._has_ended = True
        if self._is_running and not self._cluster.servers:  # the data has ended
            global_step = session.run(self._global_step)
            with tf.io.gfile.GFile(self._end_of(self._cluster.name), "w") as file:
                file.write(f"{global_step:,} {secrets.token_hex(4)}")  # unlike before
        self._watchdog.stop_when(self._coordinator.should_stop)  # all hooks have ended

    def _end_of(self, task: str) -> str:
        return os.path.join(self._model_dir, f".end_of_{task.replace(' ', '_')}")

    def _ends_of_others(self) -> dict[str, str]:
        """Returns the files of the other tasks whose data has ended, by task."""
        cluster, ends = self._cluster, {}
        names = [f"worker {index}" for index in range(len(cluster.workers))]
        names += ["chief 0"] if cluster.chief else []
        for name in sorted({*names} - {cluster.name}):
            with (
                contextlib.suppress(tf.errors.NotFoundError),
                tf.io.gfile.GFile(self._end_of(name)) as file,
            ):
                ends[name] = file.read()
        return ends

    def _find_reason(self) -> str | None:
        """Returns the sentence about another worker whose data has ended.

        After its own end a task waits for others in the last save alone, which a restart
        repeats. Steps tell nothing: within a window workers need not wait for each other.
        """
        if self._has_ended:
            return None
        try:
            for name, end in self._ends_of_others().items():
                if end and end != self._ends_before.get(name):
                    return _ended_early(name, end.split()[0], self._cluster.name)
        except tf.errors.OpError:
            _logger.exception("%s cannot be read", self._model_dir)
        return None


def _ended_early(task: str, micro_step: str, waiting: str) -> str:
    return (
        "All workers must have the same number of batches. Received: "
        f"{task}, whose data has ended at global_step {micro_step}, while {waiting} has "
        "more. Repeat the data and set max_steps, or give each worker the same number "
        "of batches."
    )


class EvaluationHook(tf.compat.v1.train.SessionRunHook):
    """Beats at every batch of an evaluation."""

    def __init__(self, watchdog: Watchdog):
        self._watchdog = watchdog

    def after_run(self, run_context, run_values) -> None:
        self._watchdog.beat()
