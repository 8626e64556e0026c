"""Hooks of an accumulating run: partial windows, progress, metrics.

Order around one micro-step, as TensorFlow calls it:

    before_run    asks for the window's scalars beside the train op
    session.run   gradients -> accumulate -> (boundary: update) -> global_step += 1
    after_run     reports the update, if the micro-step was a window boundary

and when training ends, whether at the last micro-step or at the end of the data:

    CheckpointSaverHook.end -> saver.save     "apply": the partial window first
    AccumulationHook.end                      says what became of the partial window

A run that ends with an error has no `end`: its partial window is that of its last
checkpoint.
"""

import logging
import os

import tensorflow as tf

from estimator_accum.checkpoints import SaveWatch, WindowlessRestore, get_or_add_saver
from estimator_accum.reporting import MetricsFile, Progress, Update
from estimator_accum.window import Window, get_windows

_logger = logging.getLogger("tensorflow.estimator_accum")

_PARTIAL_WINDOW_CHOICES = ("keep", "apply")


def make_accumulation_hooks(
    partial_window: str = "keep",
    *,
    metrics_dir: str | os.PathLike | None = None,
    learning_rate: tf.Tensor | None = None,
    weight_unit: str = "micro_steps",
    total_updates: int | None = None,
    saver: tf.compat.v1.train.Saver | None = None,
) -> list[tf.compat.v1.train.SessionRunHook]:
    """Makes the hooks of a run that trains with `make_accumulating_train_op`.

    For `EstimatorSpec.training_hooks`, `Estimator.train(hooks=...)` or a
    MonitoredTrainingSession. With them, a checkpoint that was trained without
    accumulation resumes with it, with an empty window.

    Args:
        partial_window: What becomes of fewer than K micro-steps that are left when
            training ends. "keep": the final checkpoint holds them, and the next
            `train` goes on in mid-window as if it had never stopped. "apply": they are
            applied, divided by their own weight, and the final checkpoint holds the
            result.
        metrics_dir: Folder for `train_metrics.csv` and TensorBoard events with a
            row an update; None writes neither.
        learning_rate: Scalar that the rows report.
        weight_unit: What `weight` counts, the name of a column: "examples", "tokens";
            "micro_steps" where no weight is given.
        total_updates: Updates of the whole run, for the progress bar's remaining time.
        saver: Your own `Scaffold`'s Saver, if it has one; None finds the Estimator's.

    Returns:
        The hooks, in the order in which they have to stand.

    Raises:
        ValueError: If `partial_window` is not "keep" or "apply"; later, when training
            begins, if the graph has no accumulating train op.
    """
    if partial_window not in _PARTIAL_WINDOW_CHOICES:
        raise ValueError(
            "`partial_window` must be one of 'keep' and 'apply'. "
            f"Received: {partial_window!r}. Use 'keep' to go on in mid-window later."
        )
    reports = [Progress(total_updates)]
    if metrics_dir is not None:
        reports.append(MetricsFile(metrics_dir, weight_unit))
    return [AccumulationHook(partial_window, learning_rate, reports, saver)]


class AccumulationHook(tf.compat.v1.train.SessionRunHook):
    """Decides what becomes of a partial window, and reports every update.

    Args:
        partial_window: "keep" or "apply".
        learning_rate: Scalar Tensor to report; None reports none.
        reports: Objects with open(update_step), write(Update) and close().
        saver: The Saver of the run; None finds it in the graph.
    """

    def __init__(self, partial_window, learning_rate, reports, saver):
        self._applies = partial_window == "apply"
        self._learning_rate = learning_rate
        self._reports = reports
        self._saver = saver

    def begin(self) -> None:
        self._windows = get_windows()
        if not self._windows:
            raise ValueError(
                "make_accumulation_hooks needs a train op of "
                "make_accumulating_train_op. Received: a graph without one. "
                "Make the train op in this model_fn, or leave the hooks out."
            )
        saver = self._saver or get_or_add_saver()
        state = {id(v): v for window in self._windows for v in window.state}
        WindowlessRestore(saver, list(state.values()), self._windows[0].update_step)
        self._watch = SaveWatch(saver, self._before_save)
        self._session = self._saved_session = self._last_global_step = None
        self._fetches = _fetches(self._windows[0], self._learning_rate)

    def after_create_session(self, session, coord) -> None:
        del coord
        self._session = session
        self._last_global_step = None
        # CheckpointSaverHook saves when a session is created: has it come before us?
        self._is_saved_before_end = self._saved_session is session
        update_step = int(session.run(self._windows[0].update_step))
        for report in self._reports:
            report.open(update_step)

    def before_run(self, run_context):
        del run_context
        return tf.compat.v1.train.SessionRunArgs(self._fetches)

    def after_run(self, run_context, run_values) -> None:
        del run_context
        self._last_global_step = run_values.results["global_step"]
        if run_values.results["is_boundary"]:
            self._report(run_values.results)

    def end(self, session) -> None:
        if self._applies:
            if self._apply_partial_windows(session):
                global_step = session.run(self._windows[0].global_step)
                if not self._watch.save_again(session, global_step):
                    _logger.warning(
                        "the applied window is in no checkpoint: none was written "
                        "through the Saver that make_accumulation_hooks found. Pass "
                        "the Saver of your own Scaffold as `saver`."
                    )
        else:
            for window, open_steps, steps in self._partial_windows(session):
                _logger.info(
                    "partial window of %s: %d of %d micro-steps kept in the "
                    "checkpoint; the next train() goes on in mid-window.",
                    window.name,
                    open_steps,
                    steps,
                )
        for report in self._reports:
            report.close()

    def _before_save(self, session) -> None:
        self._saved_session = session
        if not self._applies or session is not self._session:
            return
        if not self._is_saved_before_end:
            return  # the hook that saves comes after this one, and so does its end()
        # A save in mid-training is made before our after_run has seen the micro-step.
        if session.run(self._windows[0].global_step) == self._last_global_step:
            self._apply_partial_windows(session)

    def _apply_partial_windows(self, session) -> bool:
        partial = self._partial_windows(session)
        for window, open_steps, steps in partial:
            # The boundary branch depends on `is_boundary` alone: no micro-batch is read.
            fetches = _fetches(window, self._learning_rate)
            fetches["global_step"] = window.global_step  # not moved by it
            result = session.run(fetches, {window.is_boundary: True})
            _logger.info(
                "partial window of %s: %d of %d micro-steps applied as update %d, "
                "divided by their own weight.",
                window.name,
                open_steps,
                steps,
                result["update_step"],
            )
            if window is self._windows[0]:
                self._report(result)
        return bool(partial)

    def _partial_windows(self, session) -> list[tuple[Window, int, int]]:
        found = []
        for window in self._windows:
            if window.micro_steps is None:
                continue
            open_steps, steps = session.run([window.micro_steps, window.steps])
            if open_steps:
                found.append((window, int(open_steps), int(steps)))
        return found

    def _report(self, values: dict) -> None:
        update = Update(
            update_step=int(values["update_step"]),
            global_step=int(values["global_step"]),
            loss=float(values["loss"]),
            gradient_norm=float(values["gradient_norm"]),
            weight=float(values["weight"]),
            learning_rate=(
                float(values["learning_rate"]) if "learning_rate" in values else None
            ),
        )
        for report in self._reports:
            report.write(update)


def _fetches(window: Window, learning_rate: tf.Tensor | None) -> dict:
    fetches = {
        "is_boundary": window.is_boundary,
        "loss": window.loss,
        "gradient_norm": window.gradient_norm,
        "weight": window.weight,
        "update_step": window.update_step_after,
        "global_step": window.global_step_after,
    }
    if learning_rate is not None:
        fetches["learning_rate"] = learning_rate
    return fetches
