"""Records of one accumulating train op: its variables and its tensors."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.accumulators import (
    Accumulator,
    variables_of,
)
from estimator_accum.core.clock import Clock
from estimator_accum.core.options import Options


class Result(NamedTuple):
    """Results of a closed window; scalars, the same in every replica.

    Attributes:
        has_updated: Whether the optimizer was applied: true at boundaries, unless the
            window was skipped because it was not finite.
        loss: Mean loss, or the sum with `reduction="sum"`; NaN if unknown.
        gradient_norm: Global norm of what the optimizer gets, before `clip_norm`.
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


class Window(NamedTuple):
    """Variables of one accumulating train op, and its tensors for hooks; all scalars.

    `get_windows` returns it. The tensors are there when the train op is made; those of
    `result`, also attributes of the window, are False or NaN off the boundary.

    Attributes:
        options: What the caller asked for; `name` is the scope of the variables.
        clock: When the window closes.
        names: Names of the trained variables.
        accumulators: Sums of their gradients; empty if every micro-batch is a window.
        sums: Sums of scalars, by name, likewise.
        num_replicas: Number of replicas that train in sync, a Python int.
        divisor: That of its micro-batches.
        micro_steps: Variable, the number of micro-steps in the open window; None if
            every run of the train op ends a window.
        update_step: Variable, the number of updates.
        global_step: Variable, the number of micro-steps; None if the caller counts.
        clipped_updates: Variable, the number of clipped updates; None without clipping.
        noise: Variables of the noise scale; empty if it is not estimated.
        stop_request: Placeholder, fed with 1.0 if this task of a cluster should stop;
            None outside clusters.
        is_boundary: Whether this micro-step closes the window. Fed with True, any of
            `loss`, `gradient_norm`, `weight` and `update_step_after` applies a partial
            window without consuming a micro-batch.
        result: Results of the window that this micro-step closed.
        mean_loss: Mean loss of this replica's micro-batches in the open window; at a
            boundary, in the whole window.
        micro_steps_after: `micro_steps` after this micro-step, before a boundary resets
            it to 0; running it counts one. K if there is no counter.
        gradient_accumulation_steps: K of the open window [micro-steps per update].
        clipped_share: Share of the updates so far that were clipped, 0 to 1.
        update_step_after: `update_step` after this micro-step.
        of_partial: (`update_step_after`, `clipped_share`) for applying a partial
            window. They do not wait for the operations that read `update_step`, which
            may need a micro-batch.
        global_step_after: `global_step` after this micro-step; None if the caller
            counts micro-steps.
    """

    options: Options
    clock: Clock
    names: list[str]
    accumulators: list[Accumulator]
    sums: dict[str, Accumulator]
    num_replicas: int
    divisor: float
    micro_steps: tf.Variable | None = None
    update_step: tf.Variable | None = None
    global_step: tf.Variable | None = None
    clipped_updates: tf.Variable | None = None
    noise: Sequence[tf.Variable] = ()
    stop_request: tf.Tensor | None = None
    is_boundary: tf.Tensor | None = None
    result: Result | None = None
    mean_loss: tf.Tensor | None = None
    micro_steps_after: tf.Tensor | None = None
    gradient_accumulation_steps: tf.Tensor | None = None
    clipped_share: tf.Tensor | None = None
    update_step_after: tf.Tensor | None = None
    of_partial: tuple[tf.Tensor, tf.Tensor] | None = None
    global_step_after: tf.Tensor | None = None

    name = property(lambda self: self.options.name)
    has_updated = property(lambda self: self.result.has_updated)
    loss = property(lambda self: self.result.loss)
    gradient_norm = property(lambda self: self.result.gradient_norm)
    weight = property(lambda self: self.result.weight)
    noise_scale = property(lambda self: self.result.noise_scale)
    stop_requests = property(lambda self: self.result.stop_requests)

    @property
    def has_several_micro_steps(self) -> bool:
        """Whether several runs of the train op may be one update."""
        is_one = self.options.gradient_accumulation_steps == 1
        return self.micro_steps is not None and not is_one

    @property
    def all_accumulators(self) -> list[Accumulator]:
        """Those of the gradients, then those of the scalars."""
        return [*self.accumulators, *self.sums.values()]

    @property
    def state(self) -> list[tf.Variable]:
        """Variables that a graph without accumulation does not have."""
        if self.micro_steps is None:
            return [self.update_step]
        summed = variables_of(self.all_accumulators)
        return [self.update_step, self.micro_steps, *summed]

    @property
    def statistics(self) -> list[tf.Variable]:
        """More such variables, which are only reported: a checkpoint may lack them."""
        clipped = [] if self.clipped_updates is None else [self.clipped_updates]
        return [*self.noise, *clipped]
