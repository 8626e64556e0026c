"""Runs a batch's micro-batches before the train op, and again when memory runs out.

    before_run    stage the batch (at the end of the data, training ends as usual);
                  run the micro-batches one after the other;
                  out of memory: roll back what they wrote, cut finer, retry
    session.run   the train op: the mean gradient, one update, global_step += 1

A run that fails may have executed in part, so a run that may be retried contains only
operations that can be rolled back: never the update.
"""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum._window import get_windows
from estimator_accum.hooks._checkpoints import WindowlessRestore, get_or_add_saver
from estimator_accum.microbatch._batch import WholeBatch
from estimator_accum.microbatch._count import FixedCount, MicroBatchCount
from estimator_accum.microbatch._graph import Snapshot
from estimator_accum.microbatch._memory import is_out_of_memory
from estimator_accum.microbatch._staging import StagedBatch, describe_example, rows_of


class ReplicaBatch(NamedTuple):
    """One replica's part of the graph, for the hook.

    Attributes:
        window: Placeholders to feed and operations to run.
        staged: The staged batch.
        snapshot: Copies of the variables that micro-batches write; None if they are
            never retried.
    """

    window: WholeBatch
    staged: StagedBatch
    snapshot: Snapshot | None


class MicroBatchHook(tf.compat.v1.train.SessionRunHook):
    """Makes each run of the train op one update with a whole batch.

    Args:
        replicas: The replicas of this process; the list is complete when training
            begins.
        count: The number of micro-batches.
        saver: The Saver of the run; None finds it in the graph.
        summary_dir: Folder for the TensorBoard scalar `accumulation/micro_batches`;
            None writes none.
    """

    def __init__(
        self,
        replicas: list[ReplicaBatch],
        count: MicroBatchCount | FixedCount,
        saver: tf.compat.v1.train.Saver | None,
        summary_dir: str | None,
    ):
        self._replicas = replicas
        self._count = count
        self._saver = saver
        self._summary_dir = summary_dir

    def begin(self) -> None:
        windows = get_windows()
        WindowlessRestore(self._saver or get_or_add_saver(), windows)
        self._clocks = [windows[0].update_step, tf.compat.v1.train.get_global_step()]
        self._initialize = [r.window.initialize_ops for r in self._replicas]
        snapshots = [r.snapshot for r in self._replicas if r.snapshot is not None]
        self._stage = [
            [r.staged.stage for r in self._replicas],
            [snapshot.take for snapshot in snapshots],
        ]
        self._take_back = [
            [snapshot.restore for snapshot in snapshots],
            [r.window.discard_ops for r in self._replicas],
        ]

    def after_create_session(self, session, coord) -> None:
        del coord
        session.run(self._initialize)
        self._update, self._global_step = map(int, session.run(self._clocks))
        self._summarize()

    def before_run(self, run_context):
        session = run_context.session
        staged, _ = session.run(self._stage)
        self._update, self._global_step = self._update + 1, self._global_step + 1
        shapes = [shapes for shapes, _ in staged]
        rows = [
            rows_of(r.staged.names, s)
            for r, s in zip(self._replicas, shapes, strict=True)
        ]
        if not any(rows):
            raise ValueError(
                "A batch must have at least one example. Received: none at update "
                f"{self._update}. Leave empty batches out in input_fn."
            )
        while True:
            try:
                feeds = self._run_micro_batches(session, rows)
                return tf.compat.v1.train.SessionRunArgs(None, feeds)
            except Exception as error:
                is_fixed = isinstance(self._count, FixedCount)
                if is_fixed or not is_out_of_memory(error):
                    raise
                self._cut_finer(session, rows, shapes, error)

    def after_run(self, run_context, run_values) -> None:
        del run_context, run_values
        if self._count.count_update(self._update):
            self._summarize()

    def _run_micro_batches(self, session, rows: list[int]) -> dict:
        """Runs all micro-batches; returns the last one's feeds, for tensors of it."""
        sizes = [-(-n // self._count.value) for n in rows]  # ceil
        starts = [
            range(0, n, size) if n else range(1)
            for n, size in zip(rows, sizes, strict=True)
        ]
        last = {}
        for i in range(max(map(len, starts))):
            operations, feeds = [], {}
            for replica, n, size, start in zip(
                self._replicas, rows, sizes, starts, strict=True
            ):
                if i >= len(start):  # it has fewer examples than the others
                    continue
                window = replica.window
                operations += window.micro_ops if n else window.empty_ops
                feeds |= {
                    window.begin: start[i],
                    window.size: min(size, n - start[i]),
                    window.rows: n,
                    window.num_micro_batches: len(start),
                }
            session.run(operations, feeds)
            last |= feeds
        return last

    def _cut_finer(self, session, rows, shapes, error: Exception) -> None:
        if self._count.value >= max(rows):
            names, shape = self._replicas[0].staged.names, shapes[0]
            raise ValueError(
                "One example must fit in memory. Received: an example of "
                f"{describe_example(names, shape)} at update {self._update}, which "
                "alone ran out of memory. Use shorter examples, a smaller model, or a "
                "device with more memory."
            ) from error
        try:
            self._count.increase(max(rows), self._update)
        except ValueError as refusal:
            raise refusal from error
        session.run(self._take_back)
        self._summarize()

    def _summarize(self) -> None:
        if self._summary_dir is None:
            return
        value = tf.compat.v1.Summary.Value(
            tag="accumulation/micro_batches", simple_value=self._count.value
        )
        writer = tf.compat.v1.summary.FileWriterCache.get(self._summary_dir)
        writer.add_summary(tf.compat.v1.Summary(value=[value]), self._global_step)
        writer.flush()  # the next error may be the last
