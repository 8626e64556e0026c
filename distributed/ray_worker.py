"""Training in a worker of Ray Train, which reports its checkpoints.

    def train_loop(config):
        report = RayReport()
        train_spec = tf.estimator.TrainSpec(input_fn, max_steps=1000, hooks=[report])
        tf.estimator.train_and_evaluate(estimator, train_spec, eval_spec)
        report.send(path=estimator.latest_checkpoint())

    TensorflowTrainer(train_loop, tensorflow_config=WatchedConfig(), ...).fit()

Ray's `report` waits until all workers have called it. Their sessions save at the same
micro-steps, so that each save is the time of a report.
"""

import dataclasses
import importlib
import importlib.util
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import ray.train
import tensorflow as tf
from ray.train.tensorflow import TensorflowConfig

from estimator_accum import watch_signals
from estimator_accum.programs.folder import (
    EVAL_RESULTS,
    METRICS,
    last_row,
    make_run_folder,
)
from estimator_accum.programs.lock import locked
from estimator_accum.programs.program import set_verbosity
from estimator_accum.programs.progress import named_checkpoint, read_values
from estimator_accum.programs.saving import copy_checkpoint


@dataclasses.dataclass
class WatchedConfig(TensorflowConfig):
    """Ray's cluster for TensorFlow, in which a signal to a worker saves a checkpoint."""

    @property
    def backend_cls(self):
        """Class of Ray that prepares the workers."""
        return _WatchedBackend


class _WatchedBackend(TensorflowConfig().backend_cls):
    """Handles signals in the workers' main threads: they train in another one."""

    def on_start(self, worker_group, backend_config) -> None:
        super().on_start(worker_group, backend_config)
        worker_group.execute(_prepare_main_thread)


def _prepare_main_thread() -> None:
    if importlib.util.find_spec("tf_keras") is None:  # as with TensorFlow up to 2.15
        os.environ.pop("TF_USE_LEGACY_KERAS", None)  # which Ray sets
    watch_signals()


def train_program(config: Mapping[str, Any]) -> None:
    """Trains a program of this project as one of Ray's workers.

    Args:
        config: The program's module, `program`, and its flags, `arguments`.
    """
    program = importlib.import_module(config["program"]).PROGRAM
    values, argv = program.flags(), [config["program"], *config["arguments"]]
    settings, cluster = program.read(values, argv)
    set_verbosity(values.verbosity, program.room)
    jobs, job = program.prepare(settings, cluster, argv)
    make_run_folder(settings.output_dir)
    report = RayReport()
    # A worker from before a restart may still be ending.
    with locked(settings.output_dir, cluster.is_chief, waits=True):
        results = jobs.execute(dataclasses.replace(job, hooks=[report]))
    if results:
        print(results.rstrip("\n"))
    folder = pathlib.Path(settings.output_dir)
    checkpoint = _last_checkpoint(folder)
    report.send(_evaluated(folder, checkpoint), checkpoint)


def _last_checkpoint(output_dir: pathlib.Path) -> str | None:
    """Returns the path of the run's last checkpoint; None if it has not trained."""
    models = sorted(output_dir.rglob(METRICS), key=lambda path: (len(path.parts), path))
    return named_checkpoint(models[0].parent) if models else None


def _evaluated(output_dir: pathlib.Path, checkpoint: str | None) -> dict[str, float]:
    """Returns a checkpoint's metrics by name, such as eval_accuracy, if it has any.

    Without a checkpoint they are those of another one, which is evaluated alone.
    """
    path = output_dir / EVAL_RESULTS
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = (line.split(" = ") for line in lines)
    values = {name: float(value) for name, value in pairs}
    if checkpoint is not None:
        step = read_values(checkpoint, ["global_step"]).get("global_step")
        if step != values.get("global_step"):
            return {}  # they are of an earlier run, or of the best checkpoint
    return {f"eval_{name.removeprefix('eval_')}": values[name] for name in values}


class RayReport(tf.compat.v1.train.SessionRunHook):
    """Reports each checkpoint before the next micro-step, in every worker.

    The checkpoint is that of worker 0, with the last row of `train_metrics.csv` in its
    folder as metrics. The save at the beginning of training is not reported.

    Raises:
        ValueError: If the session has no saver that the hook could find.
    """

    def __init__(self):
        self._path, self._is_due, self._has_run = None, False, False

    def after_create_session(self, session, coord) -> None:
        self._has_run = False
        savers = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SAVERS)
        if not savers:
            raise ValueError(
                "RayReport must find the saver of checkpoints in the collection SAVERS. "
                "Received: an empty collection. Add the Scaffold's saver to it."
            )
        for saver in savers:
            self._watch(saver)

    def _watch(self, saver: tf.compat.v1.train.Saver) -> None:
        save = saver.save

        def save_and_note(*args, **kwargs):
            self._path = save(*args, **kwargs)
            self._is_due |= self._has_run
            return self._path

        saver.save = save_and_note

    def before_run(self, run_context) -> None:
        if self._is_due:
            self.send()
        self._has_run = True

    def send(
        self, metrics: Mapping[str, float] | None = None, path: str | None = None
    ) -> None:
        """Reports the last checkpoint; all workers must call it.

        Args:
            metrics: More metrics, of worker 0.
            path: Path of the checkpoint, by default of the one that was saved last.
        """
        self._is_due = False
        values, path = dict(metrics or {}), path or self._path
        if ray.train.get_context().get_world_rank() or path is None:
            ray.train.report(values)
            return
        with tempfile.TemporaryDirectory() as folder:
            copy_checkpoint(path, folder)
            values = last_row(pathlib.Path(path).parent) | values
            checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report(values, checkpoint=checkpoint)
