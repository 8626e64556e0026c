"""The hook that saves a program's checkpoints."""

import tensorflow as tf

from estimator_accum.programs.disk import DiskSpaceHook


def make_saver_hooks(
    config, num_copies: int = 0
) -> list[tf.compat.v1.train.SessionRunHook]:
    """Returns a replacement for Estimator's saver hook, with fewer `session.run`s.

    With `save_checkpoints_steps`, Estimator's own hook fetches `global_step` once more
    after every micro-step, since one `session.run` might be 1,000,000 steps. Estimator
    makes no hook of its own if a training hook is a CheckpointSaverHook.

    Args:
        config: The Estimator's `tf.estimator.RunConfig`.
        num_copies: Checkpoints that the program keeps besides those of the config.

    Returns:
        The hooks, to be placed after those that report, so that no checkpoint is ahead
        of its row. On the chief, the first one checks the disk space. There is no saver
        hook with a strategy, whose session makes its own, or without
        `save_checkpoints_steps`.
    """
    room = [DiskSpaceHook(config, num_copies)] if config.is_chief else []
    if config.train_distribute is not None or config.save_checkpoints_steps is None:
        return room
    hook = tf.compat.v1.train.CheckpointSaverHook(
        config.model_dir,
        save_steps=config.save_checkpoints_steps,
        save_graph_def=config.checkpoint_save_graph_def,
    )
    hook._set_steps_per_run(1)
    return [*room, hook]
