"""Job of one task: check the output folder, train with the others, evaluate, export."""

import functools
import os
import pathlib

import tensorflow as tf

from distributed import input_pipeline
from distributed.model_fn import make_model_fn
from estimator_accum.programs.bars import BatchBar
from estimator_accum.programs.batches import Batches
from estimator_accum.programs.cluster import Cluster, enter
from estimator_accum.programs.folder import METRICS, write_results
from estimator_accum.programs.inputs import Inputs
from estimator_accum.programs.job import (
    Job,
    SameRunHook,
    begin,
    check_folder,
    make_estimator,
    make_job,
    make_train_spec,
    start_watchdog,
)
from estimator_accum.programs.lock import locked
from estimator_accum.programs.progress import read_progress
from estimator_accum.programs.report import end_of_run
from estimator_accum.programs.saving import without_scratch
from estimator_accum.programs.strategies import (
    count_replicas,
    local_replicas,
    make_strategy,
)
from estimator_accum.programs.watchdog import EvaluationHook, Watchdog

_EVAL_BATCH_SIZE = 500
_SECS_BETWEEN_EVALUATIONS = 5
_EXPORT = "final"  # folder in export/


def prepare(inputs: Inputs) -> Job:
    """Checks that a run in the output folder may resume; writes nothing.

    Raises:
        ValueError: If an input does not fit; the message is one sentence.
    """
    job = make_job(inputs, count_replicas(inputs.settings.strategy, inputs.cluster))
    check_folder(job)
    return job


def execute(job: Job) -> str | None:
    """Runs this task's part; returns the results on the task that evaluates, else None.

    That task is the evaluator if there is one, else the chief.
    """
    settings, cluster = job.settings, job.cluster
    if cluster.is_chief:
        job.write_settings()
    metrics_file = pathlib.Path(settings.output_dir) / METRICS
    watchdog = start_watchdog(job, metrics_file if cluster.is_evaluator else None)
    has_trained = train(job, watchdog)
    watchdog.stop()
    chief_evaluates = cluster.is_chief and not cluster.has_evaluator
    if chief_evaluates or cluster.is_evaluator:
        return evaluate_and_export(job, has_trained)
    return None


def train(job: Job, watchdog: Watchdog) -> bool:
    """Trains as this task of the cluster; an evaluator evaluates meanwhile.

    Args:
        job: The checked run.
        watchdog: Watchdog that is told of progress.

    Returns:
        False if the run is trained already.
    """
    settings, batches = job.settings, job.batches
    progress = begin(job, settings.output_dir, batches)
    if progress is None:
        return False
    updates_left = settings.train_updates - progress.update
    first_update, stride = job.cluster.turn(progress.update)
    estimator = _make_estimator(job, make_strategy(settings.strategy, job.cluster))
    evaluation_hooks = [EvaluationHook(watchdog), _evaluation_bar(job)]
    if job.cluster.is_evaluator:
        evaluation_hooks.append(SameRunHook(job))
    with without_scratch(settings.output_dir, job.cluster):
        tf.estimator.train_and_evaluate(
            estimator,
            make_train_spec(
                job,
                input_pipeline.train_input_fn(
                    job.train,
                    batches,
                    replicas=local_replicas(settings.strategy, job.cluster),
                    shuffle=settings.shuffle,
                    seed=settings.seed,
                    first_update=first_update,
                    stride=stride,
                ),
                progress,
                updates_left * batches.gradient_accumulation_steps,
                settings.train_updates,
                watchdog,
            ),
            tf.estimator.EvalSpec(
                input_pipeline.eval_input_fn(job.test, _EVAL_BATCH_SIZE),
                steps=None,
                hooks=evaluation_hooks,
                start_delay_secs=0,
                throttle_secs=_SECS_BETWEEN_EVALUATIONS,
            ),
        )
    return True


def evaluate_and_export(job: Job, has_trained: bool) -> str:
    """Evaluates and exports the last checkpoint; returns the results as text."""
    enter(Cluster())  # the other tasks may have ended
    estimator = _make_estimator(job, None)
    metrics = estimator.evaluate(
        input_pipeline.eval_input_fn(job.test, _EVAL_BATCH_SIZE),
        hooks=[_evaluation_bar(job)],
    )
    folder = pathlib.Path(job.settings.output_dir)
    parent = str(folder / "export" / _EXPORT)
    pathlib.Path(parent).mkdir(parents=True, exist_ok=True)
    # Chief and an evaluator that the cluster does not list export at the same time, and
    # TensorFlow names folders, also the temporary ones, by the second.
    with locked(folder / "export", waits=True):
        export = estimator.export_saved_model(parent, _receiver_fn(job))
    values = {"examples": len(job.test.labels)} | metrics
    write_results(folder, values)
    rows = [["", "test"]]
    rows += [[name, f"{metrics[name]:.4f}"] for name in ("accuracy", "loss")]
    rows.append(["updates", f"{read_progress(str(folder)).update:,}"])
    draw = functools.partial(_draw, folder, f"digits: {job.batches}")
    return end_of_run(
        folder,
        rows,
        draw,
        [["export", os.fsdecode(export)]],
        note=traffic_text(job.batches) if has_trained else None,
    )


def traffic_text(batches: Batches) -> str | None:
    """Returns the effect of K on the network; None if it has none.

    Parameter servers have no replicas that train in sync.
    """
    steps, replicas = batches.gradient_accumulation_steps, batches.num_replicas
    if steps == 1 or replicas == 1:
        return None
    return (
        f"K = {steps}: {replicas} replicas sent their gradients once per update, not "
        f"{steps} times."
    )


def _draw(folder: pathlib.Path, title: str, path: pathlib.Path) -> None:
    from estimator_accum.programs import plots  # only a run that draws needs matplotlib

    updates = plots.read_metrics(folder / METRICS, ["update_step"])
    plots.save(plots.draw_run(updates, {}, "", title), path)


def _evaluation_bar(job: Job) -> BatchBar:
    return BatchBar("evaluation", -(-len(job.test.labels) // _EVAL_BATCH_SIZE))


def _make_estimator(job: Job, strategy):
    """Returns the Estimator, whose checkpoints lie between two updates."""
    steps = job.batches.gradient_accumulation_steps
    return make_estimator(
        make_model_fn(job.settings, job.batches),
        job.settings,
        job.settings.output_dir,
        job.settings.save_checkpoints_updates * steps,
        is_auto=job.batches.is_auto,
        strategy=strategy,
    )


def _receiver_fn(job: Job):
    height, width = job.train.images.shape[1:]

    def receiver_fn():
        images = tf.compat.v1.placeholder(tf.uint8, [None, height, width], "image")
        return tf.estimator.export.ServingInputReceiver(
            {"image": images}, {"image": images}
        )

    return receiver_fn
