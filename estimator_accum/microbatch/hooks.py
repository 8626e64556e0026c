"""Hooks that run a batch's micro-batches before Estimator's own run.

    session.run   the fetches of the caller and of all hooks are known (Outside)
                  the micro-batches of the next batch (BatchRunner)
                  fetched values of micro-batches, for the whole batch
                  Estimator's own run:
                  training      the mean gradient, one update, global_step += 1
                  evaluation    operations of the whole batch, such as the mean loss
                  prediction    the batch's predictions, with which the run is fed

Estimator's own run is never retried.

N = number of examples in the batch.
"""

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from estimator_accum.core.registry import get_windows
from estimator_accum.graph.internals import calls_end, config_of
from estimator_accum.graph.variables import find_global_step
from estimator_accum.graph.walks import ancestors
from estimator_accum.hooks._checkpoints import WindowlessRestore, get_or_add_saver
from estimator_accum.hooks._summary import TrainingSummary, Update
from estimator_accum.microbatch.count import MicroBatchCount, is_out_of_memory
from estimator_accum.microbatch.executors import Feeding
from estimator_accum.microbatch.histograms import sum_of_histograms
from estimator_accum.microbatch.outside import Needs, Outside
from estimator_accum.microbatch.replica import ReplicaBatch, StepPhase
from estimator_accum.microbatch.runner import BatchRunner, names_of

_logger = logging.getLogger("tensorflow.estimator_accum")
_TRACED = (
    "micro-batches: a hook that traces runs, as ProfilerHook does, sees the end of each "
    "batch alone, in training the update: the micro-batches run before. Train without "
    "micro-batches to trace the model."
)
_FETCHED = (
    "micro-batches: hooks or summaries fetch all rows of the whole batch, which takes the "
    "memory that splitting saves: for %s, %s of shape %s. Leave them out, summarize means "
    "of the rows, or take their number from tf.shape of a feature."
)


class MicroBatchHook(tf.compat.v1.train.SessionRunHook):
    """Runs the micro-batches of each batch of an evaluation.

    It stands in for the session's `run`, where the fetches of all hooks are known.

    Args:
        replicas: The replicas of this process; the list is complete when the hook
            begins.
        count: The number of micro-batches.
        find_rows: As for `Outside`.
    """

    _PLACE = "batch {} of the evaluation"  # in messages

    def __init__(
        self, replicas: list[ReplicaBatch], count: MicroBatchCount, find_rows: Callable
    ):
        self._runner = BatchRunner(replicas, count, self._summarize)
        self._replicas, self._count, self._find_rows = replicas, count, find_rows
        self._given = []  # tensors that it feeds besides
        self._phases, self._earlier = [], []  # those before the last, and their runners
        self._is_traced = False  # whether a hook has traced a run
        self._named = set()  # tensors that a warning has named

    def begin(self) -> None:
        for runner in (*self._earlier, self._runner):
            runner.begin()
        phases = self._phases
        self._outside = Outside(self._replicas, self._given, self._find_rows, phases)

    def after_create_session(self, session, coord) -> None:
        del coord
        self.take_over(session)
        self._batch = 0

    def take_over(self, session) -> None:
        """Prepares a new session, and replaces its method `run`, once."""
        if getattr(session.run, "func", None) != self._run:
            for runner in (*self._earlier, self._runner):
                runner.initialize(session, config_of(session))
            session.run = functools.partial(self._run, session, session.run)

    def before_run(self, run_context):
        del run_context
        return tf.compat.v1.train.SessionRunArgs([])  # marks the batch's own run

    def after_run(self, run_context, run_values) -> None:
        del run_context, run_values
        if self._count.count_update(self._place):
            self._summarize()

    def _run(
        self, session, run, fetches, feed_dict=None, options=None, run_metadata=None
    ):
        """Stands in for `run`, a session's own method."""
        if not isinstance(fetches, dict) or self not in fetches:
            if self._outside.needs_batch(fetches):
                fetch = functools.partial(
                    run, options=options, run_metadata=run_metadata
                )
                return self._run_at_end(session, fetch, fetches, feed_dict or {})
            return run(fetches, feed_dict, options, run_metadata)
        if options is not None and options.trace_level and not self._is_traced:
            self._is_traced = True
            _logger.warning(_TRACED)
        feed_dict = feed_dict or {}
        self._outside.check_feeds(feed_dict)
        needs = self._outside.needs(fetches)
        self._batch += 1
        self._place = self._PLACE.format(self._batch)
        executor = Feeding(run, feed_dict)
        feeds = feed_dict | self._run_batch(executor, needs)
        results = run(fetches, feeds, options, run_metadata)
        self._runner.is_open = False
        return _scalars(results)

    def _run_at_end(self, session, run: Callable, fetches, feed_dict: dict):
        """Runs `fetches` of a hook's `end` on the last batch, with the last weights."""
        if not self._runner.rows or not calls_end():
            self._outside.refuse_other_run(fetches)
        self._outside.check_feeds(feed_dict)
        needs, kept = self._outside.needs_at_end(fetches)
        session = Feeding(run, feed_dict)
        values = session.run(list(kept.values()))
        taken = dict(zip(names_of(kept), values, strict=True))
        rows = [[tensor for tensor, _ in rows] for rows in needs.rows]
        feeds, fetched = self._runner.run_again(session, self._place, rows)
        feeds |= taken
        feeds |= self._values(session, needs, feeds, fetched)
        return _scalars(session.run(fetches, feeds))

    def _run_batch(self, session, needs: Needs) -> dict:
        """Runs the next batch's micro-batches; returns the feeds of its own run."""
        fetches = [[tensor for tensor, _ in rows] for rows in needs.rows]
        before, executor, taken = self._run_earlier(session, needs.taken)
        feeds, fetched = self._runner.run(executor, self._place, taken, fetches)
        feeds = before | feeds
        return feeds | self._values(session, needs, feeds, fetched)

    def _run_earlier(self, session, taken: list[tf.Tensor]) -> tuple:
        """Runs all phases but the last.

        Returns:
            (feeds of the batch's own run; the session of the last phase's passes; the
            tensors of the input pipeline that these are still to take).
        """
        values, inputs, executor = {}, {}, session
        for i, runner in enumerate(self._earlier):
            phase, after = self._phases[i : i + 2]
            feeds, _ = runner.run(executor, self._place, taken, [[]])
            values |= feeds
            kept, _ = session.run((phase.kept, phase.changes), values)
            runner.is_open = False
            values |= dict(zip(names_of(phase.kept), kept, strict=True))
            fed = names_of((*phase.kept, *after.earlier, *taken))
            inputs |= {name: values[name] for name in fed}
            (shapes,) = runner.shapes  # of the batch that is staged
            names, taken = names_of(after.replicas[0].batch.stage[0]), []
            shapes_by_name = dict(zip(names, shapes, strict=True))
            executor = Feeding(session.run, inputs | shapes_by_name)
        return values, executor, taken

    def _values(self, session, needs: Needs, feeds: dict, fetched: list) -> dict:
        """Returns the values of `needs.values` for the batch.

        Args:
            session: The session.
            needs: Tensors that the batch's own run needs.
            feeds: Feeds of that run.
            fetched: Values of `needs.rows`, for each replica and micro-batch.
        """
        if not needs.values:
            return {}
        joined = {}
        for rows, parts in zip(needs.rows, fetched, strict=True):
            for i, (tensor, axis) in enumerate(rows if parts else ()):
                concatenate = functools.partial(np.concatenate, axis=axis)
                join = sum_of_histograms if axis is None else concatenate
                joined[tensor.name] = join([values[i] for values in parts])
        self._warn_of_rows(needs, joined)
        try:
            values = session.run(needs.values, feeds | joined)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            names = _computed_from(getattr(error, "op", None), needs)
            raise ValueError(
                "Tensors that hooks and summaries compute from all examples must fit in "
                f"memory. Received: {names} at {self._place}, for which it ran out. Fetch "
                "the tensor from which it is computed, or use smaller batches."
            ) from error
        return dict(zip(names_of(needs.values), values, strict=True))

    def _warn_of_rows(self, needs: Needs, joined: dict) -> None:
        """Names tensors that are fetched for all examples, and larger than the batch."""
        for tensor, _ in itertools.chain(*needs.rows):
            name, values = tensor.name, joined.get(tensor.name, ())
            if np.size(values) > self._runner.numbers and name not in self._named:
                self._named.add(name)
                users = _computed_from(tensor.op, needs)
                _logger.warning(_FETCHED, users, name, list(values.shape))

    def _summarize(self) -> None:
        """Does nothing: only training has summaries of the number of micro-batches."""


class EarlyHook(tf.compat.v1.train.SessionRunHook):
    """Has a hook take over each new session before the hooks of `Estimator.train`.

    Otherwise their `after_create_session` would run a batch without its micro-batches.
    Estimator calls first the hooks that only a chief has, but for workers of a
    MultiWorkerMirroredStrategy, where hooks of `train` come before.
    """

    def __init__(self, hook: MicroBatchHook):
        self._hook = hook

    def after_create_session(self, session, coord) -> None:
        del coord
        self._hook.take_over(session)


class TrainingHook(MicroBatchHook):
    """Makes each run of the train op one update with a whole batch.

    Args:
        replicas: The replicas of this process; the list is complete when training
            begins.
        count: The number of micro-batches.
        find_rows: As for `Outside`.
        saver: The Saver of the run; None finds it in the graph.
        summary_dir: Folder for the TensorBoard scalars `accumulation/micro_batches`
            and, for models with layers to recompute, `accumulation/recompute`; None
            writes none.
        phases: The phases of a model_fn with an optimizer of its own. All but the last
            run before the batch's own run.
    """

    _PLACE = "update {}"

    def __init__(
        self,
        replicas: list[ReplicaBatch],
        count: MicroBatchCount,
        find_rows: Callable,
        saver: tf.compat.v1.train.Saver | None,
        summary_dir: str | None,
        phases: list[StepPhase],
    ):
        super().__init__(replicas, count, find_rows)
        self._phases = phases
        self._earlier = [
            BatchRunner(phase.replicas, count, self._summarize) for phase in phases[:-1]
        ]
        self._saver = saver
        self._summary_dir = summary_dir

    def begin(self) -> None:
        windows, self._clock = get_windows(), find_global_step()
        if windows:  # else the model_fn has an optimizer without a window
            WindowlessRestore(self._saver or get_or_add_saver(), windows)
            self._clock = windows[0].update_step
        self._summary = TrainingSummary("examples")
        self._summary.check()
        self._is_chief = tf.distribute.get_strategy().extended.should_save_summary
        super().begin()

    def after_create_session(self, session, coord) -> None:
        super().after_create_session(session, coord)
        self._batch = int(session.run(self._clock))
        self._summary.open(self._batch)
        self._since = time.perf_counter()
        self._summarize()

    def _run_batch(self, session, needs: Needs) -> dict:
        feeds = super()._run_batch(session, needs)
        if self._is_chief:
            self._summary.write_batch(self._described_batch())
        return feeds

    def after_run(self, run_context, run_values) -> None:
        super().after_run(run_context, run_values)
        now, rows = time.perf_counter(), sum(self._runner.rows)
        nan, secs = math.nan, now - self._since
        self._summary.write(Update(self._batch, self._batch, nan, nan, rows, secs=secs))
        self._since = now

    def end(self, session) -> None:
        if self._is_chief:
            self._summary.open(int(session.run(self._clock)))
            self._summary.close(self._count.outcome)

    def _described_batch(self) -> str:
        rows = self._runner.rows
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        name = "effective batch" if replicas == len(rows) else "batch of this task"
        return f"{name} {self._count.describe(rows)}"

    def _summarize(self) -> None:
        if self._summary_dir is None:
            return
        scalars = {"micro_batches": self._count.value}
        if self._count.can_recompute:
            scalars["recompute"] = self._count.recompute
        summary = tf.compat.v1.Summary()
        for name, value in scalars.items():
            summary.value.add(tag=f"accumulation/{name}", simple_value=value)
        writer = tf.compat.v1.summary.FileWriterCache.get(self._summary_dir)
        writer.add_summary(summary, self._batch)
        writer.flush()  # the next error may be the last


class PredictionHook(MicroBatchHook):
    """Joins the predictions of each batch's micro-batches.

    A session returns a fetched tensor that is also fed as it is, and computes nothing
    for it. So copies of the model's own tensors are fed.

    Args:
        replica: The only replica, since Estimator predicts without a strategy.
        count: The number of micro-batches.
        find_rows: As for `Outside`.
        predictions: `EstimatorSpec.predictions`, a Tensor or Tensors by name.

    Attributes:
        predictions: The predictions for Estimator to fetch. Those that do not depend on
            the micro-batch are the model's own.
    """

    _PLACE = "batch {} of the prediction"

    def __init__(
        self,
        replica: ReplicaBatch,
        count: MicroBatchCount,
        find_rows: Callable,
        predictions,
    ):
        super().__init__([replica], count, find_rows)
        self._size, begin = replica.batch.size, replica.batch.begin.op
        is_dict = isinstance(predictions, dict)
        named = predictions if is_dict else {None: predictions}
        copies = {
            key: tf.identity(tensor)
            for key, tensor in named.items()
            if begin in ancestors([tensor.op])
        }
        self._names = {
            tensor.ref(): "predictions" if key is None else f"predictions[{key!r}]"
            for key, tensor in copies.items()
        }
        self._given = list(copies.values())
        named = named | copies
        self.predictions = named if is_dict else named[None]

    def _run_batch(self, session, needs: Needs) -> dict:
        # Estimator.predict leaves out what `predict_keys` does not name.
        ((*rows,),) = needs.rows
        wanted = [*(tensor for tensor, _ in rows), self._size, *needs.fed]
        feeds, (fetched,) = self._runner.run(
            session, self._place, needs.taken, [wanted]
        )
        sizes, *columns = zip(*(values[len(rows) :] for values in fetched), strict=True)
        for tensor, values in zip(needs.fed, columns, strict=True):
            name = self._names[tensor.ref()]
            feeds[tensor.name] = _joined(name, tensor, values, sizes)
        return feeds | self._values(session, needs, feeds, [fetched])


def _computed_from(operation: tf.Operation | None, needs: Needs) -> str:
    """Returns the names of `needs.values` that need an operation, with other rows fed.

    All names are returned if none is known to need it.
    """
    fed = {tensor.op for tensor, _ in itertools.chain(*needs.rows)} - {operation}
    users = [
        tensor
        for tensor in needs.values
        if operation in ancestors([tensor.op], lambda other: other not in fed)
    ]
    return ", ".join(names_of(users or needs.values))


def _scalars(results):
    """Returns the results of a run, with scalars as a session computes them."""
    if isinstance(results, dict):  # hooks cannot be sorted, as `tf.nest` would do
        return {key: _scalars(value) for key, value in results.items()}
    return tf.nest.map_structure(_scalar, results)


def _scalar(value):
    """Returns a scalar as a session computes it, in place of one that was fed."""
    return value[()] if isinstance(value, np.ndarray) and not value.ndim else value


def _joined(name: str, tensor: tf.Tensor, values: tuple, sizes: tuple) -> np.ndarray:
    """Returns a batch's prediction [N, ...], from those of its micro-batches.

    Args:
        name: Its name in messages.
        tensor: The graph's prediction.
        values: Its values, one for each micro-batch.
        sizes: The micro-batches' numbers of examples.

    Raises:
        ValueError: If several micro-batches cannot be joined.
    """
    if len(values) == 1:
        return values[0]
    # A mean that keeps its dimension has one row, in a micro-batch of one example too.
    is_fixed = tensor.shape.rank is not None and tensor.shape[:1] != [None]
    for value, size in zip(values, sizes, strict=True):
        if is_fixed or value.shape[:1] != (size,):
            raise ValueError(
                "A prediction must have one row per example, for micro-batches to be "
                f"joined. Received: {name} of shape {list(value.shape)} for {size} of "
                f"{sum(sizes)} examples. Give it a row per example, or leave it out "
                "with `predict_keys`."
            )
    shapes = sorted({value.shape[1:] for value in values})
    if len(shapes) > 1:
        raise ValueError(
            "A prediction must have rows of one shape in all micro-batches of a batch. "
            f"Received: {name} with rows of {list(shapes[0])} and {list(shapes[-1])}. "
            "Pad them to one length that does not depend on the micro-batch."
        )
    return np.concatenate(values)
