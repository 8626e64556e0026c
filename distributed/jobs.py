"""Job of one task: check all inputs, train with the others, evaluate, export."""

import logging
import os
import pathlib
from dataclasses import dataclass

import tensorflow as tf

from distributed import input_pipeline
from distributed.input_pipeline import Examples
from distributed.model_fn import make_model_fn
from distributed.settings import (
    Settings,
    batches_of,
    check_output_dir,
    remember_settings,
)
from estimator_accum import microbatch_model_fn
from estimator_accum.programs.bars import BatchBar
from estimator_accum.programs.batches import Batches
from estimator_accum.programs.cluster import Cluster, enter
from estimator_accum.programs.folder import write_text
from estimator_accum.programs.metrics_file import METRICS
from estimator_accum.programs.progress import read_progress
from estimator_accum.programs.watchdog import EvaluationHook, ProgressHook, Watchdog

_logger = logging.getLogger("tensorflow.distributed")

_EVAL_BATCH_SIZE = 500
_SECS_BETWEEN_EVALUATIONS = 5
_EXPORT = "final"  # folder in export/
_RESULTS = "eval_results.txt"


@dataclass(frozen=True)
class Job:
    """A checked run: nothing that it needs is missing.

    Attributes:
        settings: The user's settings.
        cluster: Cluster of which this process is a task.
        batches: Division of each update's examples.
        train: All training examples.
        test: All test examples.
        checksum: Checksum of training and test examples.
    """

    settings: Settings
    cluster: Cluster
    batches: Batches
    train: Examples
    test: Examples
    checksum: str


def prepare(settings: Settings, cluster: Cluster) -> Job:
    """Reads and checks everything that the run needs; writes nothing.

    Args:
        settings: Settings of the run, which `check_settings` has accepted.
        cluster: Cluster of which this process is a task.

    Raises:
        ValueError: If an input does not fit; the message is one sentence.
    """
    batches = batches_of(settings, cluster.num_workers)
    train, test = input_pipeline.load_examples(settings.data_dir)
    checksum = input_pipeline.checksum(train, test)
    check_output_dir(settings, batches, checksum)
    return Job(settings, cluster, batches, train, test, checksum)


def execute(job: Job) -> str | None:
    """Runs this task's part; returns the results on the task that evaluates, else None.

    That task is the evaluator if there is one, else the chief.
    """
    settings, cluster = job.settings, job.cluster
    if cluster.is_chief:
        remember_settings(settings, job.batches, job.checksum)
    metrics_file = pathlib.Path(settings.output_dir) / METRICS
    watchdog = Watchdog(
        settings.watchdog_secs,
        cluster.name,
        watched=metrics_file if cluster.is_evaluator else None,
    )
    if not cluster.is_alone:
        watchdog.start()
    train(job, watchdog)
    watchdog.stop()
    has_the_last_word = cluster.is_chief and not cluster.has_evaluator
    if has_the_last_word or cluster.is_evaluator:
        return evaluate_and_export(job)
    return None


def train(job: Job, watchdog: Watchdog) -> None:
    """Trains as this task of the cluster; an evaluator evaluates meanwhile.

    Args:
        job: The checked run.
        watchdog: Watchdog that is told of progress.
    """
    settings, batches = job.settings, job.batches
    model_dir = pathlib.Path(settings.output_dir)
    global_step, first_update, _ = read_progress(str(model_dir))
    _log_plan(job)
    if first_update >= settings.train_updates and not job.cluster.is_evaluator:
        _logger.info("%s is trained already", model_dir)
        return
    if first_update and not job.cluster.is_evaluator:
        _logger.info("resuming after update %s", f"{first_update:,}")
    updates_left = settings.train_updates - first_update
    # Estimator and strategy read TF_CONFIG, not an argument.
    enter(job.cluster)
    strategy = None
    if not job.cluster.is_alone:
        # Otherwise Estimator cannot copy the strategy in an evaluator.
        tf.compat.v1.disable_eager_execution()
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    estimator = _make_estimator(job, strategy)
    tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(
            input_pipeline.train_input_fn(
                job.train,
                batches,
                rank=job.cluster.rank,
                shuffle=settings.shuffle,
                seed=settings.seed,
                first_update=first_update,
            ),
            max_steps=global_step + updates_left * batches.gradient_accumulation_steps,
            hooks=[ProgressHook(watchdog, global_step)],
        ),
        tf.estimator.EvalSpec(
            input_pipeline.eval_input_fn(job.test, _EVAL_BATCH_SIZE),
            steps=None,
            hooks=[EvaluationHook(watchdog), _evaluation_bar(job)],
            start_delay_secs=0,
            throttle_secs=_SECS_BETWEEN_EVALUATIONS,
        ),
    )


def evaluate_and_export(job: Job) -> str:
    """Evaluates and exports the last checkpoint; returns the metrics as text."""
    os.environ.pop("TF_CONFIG", None)  # the other tasks may have ended
    estimator = _make_estimator(job, None)
    metrics = estimator.evaluate(
        input_pipeline.eval_input_fn(job.test, _EVAL_BATCH_SIZE),
        hooks=[_evaluation_bar(job)],
    )
    folder = pathlib.Path(job.settings.output_dir)
    estimator.export_saved_model(str(folder / "export" / _EXPORT), _receiver_fn(job))
    values = {"examples": len(job.test.labels)} | metrics
    text = "".join(f"{name} = {values[name]}\n" for name in sorted(values))
    write_text(folder / _RESULTS, text)
    return text


def _evaluation_bar(job: Job) -> BatchBar:
    return BatchBar("evaluation", -(-len(job.test.labels) // _EVAL_BATCH_SIZE))


def _make_estimator(job: Job, strategy):
    """Returns the Estimator, whose checkpoints lie between two windows.

    There the gradient sums of the replicas are empty, so a different number of workers
    resumes as exactly as the same number.
    """
    steps = job.batches.gradient_accumulation_steps
    model_fn = make_model_fn(job.settings, job.batches)
    if job.batches.is_auto:
        model_fn = microbatch_model_fn(model_fn, "auto")
    return tf.estimator.Estimator(
        model_fn,
        config=tf.estimator.RunConfig(
            model_dir=str(pathlib.Path(job.settings.output_dir).absolute()),
            tf_random_seed=job.settings.seed,
            save_checkpoints_steps=job.settings.save_checkpoints_updates * steps,
            train_distribute=strategy,
            experimental_max_worker_delay_secs=0,
        ),
    )


def _receiver_fn(job: Job):
    height, width = job.train.images.shape[1:]

    def receiver_fn():
        images = tf.compat.v1.placeholder(tf.uint8, [None, height, width], "image")
        return tf.estimator.export.ServingInputReceiver(
            {"image": images}, {"image": images}
        )

    return receiver_fn


def _log_plan(job: Job) -> None:
    if job.cluster.is_chief:
        updates = job.settings.train_updates
        _logger.info(
            "%s; %s micro-steps = %s updates",
            job.batches,
            f"{updates * job.batches.gradient_accumulation_steps:,}",
            f"{updates:,}",
        )
