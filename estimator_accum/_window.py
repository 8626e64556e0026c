"""The accumulation window as hooks see it: K, its counters and its boundary.

A window is K consecutive micro-steps that end in one optimizer update. Two counters
say where training stands, both global variables that checkpoints hold:

    update_step               optimizer updates so far   [updates]
    accumulation/micro_steps  micro-steps in the open window   [micro-steps]

The second one decides whether a micro-step is a boundary. It moves in the same chain of
control dependencies as `global_step`, so the two cannot drift apart, and unlike
`global_step % K` it stays right when K changes and when a partial window was applied.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum._graph import create_shared_scalar

_SCOPE_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
_UPDATE_STEP_KEY = "estimator_accum_update_step"
_WINDOWS_ATTRIBUTE = "_estimator_accum_windows"

AccumulationSteps = int | Callable[[tf.Variable], tf.Tensor]


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


def check_accumulation_steps(steps: AccumulationSteps) -> None:
    """Raises TypeError or ValueError unless `steps` is an int >= 1 or a callable."""
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
        ValueError: If a callable returns anything but an integer scalar.
    """
    if not callable(steps):
        return tf.constant(steps, tf.int64)
    scheduled = steps(update_step)
    if scheduled is not None:
        scheduled = tf.convert_to_tensor(scheduled)
    if (
        scheduled is None
        or not scheduled.dtype.is_integer
        or scheduled.shape.rank not in (0, None)
    ):
        received = (
            None
            if scheduled is None
            else f"{scheduled.dtype.name} of shape {scheduled.shape}"
        )
        raise ValueError(
            "`gradient_accumulation_steps` must return an integer scalar. Received: "
            f"{received}. Cast it to tf.int64."
        )
    # A schedule below 1 is a mistake: each window would close after one micro-step.
    at_least_one = tf.debugging.assert_positive(
        scheduled,
        message="`gradient_accumulation_steps` must return an integer >= 1",
    )
    with tf.control_dependencies([at_least_one]):
        return tf.cast(tf.identity(scheduled), tf.int64)


class Window(NamedTuple):
    """Tensors and variables of one accumulating train op, for hooks; all scalars.

    Attributes:
        name: Scope of the window's variables.
        is_boundary: Whether this micro-step closes the window. Fed with True, any of
            `loss`, `gradient_norm`, `weight` and `update_step_after` applies a partial
            window without consuming a micro-batch.
        has_updated: Whether the optimizer was applied: true at boundaries, unless the
            window was skipped because it was not finite.
        loss: Mean loss of the window that this micro-step closed; NaN off the boundary.
        gradient_norm: Global norm of what the optimizer gets, before `clip_norm`; NaN off
            the boundary.
        weight: Sum of the window's weights over all replicas; NaN off the boundary.
        noise_scale: Gradient noise scale, in the unit of the weights, over the updates
            so far; NaN off the boundary, and always NaN if it is not estimated.
        mean_loss: Mean loss of this replica's micro-batches in the open window; at a
            boundary, in the whole window.
        micro_steps: Variable, the number of micro-steps in the open window; None if
            every run of the train op ends a window.
        micro_steps_after: `micro_steps` after this micro-step, before a boundary resets
            it to 0; running it counts one. K if there is no counter.
        gradient_accumulation_steps: K of the open window [micro-steps per update].
        num_replicas: Number of replicas that train in sync, a Python int.
        clipped_share: Share of the updates so far that were clipped, 0 to 1.
        update_step: Variable, the number of updates.
        update_step_after: `update_step` after this micro-step.
        of_partial: (`update_step_after`, `clipped_share`) for applying a partial
            window. They do not wait for the operations that read `update_step`, which
            may need a micro-batch.
        global_step: Variable, the number of micro-steps; None if the caller counts.
        global_step_after: `global_step` after this micro-step; None if the caller
            counts micro-steps.
        stop_request: Placeholder, fed with 1.0 if this task of a cluster should stop;
            None outside clusters.
        stop_requests: At a boundary in a cluster, >= 1.0 if any task should stop after
            this window; NaN elsewhere.
        state: Variables that a graph without accumulation does not have.
        statistics: More such variables, which are only reported.
    """

    name: str
    is_boundary: tf.Tensor
    has_updated: tf.Tensor
    loss: tf.Tensor
    gradient_norm: tf.Tensor
    weight: tf.Tensor
    noise_scale: tf.Tensor
    mean_loss: tf.Tensor
    micro_steps: tf.Variable | None
    micro_steps_after: tf.Tensor
    gradient_accumulation_steps: tf.Tensor
    num_replicas: int
    clipped_share: tf.Tensor
    update_step: tf.Variable
    update_step_after: tf.Tensor
    of_partial: tuple[tf.Tensor, tf.Tensor]
    global_step: tf.Variable | None
    global_step_after: tf.Tensor | None
    stop_request: tf.Tensor | None
    stop_requests: tf.Tensor
    state: list[tf.Variable]
    statistics: list[tf.Variable]


def window_name(name: str | None) -> str:
    """Returns `name`, or the first free one of "accumulation", "accumulation_1", ...

    Raises:
        ValueError: If `name` is not a valid scope, or another accumulating train op of
            the graph has it.
    """
    known = {window.name for window in get_windows()}
    if name is None:
        names = [
            "accumulation",
            *(f"accumulation_{i}" for i in range(1, 1 + len(known))),
        ]
        return next(name for name in names if name not in known)
    if not isinstance(name, str) or not _SCOPE_NAME.fullmatch(name):
        raise ValueError(
            "`name` must be a TensorFlow scope: letters, digits and any of ._-/\\>, the "
            f"first a letter, a digit or a dot. Received: {name!r}. Pass another `name`."
        )
    if name in known:
        raise ValueError(
            "`name` must be unique among the accumulating train ops of a graph. "
            f"Received: {name!r} a second time. Pass another `name`."
        )
    return name


def get_windows() -> list[Window]:
    """Returns the accumulating train ops of the default graph, in order of creation."""
    return list(getattr(_outermost_graph(), _WINDOWS_ATTRIBUTE, []))


def register(window: Window) -> None:
    """Makes `window` known to `get_windows`."""
    # An attribute, not a collection: MetaGraphs could not serialize it.
    setattr(_outermost_graph(), _WINDOWS_ATTRIBUTE, [*get_windows(), window])


def _outermost_graph() -> tf.Graph:
    with tf.init_scope():
        return tf.compat.v1.get_default_graph()
