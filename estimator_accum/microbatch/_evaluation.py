"""Evaluation in micro-batches.

    before_run    the micro-batches of the next batch (BatchRunner): updates of metrics
    session.run   the rest, once a batch: Estimator's own mean of the batches' losses

The rest is never retried.
"""

import tensorflow as tf

from estimator_accum._graph import ancestors
from estimator_accum.microbatch._batch import WholeBatch
from estimator_accum.microbatch._count import MicroBatchCount
from estimator_accum.microbatch._graph import split_train_op
from estimator_accum.microbatch._runner import BatchRunner, ReplicaBatch


class UntrainedBatch(WholeBatch):
    """A batch to evaluate or predict; train ops register nothing to run with it."""

    keeps_sums = False

    def hand_over(self, counted: tf.Tensor, accumulators: list) -> tf.Tensor:
        """Leaves out the train op that a model_fn returns in every mode."""
        del counted, accumulators
        with tf.control_dependencies(None):
            return tf.constant(1, tf.int64)


class EvaluationHook(tf.compat.v1.train.SessionRunHook):
    """Runs the micro-batches of each batch before Estimator's own run.

    Args:
        replicas: The replicas of this process; the list is complete when the hook
            begins.
        count: The number of micro-batches.
    """

    _JOB = "evaluation"  # in messages

    def __init__(self, replicas: list[ReplicaBatch], count: MicroBatchCount):
        self._runner = BatchRunner(replicas, count, lambda: None)
        self._count = count

    def begin(self) -> None:
        self._runner.begin()

    def after_create_session(self, session, coord) -> None:
        del coord
        self._runner.initialize(session)
        self._batch = 0

    def before_run(self, run_context):
        self._batch += 1
        self._place = f"batch {self._batch} of the {self._JOB}"
        feeds, fetched = self._runner.run(run_context.session, self._place)
        feeds |= self._results(fetched)
        return tf.compat.v1.train.SessionRunArgs(None, feeds)

    def after_run(self, run_context, run_values) -> None:
        del run_context, run_values
        self._count.count_update(self._place)

    def _results(self, fetched: list) -> dict:
        """Returns further feeds, from what the micro-batches of each replica fetched."""
        del fetched
        return {}


def split_metrics(batch: WholeBatch, metrics: dict[str, tuple]) -> dict[str, tuple]:
    """Moves metric updates that need the micro-batch from `metrics` to `batch`.

    Args:
        batch: The batch; its `micro_ops` are added to.
        metrics: `EstimatorSpec.eval_metric_ops`, (value, update) by name.

    Returns:
        The metrics, whose updates do the rest, once a batch.

    Raises:
        ValueError: If a metric's value needs a micro-batch.
    """
    begin, rest = batch.begin.op, {}
    for name, (value, update) in metrics.items():
        if begin in ancestors(_operations(value)):
            raise ValueError(
                "A metric's value must be computed from variables, since it is read "
                f"after the last batch. Received: {name!r}, computed from a batch. "
                "Use a streaming metric, such as tf.compat.v1.metrics.mean."
            )
        with tf.control_dependencies(None):
            whole = tf.group(*_operations(update))
        each, once = split_train_op(whole, begin)
        batch.micro_ops += each
        with tf.control_dependencies(None):
            rest[name] = value, tf.group(*once)
    return rest


def _operations(structure) -> list[tf.Operation]:
    return [getattr(each, "op", each) for each in tf.nest.flatten(structure)]
