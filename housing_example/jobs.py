"""Job of a run: check, train, compare."""

import dataclasses
import logging
import math
import pathlib
import time

import numpy as np
import tensorflow as tf

from estimator_accum.programs.bars import BatchBar
from estimator_accum.programs.batches import Batches
from estimator_accum.programs.cluster import Cluster, enter
from estimator_accum.programs.folder import METRICS, SETTINGS_FILE, write_text
from estimator_accum.programs.inputs import Inputs
from estimator_accum.programs.job import (
    Job,
    begin,
    check_folder,
    make_estimator,
    make_job,
    make_train_spec,
    start_watchdog,
)
from estimator_accum.programs.plots import Columns, read_metrics, save
from estimator_accum.programs.saving import without_scratch
from estimator_accum.programs.strategies import (
    count_replicas,
    local_replicas,
    make_strategy,
)
from estimator_accum.programs.watchdog import Watchdog
from housing_example import input_pipeline
from housing_example.features import measure
from housing_example.model_fn import make_model_fn
from housing_example.plots import draw
from housing_example.results import Result, cost_text, results_text
from housing_example.table import TARGET, csv_text

_UPDATES_BETWEEN_CHECKPOINTS = 250
_EVAL_BATCH_SIZE = 512
_PLOT = "housing.png"
_RESULTS = "results.txt"
_WITH, _WITHOUT = "with_accumulation", "without_accumulation"
_SECS_BETWEEN_LOOKS = 0.2

_logger = logging.getLogger("tensorflow.estimator_accum")


def prepare(inputs: Inputs) -> Job:
    """Divides the updates among the replicas, and checks whether a run may resume.

    Raises:
        ValueError: If an input does not fit; the message is one sentence.
    """
    job = make_job(inputs, count_replicas(inputs.settings.strategy, inputs.cluster))
    if job.cluster.is_chief:  # the other tasks are compared with it in their session
        check_folder(job, _WITH, _WITHOUT)
    return job


def execute(job: Job) -> str | None:
    """Trains with accumulation and, for comparison, without it on one device.

    If an update is one micro-batch of one replica there is nothing to compare, and with
    `AUTO` the whole batch may not fit in memory: then only one model is trained.

    Returns:
        The results as lines of text; None in a task that is not the chief.
    """
    batches, folder = job.batches, pathlib.Path(job.settings.output_dir)
    watchdog = start_watchdog(job)
    if not job.cluster.is_chief:
        _wait_for_the_chief(job)
        train(job, folder / _WITH, batches, watchdog)
        watchdog.stop()
        return None
    for name, examples in (("train.csv", job.train), ("test.csv", job.test)):
        write_text(folder / name, csv_text(examples))
    job.write_settings()
    whole = Batches(batches.effective_batch_size, 1, 1)
    runs = {}
    if batches != whole or job.cluster.servers:
        runs[_label(batches)] = (job, _WITH, batches)
    if not batches.is_auto:
        alone = dataclasses.replace(job, cluster=Cluster(), hooks=())
        label = f"without ({batches.effective_batch_size})"
        runs[label] = (alone, _WITHOUT, whole)
    results = {
        label: train_and_test(its_job, folder / name, its_batches, watchdog)
        for label, (its_job, name, its_batches) in runs.items()
    }
    truth = job.test[TARGET].to_numpy()
    text = results_text(results, truth)
    write_text(folder / _RESULTS, text)
    if any(result.losses is None for result in results.values()):
        return f"{text}\nplot: none"
    if len(results) == 2 and batches.num_replicas == 1:
        text += (
            f"\n{cost_text(batches.gradient_accumulation_steps, *results.values())}\n"
        )
    save(draw(results, truth), folder / _PLOT)
    return f"{text}\nplot: {folder / _PLOT}"


def _label(batches: Batches) -> str:
    if batches.is_auto:
        return f"as memory allows ({batches.effective_batch_size})"
    sizes = [batches.largest_share, batches.gradient_accumulation_steps]
    if batches.num_replicas > 1:
        sizes.append(batches.num_replicas)
    at_most = "" if math.prod(sizes) == batches.effective_batch_size else "at most "
    return f"with accumulation ({at_most}{' x '.join(map(str, sizes))})"


def _wait_for_the_chief(job: Job) -> None:
    """Waits for the files that the chief writes; the watchdog limits the wait."""
    while not (pathlib.Path(job.settings.output_dir) / SETTINGS_FILE).exists():
        time.sleep(_SECS_BETWEEN_LOOKS)


def train_and_test(
    job: Job, model_dir: pathlib.Path, batches: Batches, watchdog: Watchdog
) -> Result:
    """Trains one model, from its last checkpoint if it has one, and tests it.

    Args:
        job: The checked run, whose cluster trains this model; its CSV files are in the
            folder above `model_dir`.
        model_dir: Folder of this model.
        batches: Division of this model's updates. More than one replica trains with
            the run's strategy, and so do parameter servers.
        watchdog: Watchdog that is told of progress in a cluster.
    """
    train(job, model_dir, batches, watchdog)
    watchdog.stop()  # the evaluation below needs no other task
    enter(Cluster())
    estimator = _make_estimator(job, model_dir, batches)
    test_input_fn = _test_input_fn(model_dir)
    metrics = estimator.evaluate(test_input_fn, hooks=_bars(job, "evaluation"))
    predictions = estimator.predict(test_input_fn, hooks=_bars(job, "prediction"))
    names = estimator.get_variable_names()
    trained = [name for name in names if name.endswith(("/kernel", "/bias"))]
    return Result(
        metrics,
        np.array([row["predictions"][0] for row in predictions]),
        _losses(model_dir / METRICS),
        {name: estimator.get_variable_value(name) for name in trained},
    )


def _losses(path: pathlib.Path) -> Columns | None:
    try:
        return read_metrics(path)
    except ValueError as error:  # of a training that has ended well
        _logger.warning("no plot and no comparison of speeds: %s", error)
        return None


def train(
    job: Job, model_dir: pathlib.Path, batches: Batches, watchdog: Watchdog
) -> None:
    """Trains one model to the end; see `train_and_test`."""
    settings, steps = job.settings, batches.gradient_accumulation_steps
    progress = begin(job, model_dir, batches)
    if progress is None:
        return
    first_update, stride = job.cluster.turn(progress.update)
    strategy, replicas = None, range(1)
    enter(Cluster())  # hides from Estimator a TF_CONFIG that lists only this task
    if batches.num_replicas > 1 or job.cluster.servers:
        strategy = make_strategy(settings.strategy, job.cluster)
        replicas = local_replicas(settings.strategy, job.cluster)
    estimator = _make_estimator(job, model_dir, batches, strategy)
    with without_scratch(model_dir, job.cluster):
        tf.estimator.train_and_evaluate(
            estimator,
            make_train_spec(
                job,
                input_pipeline.train_input_fn(
                    model_dir.parent / "train.csv",
                    batches,
                    shuffle_buffer=len(job.train) if settings.shuffle else 0,
                    seed=settings.seed,
                    replicas=replicas,
                    first_update=first_update,
                    stride=stride,
                ),
                progress,
                (settings.train_updates - progress.update) * steps,
                settings.train_updates,
                watchdog,
            ),
            tf.estimator.EvalSpec(
                _test_input_fn(model_dir),
                steps=None,
                hooks=_bars(job, "evaluation"),
                throttle_secs=0,
            ),
        )


def _make_estimator(job: Job, model_dir, batches: Batches, strategy=None):
    """Returns the Estimator of one model; its checkpoints lie between two updates."""
    steps = batches.gradient_accumulation_steps
    return make_estimator(
        make_model_fn(job.settings, measure(job.train), steps),
        job.settings,
        model_dir,
        _UPDATES_BETWEEN_CHECKPOINTS * steps,
        is_auto=batches.is_auto,
        strategy=strategy,
    )


def _bars(job: Job, description: str) -> list[BatchBar]:
    return [BatchBar(description, -(-len(job.test) // _EVAL_BATCH_SIZE))]


def _test_input_fn(model_dir: pathlib.Path) -> input_pipeline.InputFn:
    return input_pipeline.eval_input_fn(model_dir.parent / "test.csv", _EVAL_BATCH_SIZE)
