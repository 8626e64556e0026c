"""Hooks that run a batch's micro-batches before Estimator's own run.

    before_run    the micro-batches of the next batch (BatchRunner)
    session.run   training      the mean gradient, one update, global_step += 1
                  evaluation    what is done once a batch, such as the mean loss
                  prediction    the batch's predictions, with which the run is fed

Estimator's own run is never retried.

N = number of examples in the batch.
"""

import math
import time

import numpy as np
import tensorflow as tf

from estimator_accum._graph import ancestors
from estimator_accum._window import get_windows
from estimator_accum.hooks._checkpoints import WindowlessRestore, get_or_add_saver
from estimator_accum.hooks._summary import TrainingSummary, Update
from estimator_accum.microbatch._batch import ReplicaBatch
from estimator_accum.microbatch._count import MicroBatchCount
from estimator_accum.microbatch._runner import BatchRunner


class MicroBatchHook(tf.compat.v1.train.SessionRunHook):
    """Runs the micro-batches of each batch of an evaluation.

    Args:
        replicas: The replicas of this process; the list is complete when the hook
            begins.
        count: The number of micro-batches.
    """

    _PLACE = "batch {} of the evaluation"  # in messages

    def __init__(self, replicas: list[ReplicaBatch], count: MicroBatchCount):
        self._runner = BatchRunner(replicas, count, self._summarize)
        self._count = count

    def begin(self) -> None:
        self._runner.begin()

    def after_create_session(self, session, coord) -> None:
        del coord
        self._runner.initialize(session)
        self._batch = 0

    def before_run(self, run_context):
        self._batch += 1
        self._place = self._PLACE.format(self._batch)
        feeds = self._run(run_context)
        return tf.compat.v1.train.SessionRunArgs(None, feeds)

    def after_run(self, run_context, run_values) -> None:
        del run_context, run_values
        if self._count.count_update(self._place):
            self._summarize()

    def _run(self, run_context) -> dict:
        """Runs the micro-batches of the next batch; returns feeds of Estimator's run."""
        feeds, _ = self._runner.run(run_context.session, self._place)
        return feeds

    def _summarize(self) -> None:
        """Does nothing: only training has summaries of the number of micro-batches."""


class TrainingHook(MicroBatchHook):
    """Makes each run of the train op one update with a whole batch.

    Args:
        replicas: The replicas of this process; the list is complete when training
            begins.
        count: The number of micro-batches.
        saver: The Saver of the run; None finds it in the graph.
        summary_dir: Folder for the TensorBoard scalars `accumulation/micro_batches`
            and, for models with layers to recompute, `accumulation/recompute`; None
            writes none.
    """

    _PLACE = "update {}"

    def __init__(
        self,
        replicas: list[ReplicaBatch],
        count: MicroBatchCount,
        saver: tf.compat.v1.train.Saver | None,
        summary_dir: str | None,
    ):
        super().__init__(replicas, count)
        self._saver = saver
        self._summary_dir = summary_dir

    def begin(self) -> None:
        windows, global_step = get_windows(), tf.compat.v1.train.get_global_step()
        self._clocks = [global_step, global_step]
        if windows:  # else the model_fn has an optimizer without a window
            WindowlessRestore(self._saver or get_or_add_saver(), windows)
            self._clocks[0] = windows[0].update_step
        self._summary = TrainingSummary("examples")
        self._summary.check()
        self._is_chief = tf.distribute.get_strategy().extended.should_save_summary
        super().begin()

    def after_create_session(self, session, coord) -> None:
        super().after_create_session(session, coord)
        self._batch, self._global_step = map(int, session.run(self._clocks))
        self._summary.open(self._batch)
        self._since = time.perf_counter()
        self._summarize()

    def before_run(self, run_context):
        arguments = super().before_run(run_context)
        if self._is_chief:
            self._summary.write_batch(self._described_batch(), 1, self._global_step)
        return arguments

    def after_run(self, run_context, run_values) -> None:
        super().after_run(run_context, run_values)
        now, rows = time.perf_counter(), sum(self._runner.rows)
        nan, secs = math.nan, now - self._since
        self._summary.write(Update(self._batch, self._batch, nan, nan, rows, secs=secs))
        self._since = now

    def end(self, session) -> None:
        if self._is_chief:
            self._summary.open(int(session.run(self._clocks[0])))
            self._summary.close()

    def _described_batch(self) -> str:
        rows = self._runner.rows
        size = -(-max(rows) // self._count.value)
        count = -(-max(rows) // size)
        is_even = {size * count} == set(rows)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        name = "effective batch" if replicas == len(rows) else "batch of this task"
        return (
            f"{name} {sum(rows):,} = {'' if is_even else 'at most '}{size:,} examples x "
            f"{count:,} micro-batch{'es' * (count > 1)}"
            f"{f' x {len(rows)} replicas' * (len(rows) > 1)}"
        )

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
    for it. What is fed are copies of the model's own tensors, which keep the values of
    the last micro-batch for the model's hooks.

    Args:
        replica: The only replica, since Estimator predicts without a strategy.
        count: The number of micro-batches.
        predictions: `EstimatorSpec.predictions`, a Tensor or Tensors by name.

    Attributes:
        predictions: The predictions for Estimator to fetch. Those that do not depend on
            the micro-batch are the model's own.
    """

    _PLACE = "batch {} of the prediction"

    def __init__(self, replica: ReplicaBatch, count: MicroBatchCount, predictions):
        super().__init__([replica], count)
        self._size, begin = replica.batch.size, replica.batch.begin.op
        is_dict = isinstance(predictions, dict)
        named = predictions if is_dict else {None: predictions}
        self._predictions = {
            key: tf.identity(tensor)
            for key, tensor in named.items()
            if begin in ancestors([tensor.op])
        }
        named = named | self._predictions
        self.predictions = named if is_dict else named[None]

    def _run(self, run_context) -> dict:
        # Estimator.predict leaves out what `predict_keys` does not name.
        wanted = set(map(id, tf.nest.flatten(run_context.original_args.fetches)))
        named = {k: t for k, t in self._predictions.items() if id(t) in wanted}
        feeds, (fetched,) = self._runner.run(
            run_context.session, self._place, [self._size, *named.values()]
        )
        sizes, *columns = zip(*fetched, strict=True)
        for (key, tensor), values in zip(named.items(), columns, strict=True):
            name = "predictions" if key is None else f"predictions[{key!r}]"
            feeds[tensor] = _joined(name, tensor, values, sizes)
        return feeds


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
