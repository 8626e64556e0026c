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

import numpy as np
import tensorflow as tf

_UPDATE_STEP_KEY = "estimator_accum_update_step"

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
        return tf.cast(scheduled, tf.int64)
