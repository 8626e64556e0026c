"""Runs a batch's micro-batches before the train op.

    before_run    the micro-batches of the next batch (BatchRunner)
    session.run   the train op: the mean gradient, one update, global_step += 1

The update is never retried.
"""

import tensorflow as tf

from estimator_accum._window import get_windows
from estimator_accum.hooks._checkpoints import WindowlessRestore, get_or_add_saver
from estimator_accum.microbatch._count import FixedCount, MicroBatchCount
from estimator_accum.microbatch._runner import BatchRunner, ReplicaBatch


class MicroBatchHook(tf.compat.v1.train.SessionRunHook):
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

    def __init__(
        self,
        replicas: list[ReplicaBatch],
        count: MicroBatchCount | FixedCount,
        saver: tf.compat.v1.train.Saver | None,
        summary_dir: str | None,
    ):
        self._runner = BatchRunner(replicas, count, self._summarize)
        self._count = count
        self._saver = saver
        self._summary_dir = summary_dir

    def begin(self) -> None:
        windows, global_step = get_windows(), tf.compat.v1.train.get_global_step()
        self._clocks = [global_step, global_step]
        if windows:  # else the model_fn has an optimizer without a window
            WindowlessRestore(self._saver or get_or_add_saver(), windows)
            self._clocks[0] = windows[0].update_step
        self._runner.begin()

    def after_create_session(self, session, coord) -> None:
        del coord
        self._runner.initialize(session)
        self._update, self._global_step = map(int, session.run(self._clocks))
        self._summarize()

    def before_run(self, run_context):
        self._update, self._global_step = self._update + 1, self._global_step + 1
        place = f"update {self._update}"
        feeds, _ = self._runner.run(run_context.session, place)
        return tf.compat.v1.train.SessionRunArgs(None, feeds)

    def after_run(self, run_context, run_values) -> None:
        del run_context, run_values
        if self._count.count_update(f"update {self._update}"):
            self._summarize()

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
        writer.add_summary(summary, self._global_step)
        writer.flush()  # the next error may be the last
