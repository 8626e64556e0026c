"""Checkpoints of a program, which its chief alone keeps.

In a cluster TensorFlow lets every task save, since reading the replicas' sums takes all
of them, and each but one writes to a folder of its own, `tmp_worker_1`. Here these tasks
read and write nothing.
"""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

import tensorflow as tf

from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.disk import DiskSpaceHook


@contextlib.contextmanager
def without_scratch(model_dir: str | os.PathLike, cluster: Cluster) -> Iterator[None]:
    """Removes, after the `with` block, the event files of a task that is not the chief.

    Args:
        model_dir: The Estimator's folder, in which TensorFlow makes `tmp_worker_1`.
        cluster: Cluster of which this process is a task.
    """
    try:
        yield
    finally:
        if not cluster.is_chief:
            tf.compat.v1.summary.FileWriterCache.clear()  # closes them
            name = f"tmp_{cluster.task_type}_{cluster.task_index}"
            shutil.rmtree(pathlib.Path(model_dir) / name, ignore_errors=True)


def copy_checkpoint(path: str | os.PathLike, folder: str | os.PathLike) -> None:
    """Copies a checkpoint into a folder, with the file that names it.

    Args:
        path: Path of the checkpoint, such as output/model.ckpt-100.
        folder: An existing folder.
    """
    source = pathlib.Path(path)
    for file in source.parent.glob(f"{source.name}.*"):
        shutil.copy(file, folder)
    tf.compat.v1.train.update_checkpoint_state(os.fspath(folder), source.name)


def make_saver_hooks(
    config, num_copies: int = 0
) -> list[tf.compat.v1.train.SessionRunHook]:
    """Returns a replacement for Estimator's saver hook, with less work.

    With `save_checkpoints_steps`, Estimator's own hook fetches `global_step` once more
    after every micro-step, since one `session.run` might be 1,000,000 steps, and writes
    graph.pbtxt at the start, which takes longer than the first checkpoint. Estimator
    makes no hook of its own if a training hook is a CheckpointSaverHook.

    Args:
        config: The Estimator's `tf.estimator.RunConfig`.
        num_copies: Checkpoints that the program keeps besides those of the config.

    Returns:
        The hooks, to be placed after those that report, so that no checkpoint is ahead
        of its row. On the chief, the first one checks the disk space. There is no saver
        hook with a strategy, whose session makes its own, on other tasks than the
        chief, or without `save_checkpoints_steps`.

    Creates:
        In a task of a cluster that is not to write checkpoints, the graph's Saver.
    """
    room = [DiskSpaceHook(config, num_copies)] if config.is_chief else []
    strategy = config.train_distribute
    if strategy is not None and not strategy.extended.should_checkpoint:
        savers = tf.compat.v1.get_collection_ref(tf.compat.v1.GraphKeys.SAVERS)
        if not savers:  # several replicas of this process make their hooks
            savers.append(_ReadingSaver(sharded=True, defer_build=True))
    is_saved_elsewhere = strategy is not None or not config.is_chief
    if is_saved_elsewhere or config.save_checkpoints_steps is None:
        return room
    hook = _SaverHook(
        config.model_dir,
        save_steps=config.save_checkpoints_steps,
        save_graph_def=config.checkpoint_save_graph_def,
        listeners=[_FirstCheckpointListener(config.model_dir)],
    )
    hook._set_steps_per_run(1)
    return [*room, hook]


class _SaverHook(tf.compat.v1.train.CheckpointSaverHook):
    """Saves as its base class does, but the graph only in each checkpoint's .meta."""

    def begin(self) -> None:
        super().begin()
        # The tensor that other hooks fetch, rather than one more.
        self._global_step_tensor = tf.compat.v1.train.get_global_step()

    def after_create_session(self, session, coord) -> None:
        global_step = session.run(self._global_step_tensor)
        self._save(session, global_step)
        self._timer.update_last_triggered_step(global_step)


class _FirstCheckpointListener(tf.compat.v1.train.CheckpointSaverListener):
    """Removes the checkpoint of update 0 when two later ones have been written.

    After the first of them, an evaluator may still be reading it.
    """

    def __init__(self, model_dir: str):
        self._path = os.path.join(model_dir, "model.ckpt-0")
        self._is_replaced = False

    def before_save(self, session, global_step_value) -> None:
        """Has the saver forget it, so that the file `checkpoint` will not name it."""
        saver, *_ = session.graph.get_collection(tf.compat.v1.GraphKeys.SAVERS)
        paths = saver.last_checkpoints
        self._is_replaced = len(paths) > 1 and self._path in paths
        if self._is_replaced:
            saver.recover_last_checkpoints([p for p in paths if p != self._path])

    def after_save(self, session, global_step_value) -> None:
        """Removes its files."""
        if self._is_replaced:
            tf.compat.v1.train.remove_checkpoint(self._path)


class _ReadingSaver(tf.compat.v1.train.Saver):
    """Takes part in the chief's saves: it reads the variables and writes nothing."""

    def save(self, sess, *args, **kwargs) -> None:
        """Reads the variables that a checkpoint would hold."""
        scope = self.saver_def.save_tensor_name.partition("/")[0]
        writers = [
            operation
            for operation in sess.graph.get_operations()
            if operation.type == "SaveV2" and operation.name.startswith(f"{scope}/")
        ]
        # After the path, the names and the slices come the values.
        sess.run([value.op for writer in writers for value in writer.inputs[3:]])
