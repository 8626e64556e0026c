"""The training part of a program."""

import logging
import os
import pathlib
from dataclasses import dataclass

import tensorflow as tf

from estimator_accum import microbatch_model_fn
from estimator_accum.programs.batches import Batches
from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.folder import (
    SETTINGS_FILE,
    check_same_run,
    read_settings,
    write_settings,
)
from estimator_accum.programs.inputs import Inputs
from estimator_accum.programs.progress import Progress, ends_at, read_progress
from estimator_accum.programs.settings import FLAGS, RunSettings
from estimator_accum.programs.strategies import make_session_config

_logger = logging.getLogger("tensorflow.estimator_accum")


@dataclass(frozen=True)
class Job(Inputs):
    """A checked run: nothing that it needs is missing.

    Attributes:
        batches: Division of each update's examples.
    """

    batches: Batches

    def check_folder(self, *models: str) -> None:
        """Raises ValueError if the output folder holds a run with other settings.

        A finished run may have had fewer updates: it is trained on.

        Args:
            *models: Names of folders in the output folder that may hold a model each;
                none if the output folder holds one.
        """
        folder = pathlib.Path(self.settings.output_dir)
        description = self.settings.description(self.batches, self.checksum)
        del description[FLAGS]
        path, before = folder / SETTINGS_FILE, None
        if path.exists():
            before = read_settings(path).get("train_updates")
        updates, is_finished = description["train_updates"], False
        if isinstance(before, int) and before < updates:
            found = filter(
                pathlib.Path.exists, (folder / name for name in models or ".")
            )
            is_finished = all(ends_at(model, before) for model in found)
        if is_finished:
            del description["train_updates"]
        check_same_run(folder, description)
        if is_finished:
            _logger.info(
                "training on after update %s: the run, and a schedule of its learning "
                "rate, now have %s",
                f"{before:,}",
                f"{updates:,}",
            )

    def write_settings(self) -> None:
        """Writes the settings with which the run can resume."""
        description = self.settings.description(self.batches, self.checksum)
        write_settings(self.settings.output_dir, description)


def begin(job: Job, model_dir: str | os.PathLike, batches: Batches) -> Progress | None:
    """Logs the training ahead; returns the progress so far, None at the end.

    Args:
        job: The checked run.
        model_dir: Folder of the model.
        batches: Division of this model's updates.
    """
    progress, updates = read_progress(str(model_dir)), job.settings.train_updates
    if job.cluster.is_chief:
        log_plan(batches, updates * batches.gradient_accumulation_steps, updates)
    if job.cluster.is_evaluator:
        return progress
    if progress.update >= updates:
        if job.cluster.is_chief:
            _logger.info("%s is trained already", model_dir)
        return None
    if progress.update and job.cluster.is_chief:
        _logger.info("resuming after update %s", f"{progress.update:,}")
    log_building(job.cluster)
    return progress


def log_building(cluster: Cluster) -> None:
    """Logs that the next seconds build and prepare the graph; once in a cluster."""
    if cluster.is_chief:
        _logger.info("building the graph")


def log_plan(batches: object, micro_steps: int, updates: int) -> None:
    """Logs how the examples of each update are divided, and the length of the run."""
    _logger.info(
        "%s; %s micro-steps = %s updates", batches, f"{micro_steps:,}", f"{updates:,}"
    )


def make_estimator(
    model_fn,
    settings: RunSettings,
    model_dir: str | os.PathLike,
    save_steps: int,
    *,
    is_auto: bool,
    strategy: tf.distribute.Strategy | None = None,
):
    """Returns the Estimator of a run.

    Args:
        model_fn: Its model_fn, of micro-batches.
        settings: Settings of the run.
        model_dir: Folder of the model.
        save_steps: Runs of the train op between checkpoints. With a strategy they must
            lie between two updates, where the replicas' gradient sums are empty: then a
            different number of replicas resumes as exactly as the same.
        is_auto: Whether batches are cut into as many micro-batches as memory requires.
        strategy: Strategy to train with; None is one device.
    """
    return tf.estimator.Estimator(
        microbatch_model_fn(model_fn, "auto") if is_auto else model_fn,
        config=tf.estimator.RunConfig(
            model_dir=os.path.abspath(model_dir),
            tf_random_seed=settings.seed,
            save_checkpoints_steps=save_steps,
            # Our reports write the loss of every update; each further set of tensors
            # that a run fetches is another graph to optimize. With a strategy,
            # TensorFlow writes no checkpoint without a hook for summaries.
            save_summary_steps=None if strategy is None else 100,
            log_step_count_steps=None if strategy is None else 100,
            session_config=make_session_config(settings, strategy),
            train_distribute=strategy,
            experimental_max_worker_delay_secs=0,
        ),
    )
