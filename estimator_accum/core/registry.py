"""The windows of a graph, and its `update_step`."""

import tensorflow as tf

from estimator_accum.core.state import Window
from estimator_accum.graph.outermost import outermost_graph
from estimator_accum.graph.variables import create_shared_scalar

_UPDATE_STEP_KEY = "estimator_accum_update_step"
_WINDOWS_ATTRIBUTE = "_estimator_accum_windows"


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
        found = tf.compat.v1.get_collection(_UPDATE_STEP_KEY)
        if found:
            return found[0]
        keys = [tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, _UPDATE_STEP_KEY]
        return create_shared_scalar("update_step", tf.int64, keys)


def get_windows() -> list[Window]:
    """Returns the accumulating train ops of the default graph, in order of creation."""
    return list(getattr(outermost_graph(), _WINDOWS_ATTRIBUTE, []))


def register(window: Window) -> None:
    """Makes `window` known to `get_windows`."""
    # An attribute, not a collection: MetaGraphs could not serialize it.
    setattr(outermost_graph(), _WINDOWS_ATTRIBUTE, [*get_windows(), window])
