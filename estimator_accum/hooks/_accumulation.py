"""Hooks of an accumulating run: partial windows, progress, metrics.

Order around one micro-step, as TensorFlow calls it:

    before_run    fetches the window's scalars too, if the caller runs the train op
    session.run   gradients -> accumulate -> (boundary: update) -> global_step += 1
    after_run     reports the update, if the micro-step was a window boundary

The hook adds nothing to a `session.run` of anything else. If a graph has several
accumulating train ops, each is reported when it is run.

When training ends, either at the last micro-step or at the end of the data:

    CheckpointSaverHook.end -> saver.save     the partial window first, if it is applied
    AccumulationHook.end                      logs whether it was kept or applied

`_end_of_data.py` finds whether the data has ended.

A run that ends with an error does not call `end`: its partial window is the one in its
last checkpoint.
"""

import logging
import numbers
import os
import re
from collections.abc import Callable, Sequence

import tensorflow as tf

from estimator_accum.checks.before_runs import note_hooks
from estimator_accum.core.clock import EveryKRuns, EveryRun
from estimator_accum.core.registry import Window, get_windows
from estimator_accum.graph.functions import kinds_in, library_of_functions
from estimator_accum.graph.internals import context_of
from estimator_accum.graph.names import TAKING_A_BATCH
from estimator_accum.graph.variables import find_global_step
from estimator_accum.graph.walks import ancestors, fetched_operations
from estimator_accum.hooks._checkpoints import (
    SaveWatch,
    WindowlessRestore,
    check_is_saved,
    get_or_add_saver,
    keep_initial_values,
)
from estimator_accum.hooks._end_of_data import EndOfData
from estimator_accum.hooks._reported import ReportedWindow
from estimator_accum.hooks._signals import SignalStop
from estimator_accum.hooks._summary import TrainingSummary
from estimator_accum.reports import CsvReport, Report, TensorBoardReport
from estimator_accum.reports._progress import ProgressReport

_logger = logging.getLogger("tensorflow.estimator_accum")

# Operations that take a batch from outside of the graph.
_READERS = re.compile(f"{TAKING_A_BATCH.pattern}|.*PyFunc")
_PARTIAL_WINDOW_CHOICES = ("auto", "keep", "apply")


def make_accumulation_hooks(
    partial_window: str = "auto",
    *,
    metrics_dir: str | os.PathLike | None = None,
    reports: Sequence[Report] = (),
    learning_rate: tf.Tensor | float | None = None,
    weight_unit: str = "micro_steps",
    micro_batch_size: int | None = None,
    total_updates: int | None = None,
    saver: tf.compat.v1.train.Saver | None = None,
    save_on_signal: bool | str = False,
) -> list[tf.compat.v1.train.SessionRunHook]:
    """Makes the hooks of a run that trains with `make_accumulating_train_op`.

    For `EstimatorSpec.training_hooks`, `Estimator.train(hooks=...)` or a
    MonitoredTrainingSession. With them, a run resumes with accumulation, from an empty
    window, even if its checkpoint was trained without. A line at the start has the
    effective batch, one at the end the updates, their speed, the peak memory and the
    micro-steps of the open window; the logger `tensorflow.estimator_accum.summary` has
    both.

    Args:
        partial_window: Treatment of a partial window, the fewer than K micro-steps that
            are left when training ends. "keep": the final checkpoint holds them, and
            the next `train` resumes in mid-window as if it had never stopped. "apply":
            they are applied, divided by their own weight, and the final checkpoint
            holds the result. "auto": applied if the data ends, as the big batch would
            be; kept if training stops for another reason, such as `steps`, `max_steps`
            or a hook that requests it, or the end of data that the train op was not fed
            with. With `save_on_signal` a signal keeps it in each
            case.
        metrics_dir: Folder for `train_metrics.csv` and TensorBoard events, one row per
            update; None writes neither. Each further accumulating train op of the graph
            has its own `train_metrics_<name>.csv`. In a cluster only the chief writes.
        reports: Further reports of the graph's first train op, such as
            `estimator_accum.reports.MlflowReport`; in a cluster only the chief's.
        learning_rate: Scalar that the reports of the first train op have.
        weight_unit: Unit of `weight` and name of a column: "examples", "tokens";
            "micro_steps" if no weight is given.
        micro_batch_size: Examples per replica in a micro-step, to report the effective
            batch size; None if weights count examples.
        total_updates: Updates of the whole run, for the progress bar's remaining time.
        saver: Your own `Scaffold`'s Saver, if it has one; None finds the Estimator's.
        save_on_signal: Whether SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 stop training with
            a checkpoint. True: after the micro-step, in mid-window. "update", and with
            several replicas always: after the window, the same one on all of them.
            `train` then raises SystemExit with code 143, 130 or 75, after every hook
            has ended; a second signal ends the process immediately. If training does not
            run in the main thread, see `watch_signals`.

    Returns:
        The hooks, in the order in which they must be passed.

    Raises:
        TypeError: If `metrics_dir` is not a path, `learning_rate` not a scalar or
            `reports` not a list of reports.
        ValueError: If `partial_window` or `save_on_signal` is not one of these values,
            or `total_updates` < 1; later, when training begins, if the graph has no
            accumulating train op or no global step, and errors of `Report.check`.
    """
    _check_arguments(
        partial_window,
        save_on_signal,
        metrics_dir,
        reports,
        learning_rate,
        total_updates,
    )
    summary = TrainingSummary(weight_unit, micro_batch_size)

    def make_reports(name: str | None) -> list[Report]:
        items: list[Report] = [ProgressReport(total_updates)] if name is None else []
        if not tf.distribute.get_strategy().extended.should_save_summary:
            return items
        if not get_windows()[0].place.may_be_of_chief:
            return [*items, *[summary] * (name is None)]
        if metrics_dir is not None:
            items += [
                CsvReport(metrics_dir, weight_unit, name),
                TensorBoardReport(metrics_dir, weight_unit, micro_batch_size, name),
            ]
        if name is not None:
            return items
        # A whole batch has a hook of its own, with the same two lines.
        is_stepwise = isinstance(get_windows()[0].clock, EveryRun | EveryKRuns)
        return [*items, *[summary] * is_stepwise, *reports]

    signals = SignalStop(save_on_signal == "update") if save_on_signal else None
    hook = AccumulationHook(
        partial_window, learning_rate, make_reports, summary, saver, signals
    )
    return [hook]


def _check_arguments(
    partial_window, save_on_signal, metrics_dir, reports, learning_rate, total_updates
) -> None:
    if partial_window not in _PARTIAL_WINDOW_CHOICES:
        raise ValueError(
            "`partial_window` must be one of 'auto', 'keep' and 'apply'. "
            f"Received: {partial_window!r}. Use 'keep' to resume in mid-window later."
        )
    if save_on_signal not in (False, True, "update"):
        raise ValueError(
            "`save_on_signal` must be one of False, True and 'update'. "
            f"Received: {save_on_signal!r}. Use True to lose no micro-step."
        )
    if metrics_dir is not None and not isinstance(metrics_dir, str | os.PathLike):
        raise TypeError(
            "`metrics_dir` must be a path or None. "
            f"Received: {metrics_dir!r}. Pass the Estimator's model_dir, for example."
        )
    _check_learning_rate(learning_rate)
    _check_reports(reports)
    if total_updates is not None and total_updates < 1:
        raise ValueError(
            "`total_updates` must be an integer >= 1 or None. "
            f"Received: {total_updates}. Pass None if the total is unknown."
        )


def _check_learning_rate(learning_rate) -> None:
    is_number = isinstance(learning_rate, numbers.Real)
    if learning_rate is None or (is_number and not isinstance(learning_rate, bool)):
        return
    shape = getattr(learning_rate, "shape", None)
    if shape is None or tf.TensorShape(shape).rank not in (0, None):
        raise TypeError(
            "`learning_rate` must be a scalar Tensor, a number or None. "
            f"Received: {learning_rate!r}. Pass the value that the optimizer has."
        )


def _check_reports(reports: Sequence[Report]) -> None:
    rule = (
        "`reports` must be a list of objects with the methods check, open, write and "
        "close."
    )
    remedy = "Make them from subclasses of estimator_accum.reports.Report."
    if not isinstance(reports, list | tuple):
        raise TypeError(f"{rule} Received: {reports!r}. {remedy}")
    for report in reports:
        if isinstance(report, type) or not isinstance(report, Report):
            raise TypeError(f"{rule} Received: {report!r} in the list. {remedy}")


class AccumulationHook(tf.compat.v1.train.SessionRunHook):
    """Keeps or applies a partial window, and reports every update.

    Args:
        partial_window: "auto", "keep" or "apply".
        learning_rate: Scalar to report; None reports none.
        make_reports: Returns the reports of a train op. Its argument is None for the
            graph's first train op, else the train op's name.
        summary: One of those reports, or none of them, to be told of the first window.
        saver: The Saver of the run; None finds it in the graph.
        signals: Stops training when a signal arrives; None ignores signals.
    """

    def __init__(
        self,
        partial_window: str,
        learning_rate: tf.Tensor | float | None,
        make_reports: Callable[[str | None], list[Report]],
        summary: TrainingSummary,
        saver: tf.compat.v1.train.Saver | None,
        signals: SignalStop | None = None,
    ):
        self._partial_window = partial_window
        self._learning_rate = learning_rate
        self._make_reports = make_reports
        self._summary = summary
        self._saver = saver
        self._signals = signals
        self._is_stopped = False  # by a signal

    def begin(self) -> None:
        windows = get_windows()
        _check_windows(windows, self._partial_window)
        note_hooks(tf.compat.v1.get_default_graph())
        self._global_step = _global_step_of(windows[0])
        self._place = windows[0].place
        keep_initial_values(windows)
        saver = self._saver or get_or_add_saver()
        WindowlessRestore(saver, windows)
        self._watch = SaveWatch(saver, self._before_save)
        self._session = self._coordinator = self._run_context = None
        first, *further = windows
        learning_rate = self._learning_rate
        if learning_rate is not None:
            with tf.control_dependencies(None):
                learning_rate = tf.convert_to_tensor(learning_rate)
        self._windows = [
            ReportedWindow(first, self._make_reports(None), learning_rate),
            *(
                ReportedWindow(window, self._make_reports(window.name), None)
                for window in further
            ),
        ]
        self._known_requests, self._requested = {}, []
        self._is_stopped = False
        if self._signals is not None:
            self._signals.begin()

    def after_create_session(self, session, coord) -> None:
        self._session, self._coordinator = session, coord
        self._run_context = None
        self._is_seen = False  # a run of a train op
        self._data = EndOfData()
        self._last_global_step, self._last_held = session.run(self._global_step), 0
        if self._signals is not None:
            self._signals.open(coord)
        self._is_chief = self._place.is_of_chief or self._watch.has_saved
        for window in self._windows:
            if not self._is_chief:
                window.leave_to_chief()
            window.open(session)
        first = self._windows[0]
        self._summary.describe(first.window, *first.held(session))

    def before_run(self, run_context):
        if self._run_context is None:
            check_is_saved(self._watch)
            for window in self._windows:  # other hooks may have set variables
                window.count_from_here(run_context.session)
        self._note_the_end()
        self._run_context = run_context
        self._requested, request, has_reader = self._windows_that_run(run_context)
        self._is_seen |= bool(self._requested)
        arguments = run_context.original_args
        feeds = list((arguments.feed_dict or {}).values())
        self._data.start(None if self._requested else request, has_reader, feeds)
        if not self._requested:
            if not has_reader:
                return None
            # The caller's own values: a session returns one array for a tensor.
            return tf.compat.v1.train.SessionRunArgs(arguments.fetches)
        fetched = [window.fetched for window in self._requested]
        return tf.compat.v1.train.SessionRunArgs(fetched, self._stop_requests())

    def _stop_requests(self) -> dict | None:
        """Returns the feeds that tell the other tasks of a cluster of a signal."""
        if self._signals is None or not self._signals.is_asked:
            return None
        requests = [reported.window.stop_request for reported in self._requested]
        return {request: 1.0 for request in requests if request is not None}

    def after_run(self, run_context, run_values) -> None:
        self._data.finish(run_values.results)
        if not self._requested:
            if self._stops_behind_other_runs(run_context.session):
                self._is_stopped = True
                run_context.request_stop()
            return
        for window, fetched in zip(self._requested, run_values.results, strict=True):
            values = window.take(fetched)
            if "global_step" in values:
                self._last_global_step = int(values["global_step"])
            else:  # the caller counts it, after the train op
                self._last_global_step = run_context.session.run(self._global_step)
            if values["has_updated"]:
                window.report(values, self._last_global_step)
            if window is self._windows[0]:
                held = int(values["micro_batches"])
                self._last_held = 0 if values["is_boundary"] else held
            if window is self._requested[0] and self._signals is not None:
                self._is_stopped |= self._stops_after(window.window, values)
        if self._is_stopped:
            run_context.request_stop()

    def _stops_after(self, window: Window, values: dict) -> bool:
        """Returns whether a signal ends training now; the same in all replicas."""
        if window.stop_request is not None:
            return values["stop_requests"] > 0
        is_inside = not values["is_boundary"]
        is_saved = window.num_replicas == 1 and not self._place.is_on_worker
        if is_inside and (self._signals.stops_at_update or not is_saved):
            return False
        return self._signals.is_asked

    def _stops_behind_other_runs(self, session) -> bool:
        """Returns whether a signal ends training by runs that hooks do not see.

        One device needs no agreement with others on the run that is the last.
        """
        if self._is_seen or self._signals is None or not self._signals.is_asked:
            return False
        window = self._windows[0].window
        if window.num_replicas > 1 or self._place.is_on_worker:
            return False
        if not any(w.unreported_updates(session) > 0 for w in self._windows):
            return False
        is_inside = any(w.held(session)[0] for w in self._windows)
        return not (is_inside and self._signals.stops_at_update)

    def _note_the_end(self) -> None:
        """Notes the run before, if it did not finish."""
        context = self._run_context
        self._data.note(context is not None and context.stop_requested)

    def _windows_that_run(
        self, run_context
    ) -> tuple[list[ReportedWindow], tuple, bool]:
        """Returns the windows whose train op the caller runs, and all that it fetches.

        The last item is whether the run takes a batch from outside of the graph.
        """
        graph, arguments = run_context.session.graph, run_context.original_args
        operations = fetched_operations(graph, arguments.fetches)
        fed = set(fetched_operations(graph, list(arguments.feed_dict or ())))
        request = tuple(operation.name for operation in operations)
        key = request, frozenset(fed)
        if key not in self._known_requests:
            windows = [w for w in self._windows if w.runs_with(ancestors(operations))]
            needed = ancestors(operations, lambda operation: operation not in fed)
            readers = TAKING_A_BATCH if windows else _READERS
            library = library_of_functions(graph)
            kinds = {kind for op in needed for kind in kinds_in(op, library)}
            has_reader = any(map(readers.match, kinds))
            self._known_requests[key] = windows, request, has_reader
        return self._known_requests[key]

    def end(self, session) -> None:
        self._count_unreported(session)
        if self._applies_at_the_end():
            if self._apply_partial_windows(session):
                self._watch.save_again(session, self._last_step(session))
                if not self._watch.has_saved and self._is_chief:
                    _logger.warning(
                        "the applied window is in no checkpoint: none was written "
                        "through the Saver that make_accumulation_hooks found. Pass "
                        "the Saver of your own Scaffold as `saver`."
                    )
        else:
            kept = [window.log_kept(session) for window in self._windows]
            self._summary.keep(*kept[0])
            if self._partial_window == "auto" and any(held for held, _ in kept):
                self._data.warn_of_unknown()
        for window in self._windows:
            window.close()
        if self._is_stopped or self._signals is not None:
            self._end_signals(session)

    def _count_unreported(self, session) -> None:
        """Logs updates that no report shows; the summary's last line counts them."""
        for reported in self._windows:
            updates = reported.unreported_updates(session)
            if updates > 0:
                _logger.warning(
                    "%s: no report shows %d updates of runs that hooks do not see, such "
                    "as those of another hook.",
                    reported.window.name,
                    updates,
                )
                if reported is self._windows[0]:
                    self._summary.note_last(
                        int(session.run(reported.window.update_step))
                    )

    def _end_signals(self, session) -> None:
        """Ends training if there was a signal, also one before a later hook's save."""
        if self._is_stopped or self._signals.is_asked:
            self._end_for_signal(session)
        elif self._is_saved_later(session):
            self._watch.after_next_save = lambda: self._end_signals(session)
        else:
            self._signals.close()

    def _is_saved_later(self, session) -> bool:
        is_saved = self._watch.has_saved_at(self._last_step(session))
        return self._watch.has_saved and not is_saved

    def _end_for_signal(self, session) -> None:
        """Logs the saved position and ends training, after the save."""
        if not self._watch.has_saved:
            who = "this run" if self._is_chief else "this task, not the chief,"
            _logger.warning("not saved: %s writes no checkpoints.", who)
            self._signals.stop()
            return
        last = (self._requested or self._windows)[0]
        place = f"update {int(session.run(last.window.update_step)):,}"
        held, steps = last.held(session)
        if held:
            place += f", micro-step {held} of {steps}"

        def finish() -> None:
            _logger.warning("saved at %s; the same command resumes.", place)
            self._signals.stop()

        if self._is_saved_later(session):  # or the error of that hook ends training
            self._watch.after_next_save = finish
        else:
            finish()

    def _last_step(self, session) -> int:
        """Returns global_step after this task's last micro-step."""
        if self._place.is_on_worker:  # others move it
            return self._last_global_step
        return session.run(self._global_step)

    def _before_save(self, session) -> int:
        if session is self._session and self._is_final_save(session):
            self._apply_partial_windows(session)
        return session.run(self._global_step)

    def _applies_at_the_end(self) -> bool:
        if self._is_stopped:
            return False
        if self._partial_window == "auto":
            self._note_the_end()
            return self._data.has_ended()
        return self._partial_window == "apply"

    def _is_final_save(self, session) -> bool:
        """Returns whether this save is the last, and a partial window is applied."""
        if self._run_context is None or self._data.is_training is False:
            return False  # `end` saves again if necessary
        if not self._applies_at_the_end():
            return False
        if self._data.is_training:
            # Either the data has ended, or an earlier hook saves right after this
            # micro-step.
            if self._place.is_on_worker:  # others move global_step
                return self._windows[0].held(session)[0] == self._last_held
            return session.run(self._global_step) == self._last_global_step
        return self._run_context.stop_requested or self._coordinator.should_stop()

    def _apply_partial_windows(self, session) -> bool:
        """Applies the partial windows; returns whether there are any."""
        is_any = False
        # The first window comes last: it moves update_step, which the others read.
        for window in reversed(self._windows):
            is_any |= window.apply_partial(session, self._last_global_step)
        return is_any


def _check_windows(windows: list, partial_window: str) -> None:
    """Raises ValueError if hooks cannot run the train ops, or keep their windows."""
    if not (windows and all(map(_can_be_run, windows))):
        raise ValueError(
            "make_accumulation_hooks needs an accumulating train op that it can "
            "run. Received: a graph without one, or with one inside a tf.cond or "
            "a loop. Make the train op in this model_fn, outside of both, with a "
            "loss-scaling optimizer inside AccumulatingOptimizer, not around it; "
            "or leave the hooks out."
        )
    is_lost = windows[0].micro_steps is not None and windows[0].place.is_on_worker
    if is_lost and partial_window == "keep":
        raise ValueError(
            "`partial_window` must be 'auto' or 'apply' with parameter servers, where "
            "no checkpoint holds a worker's window. Received: 'keep'. Use 'apply' to "
            "lose no micro-step of a training that ends."
        )


def _global_step_of(window) -> tf.Variable:
    """Returns the global step that a train op counts, or else the graph's."""
    step = find_global_step() if window.global_step is None else window.global_step
    if step is None:
        raise ValueError(
            "make_accumulation_hooks needs a global step. Received: a graph without "
            "one. Pass tf.compat.v1.train.get_or_create_global_step() to minimize()."
        )
    return step


def _can_be_run(window: Window) -> bool:
    """Returns whether a session can fetch it: not in a function, branch or loop."""
    operation = window.is_boundary.op
    is_inside = context_of(operation) is not None
    return operation.graph is tf.compat.v1.get_default_graph() and not is_inside
