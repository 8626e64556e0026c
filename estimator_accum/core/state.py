"""State of one accumulating train op: its variables."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.accumulators import Accumulator, variables_of


class State(NamedTuple):
    """Variables of one train op.

    A checkpoint after 7 of 8 micro-steps holds `saved` and `statistics`: `micro_steps` is
    7, and the sums are those of 7 micro-batches. Trained variables, slots and
    `update_step` are as after the last update. Inside `microbatch_model_fn`, which saves
    between batches, the sums are in no checkpoint.

    Attributes:
        accumulators: Sums of the gradients; empty if every micro-batch is a window.
        sums: Sums of scalars, by name, likewise.
        micro_steps: The number of micro-steps in the open window; None if every run of
            the train op ends a window.
        update_step: The number of updates; None if Keras counts them.
        global_step: The number of micro-steps; None if the caller counts.
        clipped_updates: The number of clipped updates; None without clipping.
        noise: Running means of the noise scale; empty if it is not estimated.
    """

    accumulators: list[Accumulator]
    sums: dict[str, Accumulator]
    micro_steps: tf.Variable | None = None
    update_step: tf.Variable | None = None
    global_step: tf.Variable | None = None
    clipped_updates: tf.Variable | None = None
    noise: Sequence[tf.Variable] = ()

    @property
    def all_accumulators(self) -> list[Accumulator]:
        """Those of the gradients, then those of the scalars."""
        return [*self.accumulators, *self.sums.values()]

    @property
    def saved(self) -> list[tf.Variable]:
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
