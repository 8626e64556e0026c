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

from estimator_accum.core.accumulators import (
    Accumulator,
    create_accumulator,
    variables_of,
)
from estimator_accum.core.slice_list import SliceList, create_slice_list

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
        """Returns whether a chief, or one process alone, has this window."""
        return tf.DeviceSpec.from_string(self.worker or "").job in _CHIEFS

    @property
    def may_be_of_chief(self) -> bool:
        """Returns whether it is of the chief, or of worker 0, who saves without one."""
        task = tf.DeviceSpec.from_string(self.worker or "")
        return self.is_of_chief or (task.job, task.task) == ("worker", 0)

    @property
    def options(self) -> dict:
        """Arguments of `create_variable` for a variable of the window."""
        if self.is_on_worker:
            local = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
            return {"device": self.worker, "collections": local}
        return {} if self.is_saved else {"collections": []}

    def create_sum(
        self, name: str, shape: tf.TensorShape, dtype: tf.DType, is_sparse: bool = False
    ) -> Accumulator | SliceList:
        """Creates an accumulator; for sparse gradients on a worker, a list of slices.

        Args:
            name: Its name from the graph's root.
            shape: The trained variable's static shape.
            dtype: Dtype of the sum.
            is_sparse: Whether gradients are `IndexedSlices`.
        """
        if is_sparse and self.is_on_worker:
            return create_slice_list(name, shape, dtype, **self.options)
        return create_accumulator(name, shape, dtype, is_sparse, **self.options)


def place_of_window(
    variables: list[tf.Variable], here: str, has_counter: bool
) -> Place:
    """Returns the place of a window's variables.

    Args:
        variables: The trained variables.
        here: Device of the micro-batch.
        has_counter: Whether several runs of the train op are a window.

    Raises:
        ValueError: If parameter servers hold the weights and `here` names no task:
            workers would share a window.
    """
    servers = [v for v in variables if _is_elsewhere(v.device, here)]
    task = tf.DeviceSpec.from_string(here)
    if servers and (task.job is None or task.task is None):
        raise ValueError(
            "With parameter servers a train op must be made on the device of its "
            f"worker. Received: device {here!r}, and {servers[0].name} on "
            f"{servers[0].device}. Make it inside tf.device(tf.compat.v1.train."
            "replica_device_setter(worker_device='/job:worker/task:0', ...)), with the "
            "number of the task."
        )
    return Place(here if servers else None, has_counter and not servers)


def check_place(place: Place, variables: list[tf.Variable]) -> None:
    """Raises ValueError if a window's variables are not on the worker of its place."""
    for variable in variables:
        if place.is_on_worker and _is_elsewhere(variable.device, place.worker):
            raise ValueError(
                "With parameter servers the variables of a window must be its worker's. "
                f"Received: {variable.op.name} on {variable.device}, where a "
                "tf.distribute strategy puts all variables. Leave `train_distribute` "
                "out: an Estimator uses the parameter servers of TF_CONFIG by itself."
            )


def _is_elsewhere(device: str, here: str) -> bool:
    """Returns whether a device is one of another task, which is no local one."""
    its, task = map(tf.DeviceSpec.from_string, (device, here))
    is_of_cluster = its.job not in (None, "localhost")
    return is_of_cluster and (its.job, its.task) != (task.job, task.task)


class State(NamedTuple):
    """Variables of one train op.

    A checkpoint after 7 of 8 micro-steps holds

        accumulators, sums, micro_steps          of 7 micro-batches
        global_step                              7 more than after the last update
        update_step, clipped_updates, noise      as after the last update
        trained variables, slots                 as after the last update
        variables of UPDATE_OPS                  as after the 7th micro-batch

    Inside `microbatch_model_fn`, which saves between batches, the sums are in no
    checkpoint.

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

    @property
    def variables(self) -> list[tf.Variable]:
        """All that a graph without accumulation does not have."""
        return [*self.saved, *self.statistics]
