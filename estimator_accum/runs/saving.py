"""The hook that saves a program's checkpoints."""

import tensorflow as tf

from estimator_accum.runs.disk import DiskSpaceHook


def make_saver_hooks(config) -> list[tf.compat.v1.train.SessionRunHook]:
    """Makes the hook that Estimator makes of a config, without its `session.run`s.

    With `save_checkpoints_steps` Estimator's own fetches `global_step` once more after
    every micro-step, since a `session.run` might be 1,000,000 steps. Where a training
    hook is a CheckpointSaverHook, Estimator makes none.

    Args:
        config: The Estimator's `tf.estimator.RunConfig`.

    Returns:
        The hook, to stand behind those that report: no checkpoint is then ahead of its
        row. None with a strategy, whose session makes its own, and without
        `save_checkpoints_steps`. For the chief, one that looks for room on the disk.
    """
    room = [DiskSpaceHook(config)] if config.is_chief else []
    if config.train_distribute is not None or config.save_checkpoints_steps is None:
        return room
    hook = tf.compat.v1.train.CheckpointSaverHook(
        config.model_dir,
        save_steps=config.save_checkpoints_steps,
        save_graph_def=config.checkpoint_save_graph_def,
    )
    hook._set_steps_per_run(1)
    return [*room, hook]
