"""When to update: the accumulation window, its counters and its boundary.

A window is K consecutive micro-steps that end in one optimizer update. Two counters
say where training stands, both global variables that checkpoints hold:

    update_step               optimizer updates so far   [updates]
    accumulation/micro_steps  micro-steps that the open window holds   [micro-steps]

The second is the clock of the predicate. It moves in the same chain of control
dependencies as `global_step`, so the two cannot drift apart, and unlike
`global_step % K` it stays right when K changes and when a partial window was applied.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

_UPDATE_STEP_KEY = "estimator_accum_update_step"
_WINDOWS_ATTRIBUTE = "_estimator_accum_windows"

AccumulationSteps = int | Callable[[tf.Variable], tf.Tensor]


def get_or_create_update_step() -> tf.Variable:
    """Returns the variable that counts optimizer updates.

    Learning rates, warm-up and decay take it where a plain model_fn takes
    `global_step`; it moves once per accumulation window.

    Creates:
        `update_step`: int64 scalar, not trainable, saved in checkpoints.

    Returns:
        The default graph's `update_step` [updates].
    """
    found = tf.compat.v1.get_collection(_UPDATE_STEP_KEY)
    if found:
        return found[0]
    return get_counter(
        "update_step", [tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, _UPDATE_STEP_KEY]
    )


def get_counter(name: str, collections: list[str] | None = None) -> tf.Variable:
    """Creates an int64 scalar that every replica sees with the same value.

    Args:
        name: Its name from the graph's root, whatever variable scope is open.
        collections: Graph collections; None is GLOBAL_VARIABLES.
    """
    with root_variable_scope():
        return tf.compat.v1.get_variable(
            name,
            shape=[],
            dtype=tf.int64,
            initializer=tf.compat.v1.zeros_initializer(),
            trainable=False,
            collections=collections,
            use_resource=True,  # a reference variable's read races its increment
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )


def root_variable_scope():
    """A variable scope at the graph's root, so that names do not depend on callers."""
    root = tf.compat.v1.VariableScope(reuse=False, name="")
    return tf.compat.v1.variable_scope(root, auxiliary_name_scope=False)


def check_accumulation_steps(steps: AccumulationSteps) -> None:
    """Raises unless `steps` is an integer >= 1 or a callable."""
    if callable(steps):
        return
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer):
        raise TypeError(
            "`gradient_accumulation_steps` must be an integer >= 1 or a callable of "
            f"the update step. Received: {steps!r}. Use 1 to turn accumulation off."
        )
    if steps < 1:
        raise ValueError(
            "`gradient_accumulation_steps` must be an integer >= 1. "
            f"Received: {steps}. Use 1 to turn accumulation off."
        )


def accumulation_steps_tensor(
    steps: AccumulationSteps, update_step: tf.Variable
) -> tf.Tensor:
    """Returns K of the open window as an int64 scalar [micro-steps per update].

    Raises:
        ValueError: If a callable returns something else than an integer scalar.
    """
    if not callable(steps):
        return tf.constant(steps, tf.int64)
    scheduled = tf.convert_to_tensor(steps(update_step))
    if not scheduled.dtype.is_integer or scheduled.shape.rank not in (0, None):
        raise ValueError(
            "`gradient_accumulation_steps` must return an integer scalar. Received: "
            f"{scheduled.dtype.name} of shape {scheduled.shape}. Cast it to tf.int64."
        )
    # A schedule that falls to 0 would never close a window of its own accord.
    at_least_one = tf.debugging.assert_positive(
        scheduled,
        message="`gradient_accumulation_steps` must return an integer >= 1.",
    )
    with tf.control_dependencies([at_least_one]):
        return tf.cast(tf.identity(scheduled), tf.int64)


class Window(NamedTuple):
    """What hooks may run and fetch of one accumulating train op; scalars throughout.

    Attributes:
        name: The scope of the window's variables.
        is_boundary: Whether this micro-step updates. Fed with True, any of
            `loss`, `gradient_norm`, `weight` and `update_step_after` applies a partial
            window without consuming a micro-batch.
        loss: Mean loss of the window that this micro-step closed; NaN off the boundary.
        gradient_norm: Its gradient's global norm before clipping; NaN off the boundary.
        weight: Sum of its weights over all replicas; NaN off the boundary.
        mean_loss: Mean loss of the open window so far, this replica's micro-batches;
            at a boundary that of the whole window.
        micro_steps: Counts the micro-steps of the open window; None for K = 1.
        steps: K of the open window [micro-steps per update].
        update_step: Counts updates.
        update_step_after: `update_step` as this micro-step leaves it.
        global_step: Counts micro-steps.
        global_step_after: `global_step` as this micro-step leaves it.
        state: Variables that a graph without accumulation does not have.
    """

    name: str
    is_boundary: tf.Tensor
    loss: tf.Tensor
    gradient_norm: tf.Tensor
    weight: tf.Tensor
    mean_loss: tf.Tensor
    micro_steps: tf.Variable | None
    steps: tf.Tensor
    update_step: tf.Variable
    update_step_after: tf.Tensor
    global_step: tf.Variable
    global_step_after: tf.Tensor
    state: list[tf.Variable]


def check_window_name(name: str) -> None:
    """Raises if another accumulating train op of the default graph has that name."""
    if any(window.name == name for window in get_windows()):
        raise ValueError(
            "`name` must be unique among the accumulating train ops of a graph. "
            f"Received: {name!r} a second time. Pass another `name`."
        )


def get_windows() -> list[Window]:
    """Returns the accumulating train ops of the default graph, in order of creation."""
    return list(getattr(tf.compat.v1.get_default_graph(), _WINDOWS_ATTRIBUTE, []))


def register(window: Window) -> None:
    """Makes `window` known to `get_windows`."""
    graph = tf.compat.v1.get_default_graph()
    # An attribute, not a collection: MetaGraphs could not serialize it.
    setattr(graph, _WINDOWS_ATTRIBUTE, [*get_windows(), window])
