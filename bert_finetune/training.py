"""The training part of a run: alone, on several devices, or as a task of a cluster.

A run that evaluates during training trains from one evaluation to the next. Each part
and each evaluation has its own session, and memory holds one of them at a time; each
part resumes from the checkpoint of the one before.
"""

import gc
import logging
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from bert_finetune.evaluations import Evaluations
from bert_finetune.input_pipeline import InputFn, train_input_fn
from bert_finetune.inputs import Inputs
from bert_finetune.model_fn import AccumulationSteps, make_model_fn
from bert_finetune.windows import Windows
from estimator_accum.hooks import exits_between_trainings
from estimator_accum.programs import job
from estimator_accum.programs.batches import AUTO
from estimator_accum.programs.progress import Progress, latest_checkpoint, read_progress
from estimator_accum.programs.saving import without_scratch
from estimator_accum.programs.strategies import local_replicas, make_strategy

_logger = logging.getLogger("tensorflow.bert_finetune")


@dataclass(frozen=True)
class Run(Inputs, job.Job):
    """A checked run: nothing that it needs is missing.

    Attributes:
        windows: Windows of the training run; None without --do_train.
    """

    windows: Windows | None

    @property
    def padded_length(self) -> int | None:
        """Length that every example is padded to [tokens]; None pads per batch."""
        settings = self.settings
        return settings.max_seq_length if settings.pad_to_max_length else None


def train(run: Run, evaluations: Evaluations | None = None) -> bool:
    """Trains to the end of the run, resuming from its last checkpoint, if any.

    Args:
        run: The checked run.
        evaluations: Evaluations during training, which may end it early; None trains
            without.

    Returns:
        Whether anything was left to train.
    """
    progress = read_progress(run.settings.output_dir)
    windows, batches = run.windows, describe_batches(run.windows)
    job.log_plan(run.cluster, batches, windows.num_micro_steps(), windows.num_updates)
    if evaluations is None:
        return _train(run, progress, None)
    with exits_between_trainings():
        evaluations.open(progress.update)
        if not progress.micro_step and evaluations.is_missing(progress.update):
            evaluations.add(progress)  # killed before it was complete
        return _train(run, progress, evaluations)


def _train(run: Run, progress: Progress, evaluations: Evaluations | None) -> bool:
    settings, windows = run.settings, run.windows
    if evaluations is not None and evaluations.has_stopped:
        _logger.info(
            "%s is trained already, stopped early at update %s",
            settings.output_dir,
            f"{progress.update:,}",
        )
        return False
    is_new = not progress.global_step and not settings.init_checkpoint
    if is_new and run.cluster.is_chief:
        _logger.info("no --init_checkpoint: training starts from random weights")
    if not job.is_begun(run, settings.output_dir, progress, windows.num_updates):
        return False
    strategy = make_strategy(settings.strategy, run.cluster)
    estimator = make_estimator(run, strategy)
    # A cluster's chief writes the settings earlier, for the other tasks.
    hooks = [*run.hooks, _SettingsHook(run)]
    if not run.cluster.is_alone:
        _train_in_cluster(run, estimator, _input_fn(run, progress), progress)
    elif evaluations is None:
        # The input ends with the run, so a restart needs no number of remaining steps.
        estimator.train(_input_fn(run, progress), hooks=hooks)
    else:
        _train_in_parts(run, estimator, progress, hooks, evaluations)
    if run.cluster.is_chief:
        _logger.info("trained %s", latest_checkpoint(settings.output_dir))
    return True


class _SettingsHook(tf.compat.v1.train.SessionRunHook):
    """Writes `run_settings.json` before any checkpoint, and only if a graph is built."""

    def __init__(self, run: Run):
        self._run = run

    def begin(self) -> None:
        self._run.write_settings()


def make_estimator(run: Run, strategy: tf.distribute.Strategy | None = None):
    """Returns the Estimator of a run.

    With a strategy, checkpoints lie between two updates. (Not if updates are split by
    tokens, since their numbers of micro-steps differ. Inside an update, only the same
    number of replicas can resume.)

    Args:
        run: The checked run.
        strategy: Strategy to train with; None is one device.
    """
    settings, windows = run.settings, run.windows
    steps = settings.save_checkpoints_steps
    if strategy is not None:
        whole = windows.batches.gradient_accumulation_steps
        steps = -(-steps // whole) * whole
    num_updates, schedule = 1, 1
    if windows is not None:
        num_updates, schedule = windows.num_updates, _schedule(windows)
        if run.cluster.servers:  # whose workers take turns, and close any K in a row
            schedule = windows.batches.gradient_accumulation_steps
    return job.make_estimator(
        make_model_fn(settings, run.config, run.task, num_updates, schedule),
        settings,
        settings.output_dir,
        steps,
        is_auto=settings.micro_batch_size == AUTO,
        strategy=strategy,
    )


def _schedule(windows: Windows) -> AccumulationSteps:
    """Returns K: an integer, or a function of `update_step` if windows differ in K."""
    if windows.is_uneven:
        table = windows.micro_steps_by_update
        if np.all(table == table[0]):
            return int(table[0])
        return lambda update_step: tf.gather(
            tf.constant(table), tf.minimum(update_step, windows.num_updates - 1)
        )
    whole, last = windows.batches.gradient_accumulation_steps, windows.last_micro_steps
    if windows.num_updates == 1 or whole == last:
        return last

    def scheduled(update_step: tf.Variable) -> tf.Tensor:
        is_last = tf.equal(update_step, windows.num_updates - 1)
        return tf.where(is_last, last, whole)

    return scheduled


def _input_fn(run: Run, progress: Progress) -> InputFn:
    """Returns the input_fn for this process's share of the rest of the run."""
    update, stride = run.cluster.turn(progress.update)
    is_served = bool(run.cluster.servers)
    return train_input_fn(
        run.train,
        run.windows,
        replicas=local_replicas(run.settings.strategy, run.cluster),
        update=update,
        micro_step=0 if is_served else progress.micro_step,
        stride=stride if is_served else None,
        padded_length=run.padded_length,
    )


def _train_in_parts(
    run: Run, estimator, progress: Progress, hooks, evaluations: Evaluations
) -> None:
    """Trains from one evaluation to the next, to the end or to an early stop."""
    windows = run.windows
    is_over = False
    while not is_over:
        end = evaluations.next_update(progress.update)
        left = windows.num_micro_steps(progress.update, progress.micro_step)
        left -= windows.num_micro_steps(end)
        is_over = end == windows.num_updates
        estimator.train(
            _input_fn(run, progress),
            hooks=hooks,
            # The last part ends with the input, as a run without evaluations does.
            max_steps=None if is_over else progress.global_step + left,
        )
        gc.collect()  # the graph's cycles, before there is another one
        progress = read_progress(run.settings.output_dir)
        evaluations.add(progress)
        if evaluations.has_stopped and not is_over:
            is_over = True
            _logger.info("stopped early at update %s", f"{progress.update:,}")


def _train_in_cluster(run: Run, estimator, input_fn, progress: Progress) -> None:
    """Trains with the other tasks; a task that waits for a lost one ends itself."""
    watchdog = job.start_watchdog(run)
    left = run.windows.num_micro_steps(progress.update, progress.micro_step)
    with without_scratch(run.settings.output_dir, run.cluster):
        tf.estimator.train_and_evaluate(
            estimator,
            job.make_train_spec(
                run, input_fn, progress, left, run.windows.num_updates, watchdog
            ),
            tf.estimator.EvalSpec(input_fn),  # required, though no task evaluates
        )
    watchdog.stop()


def describe_batches(windows: Windows) -> str:
    """Returns the division of an update in words."""
    if windows.tokens is None:
        return str(windows.batches)
    return (
        f"effective batch {windows.batches.effective_batch_size} = micro-batches of "
        f"up to {windows.tokens} tokens x {windows.batches.replicas}"
    )
