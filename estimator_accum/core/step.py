"""Tensors of one micro-step, for hooks."""

from typing import NamedTuple

import tensorflow as tf


class Result(NamedTuple):
    """Results of a closed window; scalars, the same in every replica.

    Attributes:
        has_updated: Whether the optimizer was applied: true at boundaries, unless the
            window was skipped because it was not finite.
        loss: Mean loss, or the sum with `reduction="sum"`; NaN if unknown.
        gradient_norm: Global norm of the gradients for the optimizer, before
            `clip_norm`.
        weight: Sum of the window's weights over all replicas.
        noise_scale: Gradient noise scale, in the unit of the weights, over the updates
            so far; NaN if it is not estimated.
        stop_requests: >= 1.0 if any task of a cluster should stop after this window;
            NaN outside clusters.
    """

    has_updated: tf.Tensor
    loss: tf.Tensor
    gradient_norm: tf.Tensor
    weight: tf.Tensor
    noise_scale: tf.Tensor
    stop_requests: tf.Tensor


class Step(NamedTuple):
    """Tensors of one micro-step; all scalars.

    Attributes:
        is_boundary: Whether this micro-step closes the window. Fed with True, any of
            `loss`, `gradient_norm`, `weight` and `update_step_after` applies a partial
            window without consuming a micro-batch.
        result: Results of the window that this micro-step closed; False or NaN off the
            boundary.
        mean_loss: Mean loss of this replica's micro-batches in the open window; at a
            boundary, in the whole window.
        micro_steps_after: `micro_steps` after this micro-step, before a boundary resets
            it to 0; running it counts one. K if there is no counter.
        gradient_accumulation_steps: K of the open window [micro-steps per update].
        clipped_share: Share of the updates so far that were clipped, 0 to 1. Updates
            before clipping was switched on count as not clipped.
        update_step_after: `update_step` after this micro-step.
        of_partial: (`update_step_after`, `clipped_share`) for applying a partial
            window. They do not wait for the operations that read `update_step`, which
            may need a micro-batch.
        global_step_after: `global_step` after this micro-step; None if the caller
            counts micro-steps.
    """

    is_boundary: tf.Tensor
    result: Result
    mean_loss: tf.Tensor
    micro_steps_after: tf.Tensor
    gradient_accumulation_steps: tf.Tensor
    clipped_share: tf.Tensor
    update_step_after: tf.Tensor
    of_partial: tuple[tf.Tensor, tf.Tensor]
    global_step_after: tf.Tensor | None
