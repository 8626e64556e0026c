"""State of one accumulating train op: its variables.

The variables of an open window, its sums and its counter, live

    with the replica, in checkpoints        where several runs are a window
    with the replica, in no checkpoint      where a whole batch is one
    on the worker, in no checkpoint         where parameter servers hold the weights

In the last case all other variables are shared by the workers and live on the servers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.accumulators import Accumulator, variables_of

_CHIEFS = (None, "chief", "master")  # names of the job that saves


class Place(NamedTuple):
    """Place of the variables of an open window.

    Attributes:
        worker: Device of this worker, if parameter servers hold the weights; else None.
        is_saved: Whether checkpoints hold the window.
    """

    worker: str | None = None
    is_saved: bool = True

    @property
    def is_on_worker(self) -> bool:
        """Returns whether workers share the weights, and each has a window."""
        return self.worker is not None

    @property
    def is_of_chief(self) -> bool:
        """Returns whether the task that saves checkpoints has this window."""
        return tf.DeviceSpec.from_string(self.worker or "").job in _CHIEFS

    @property
    def options(self) -> dict:
        """Arguments of `create_variable` for a variable of the window."""
        if self.is_on_worker:
            local = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
            return {"device": self.worker, "collections": local}
        return {} if self.is_saved else {"collections": []}


def place_of_window(
    variables: list[tf.Variable], here: str, has_counter: bool
) -> Place:
    """Returns the place of a window's variables.

    Args:
        variables: The trained variables.
        here: Device of the micro-batch.
        has_counter: Whether several runs of the train op are a window.
    """
    task, servers = tf.DeviceSpec.from_string(here), False
    for variable in variables:
        its = tf.DeviceSpec.from_string(variable.device)
        is_elsewhere = (its.job, its.task) != (task.job, task.task)
        servers |= bool(task.job and its.job and is_elsewhere)
    return Place(here if servers else None, has_counter and not servers)


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
        place: Place of accumulators, sums and micro_steps.
    """

    accumulators: list[Accumulator]
    sums: dict[str, Accumulator]
    micro_steps: tf.Variable | None = None
    update_step: tf.Variable | None = None
    global_step: tf.Variable | None = None
    clipped_updates: tf.Variable | None = None
    noise: Sequence[tf.Variable] = ()
    place: Place = Place()

    @property
    def all_accumulators(self) -> list[Accumulator]:
        """Those of the gradients, then those of the scalars."""
        return [*self.accumulators, *self.sums.values()]

    @property
    def saved(self) -> list[tf.Variable]:
        """Variables that a graph without accumulation does not have."""
        if self.micro_steps is None or not self.place.is_saved:
            return [self.update_step]
        summed = variables_of(self.all_accumulators)
        return [self.update_step, self.micro_steps, *summed]

    @property
    def statistics(self) -> list[tf.Variable]:
        """More such variables, which are only reported: a checkpoint may lack them."""
        clipped = [] if self.clipped_updates is None else [self.clipped_updates]
        return [*self.noise, *clipped]
