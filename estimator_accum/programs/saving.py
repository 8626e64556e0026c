"""The hook that saves a program's checkpoints, and a session that starts sooner."""

import tensorflow as tf

from estimator_accum.programs.disk import DiskSpaceHook


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
        hook with a strategy, whose session makes its own, or without
        `save_checkpoints_steps`.
    """
    room = [DiskSpaceHook(config, num_copies)] if config.is_chief else []
    if config.train_distribute is not None or config.save_checkpoints_steps is None:
        return room
    _skip_the_search_for_uninitialized_variables()
    hook = _SaverHook(
        config.model_dir,
        save_steps=config.save_checkpoints_steps,
        save_graph_def=config.checkpoint_save_graph_def,
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


def _skip_the_search_for_uninitialized_variables() -> None:
    """Lets a session start without a look at each variable.

    One process initializes or restores all of them, and has no other to wait for.
    """
    none = tf.constant([], tf.string, name="uninitialized_variables")
    keys = tf.compat.v1.GraphKeys
    for key in (keys.READY_OP, keys.READY_FOR_LOCAL_INIT_OP):
        tf.compat.v1.add_to_collection(key, none)
