"""The training part of a program."""

import functools
import logging
import os
import pathlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from estimator_accum import microbatch_model_fn
from estimator_accum.programs.batches import Batches
from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.folder import (
    SETTINGS_FILE,
    OtherRunError,
    check_same,
    settings_in,
    write_settings,
    write_text,
)
from estimator_accum.programs.inputs import Inputs
from estimator_accum.programs.progress import Progress, ends_at, read_progress
from estimator_accum.programs.servers import StopAtUpdate
from estimator_accum.programs.settings import RunSettings
from estimator_accum.programs.strategies import make_session_config
from estimator_accum.programs.watchdog import LostTaskError, ProgressHook, Watchdog

_logger = logging.getLogger("tensorflow.estimator_accum")

_CLUSTER, _FIRST_STEP = "cluster", "global_step"  # keys in `run_settings.json`
_REFUSAL = ".run.refusal"  # of a task that the chief waits for in vain
_SECS_TO_CONNECT = 10


@dataclass(frozen=True)
class Job(Inputs):
    """A checked run: nothing that it needs is missing.

    Attributes:
        batches: Division of each update's examples; None without training.
        description: Content of `run_settings.json`, with which the run can resume.
        hooks: Further hooks of the training that the whole cluster takes part in.
    """

    batches: Batches | None
    description: dict[str, Any]
    hooks: Sequence[tf.compat.v1.train.SessionRunHook] = field(default=(), kw_only=True)

    def write_settings(self) -> None:
        """Writes `run_settings.json`."""
        write_settings(self.settings.output_dir, self.description)


def make_job(inputs: Inputs, num_replicas: int) -> Job:
    """Returns the job of a run of `train_updates`, for a number of replicas."""
    batches = inputs.settings.batches(num_replicas)
    description = inputs.settings.description(batches, inputs.checksum)
    return Job(**vars(inputs), batches=batches, description=description)


def check_folder(job: Job, *models: str) -> None:
    """Raises ValueError if the output folder holds a run with other settings.

    A finished run may have had fewer updates: it is trained on.

    Args:
        job: A job of `make_job`.
        *models: Names of folders in the output folder that may hold a model each; none
            if the output folder holds one.
    """
    length, folder = "train_updates", job.settings.output_dir
    now, updates_of = dict(job.description), lambda run: run[length]
    before = finished_run(folder, length, now[length], updates_of, models or ["."])
    if before is not None:
        del now[length]
    check_same(
        folder,
        now,
        "Use another --output_dir, or the same settings and files; a finished run "
        "trains on.",
    )
    if before is not None:
        _logger.info(
            "training on after update %s: the run, and a schedule of its learning "
            "rate, now have %s",
            f"{before[length]:,}",
            f"{job.settings.train_updates:,}",
        )


def finished_run(
    output_dir: str | os.PathLike,
    length: str,
    new_length: float,
    updates_of: Callable[[Mapping[str, Any]], int],
    models: Sequence[str] = (".",),
) -> dict[str, Any] | None:
    """Returns the settings of the folder's run if it is finished and was shorter.

    Args:
        output_dir: Output folder of this run.
        length: Setting that determines the length of a run.
        new_length: Its value in this run.
        updates_of: Function of a run's settings that returns the number of its updates.
        models: Names of folders in the output folder that may hold a model each.
    """
    run = settings_in(output_dir)
    if not isinstance(run.get(length), int | float) or run[length] >= new_length:
        return None
    folders = (pathlib.Path(output_dir, name) for name in models)
    existing = [folder for folder in folders if folder.exists()]
    return run if all(ends_at(folder, updates_of(run)) for folder in existing) else None


def begin(job: Job, model_dir: str | os.PathLike, batches: Batches) -> Progress | None:
    """Logs the training ahead; returns the progress so far, None at the end.

    Args:
        job: The checked run.
        model_dir: Folder of the model.
        batches: Division of this model's updates.
    """
    progress, updates = read_progress(str(model_dir)), job.settings.train_updates
    log_plan(
        job.cluster, batches, updates * batches.gradient_accumulation_steps, updates
    )
    is_left = job.cluster.is_evaluator or is_begun(job, model_dir, progress, updates)
    return progress if is_left else None


def is_begun(
    job: Job, model_dir: str | os.PathLike, progress: Progress, updates: int
) -> bool:
    """Logs where training begins; returns False if nothing is left to train.

    Args:
        job: The checked run.
        model_dir: Folder of the model.
        progress: Its progress.
        updates: Updates of the whole run.
    """
    is_left = progress.update < updates or progress.micro_step > 0
    if job.cluster.is_chief and not is_left:
        _logger.info("%s is trained already", model_dir)
    elif job.cluster.is_chief:
        if progress.global_step:
            inside = f", micro-step {progress.micro_step}"
            update = f"{progress.update:,}{inside if progress.micro_step else ''}"
            _logger.info("resuming after update %s", update)
        _logger.info("building the graph")  # which takes some seconds
    return is_left


def log_plan(cluster: Cluster, batches: object, micro_steps: int, updates: int) -> None:
    """Logs the division of each update, and the length of the run; once in a cluster."""
    if cluster.is_chief:
        length = f"{micro_steps:,} micro-steps = {updates:,} updates"
        if cluster.servers:
            count = cluster.num_workers
            length += f" of {count} worker{'s' * (count > 1)}"
        _logger.info("%s; %s", batches, length)


def make_train_spec(
    job: Job,
    input_fn: Callable,
    progress: Progress,
    micro_steps: int,
    updates: int,
    watchdog: Watchdog,
):
    """Returns the `tf.estimator.TrainSpec` of a task.

    Args:
        job: The checked run.
        input_fn: This task's input_fn.
        progress: Progress of the run.
        micro_steps: Micro-steps that are left.
        updates: Updates of the whole run.
        watchdog: Watchdog that is told of progress in a cluster.
    """
    first = progress.global_step
    max_steps = int(first + micro_steps)
    hooks = list(job.hooks)
    if job.cluster.servers:
        first = None
        if not job.cluster.is_evaluator:
            max_steps = None
            hooks.append(StopAtUpdate(updates))
    if not job.cluster.is_alone:
        together = SameRunHook(job, first, max_steps)
        if job.cluster.is_chief:  # its server, which all sessions need, starts later
            together.write()
            watchdog.refusal = together.refusal
        hooks += [together, ProgressHook(watchdog, first)]
    return tf.estimator.TrainSpec(input_fn, max_steps, hooks)


def start_watchdog(job: Job, watched: pathlib.Path | None = None) -> Watchdog:
    """Returns the watchdog of a task; in a cluster it is started."""
    reason = functools.partial(find_reason, job)
    secs, name = job.settings.watchdog_secs, job.cluster.name
    watchdog = Watchdog(secs, name, watched=watched, find_reason=reason)
    if not job.cluster.is_alone:
        watchdog.start()
    return watchdog


def find_reason(job: Job) -> str | None:
    """Returns a sentence if the chief trains, and has not written to this folder.

    A chief that has not started yet is no reason: all tasks may start again.
    """
    host, _, port = job.cluster.with_chief().chief.rpartition(":")
    try:  # the chief writes its files before it listens
        socket.create_connection((host.strip("[]"), port), _SECS_TO_CONNECT).close()
    except OSError:
        return None
    folder = pathlib.Path(job.settings.output_dir)
    return None if (folder / SETTINGS_FILE).exists() else _not_shared(folder)


def _not_shared(output_dir: str | os.PathLike) -> str:
    """Returns the sentence about a folder in which the chief has written nothing."""
    return (
        "All tasks of a cluster must share `--output_dir`. Received: "
        f"{os.path.abspath(output_dir)}, in which the chief, which trains, has written "
        "nothing. Use a folder that all tasks can read and write."
    )


class SameRunHook(tf.compat.v1.train.SessionRunHook):
    """Ends a task that trains another run than the chief, before its first micro-step.

    Only when there is a session has the chief certainly written `run_settings.json`,
    whose `cluster` says where its training begins and ends. An evaluator's first session
    has a checkpoint of the chief; it compares the settings alone.

    Args:
        job: The checked run of this task.
        first_global_step: `global_step` at its checkpoint; None with parameter servers.
        last_global_step: `global_step` at the end of training; None if that is open.
    """

    def __init__(
        self,
        job: Job,
        first_global_step: int | None = None,
        last_global_step: int | None = None,
    ):
        self._job = job
        self.refusal = pathlib.Path(job.settings.output_dir, _REFUSAL)
        batches = job.batches
        self._division = {
            "replicas": batches.num_replicas,
            "micro_batch_size": batches.largest_share,
            "gradient_accumulation_steps": batches.gradient_accumulation_steps,
            # All tasks take part in each save.
            **job.settings.collective(),
        }
        self._steps = {_FIRST_STEP: first_global_step, "max_steps": last_global_step}

    def write(self) -> None:
        """Writes the settings, with the beginning of the chief's training."""
        self.refusal.unlink(missing_ok=True)
        start = {_CLUSTER: self._division | self._steps}
        write_settings(self._job.settings.output_dir, self._job.description | start)

    def after_create_session(self, session, coord) -> None:
        """Compares this task with the chief.

        Raises:
            OtherRunError: If the tasks have other flags or files, or other folders.
            LostTaskError: If they resume from other checkpoints.
        """
        folder = self._job.settings.output_dir
        if self._job.cluster.is_evaluator:
            check_folder(self._job)
            return
        chief = settings_in(folder).get(_CLUSTER)
        if chief is None:
            # A chief that has finished has written the flags alone, and so has a run
            # that this folder has from before, if the chief has another folder.
            reason = "The chief has finished that run, or writes to another folder. "
            self._check_same({}, reason)
            raise OtherRunError(_not_shared(folder))
        first = self._steps[_FIRST_STEP]
        if chief[_FIRST_STEP] != first:
            raise LostTaskError(
                "All tasks of a cluster must resume from the same checkpoint. Received: "
                f"global_step {first} in {self._job.cluster.name}, and "
                f"{chief[_FIRST_STEP]} in the chief: a task was started later than the "
                f"others, or {os.path.abspath(folder)} is another folder there. Start "
                "all tasks again, with a folder that all of them share."
            )
        try:
            self._check_same({_CLUSTER: self._division | self._steps})
        except OtherRunError as error:
            write_text(self.refusal, f"{self._job.cluster.name}: {error}")
            raise

    def _check_same(self, start: Mapping[str, Any], reason: str = "") -> None:
        check_same(
            self._job.settings.output_dir,
            self._job.description | start,
            f"{reason}Start all tasks again with the same flags and files, and a folder "
            "that all of them share.",
            "All tasks of a cluster must be started with the same flags and files.",
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
        is_auto: Whether batches are split into as many micro-batches as memory requires.
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
