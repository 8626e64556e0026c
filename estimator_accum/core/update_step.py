"""The variable that counts updates."""

import tensorflow as tf

from estimator_accum.graph.variables import create_shared_scalar

_KEY = "estimator_accum_update_step"


def get_or_create_update_step() -> tf.Variable:
    """Returns the variable that counts optimizer updates.

    Learning rates, warm-up and decay use it where a plain model_fn uses
    `global_step`; it moves once per accumulation window. If a graph has several
    accumulating train ops, it counts the updates of the first.

    Creates:
        `update_step`: int64 scalar, not trainable, saved in checkpoints.

    Returns:
        The default graph's `update_step` [updates].
    """
    with tf.init_scope():  # the caller may be building a branch
        variables = tf.compat.v1.get_collection(_KEY)
        if variables:
            return variables[0]
        keys = [tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, _KEY]
        return create_shared_scalar("update_step", tf.int64, keys)
