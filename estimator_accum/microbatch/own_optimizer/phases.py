"""Phases of a step: passes of its micro-batches, then changes, then passes that see these.

    phase 0    gradients of the critic       the critic's update
    phase 1    gradients of the generator    the generator's update, and the results

A traced step does one thing after the other, in the order of its operations; in the graph
of a model_fn, control dependencies alone order a read and a write. A gradient belongs to
the first phase in which all variables that it reads are as they are there in the step; a
change to that of the gradients and values that it is computed from. Most steps and
model_fns have one phase.

A value that was read before a change and is needed in a later phase is handed on.
"""

from collections.abc import Iterable

import tensorflow as tf

from estimator_accum.graph.walks import ancestors
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.own_optimizer.batch_norm import find_moments
from estimator_accum.microbatch.own_optimizer.head import of_batch
from estimator_accum.microbatch.own_optimizer.interception import Interception
from estimator_accum.microbatch.own_optimizer.patches import Request
from estimator_accum.microbatch.own_optimizer.refusals import (
    check_first_order,
    check_one_replica,
    check_replicas,
)
from estimator_accum.microbatch.own_optimizer.times import Times, TimesOfModelFn


class Phases:
    """The phases of a step, which its gradients begin.

    Args:
        batches: The batch of each replica.

    Attributes:
        all: The gradients of each phase, one part for each replica.
    """

    def __init__(self, batches: list[WholeBatch]):
        self._batches = batches
        self._graph = tf.compat.v1.get_default_graph()
        self._is_traced = self._graph.building_function
        self.all = [[*map(Interception, batches)]]
        self._requests, self._reads = [], {}  # of sums, by the phase that has them

    def gradients(self, request: Request) -> list:
        """Returns the gradients of a call, in its phase."""
        if self._is_traced:
            check_replicas(len(self._batches))
            for batch in self._batches:  # else averages that were written begin a phase
                find_moments(batch)
        if any(top.graph is not self._graph for top in request.tops):
            return self._parts[0].gradients(request)  # as in no phase
        if self._reads:
            check_first_order(request.ys)
        self._requests.append((request.tops, None))
        number, replica = self._place_of(request.tops)
        if number is not None:
            self._requests[-1] = request.tops, number
        number = number or 0
        while number >= len(self.all):
            with self._graph.as_default():  # also where a branch takes a gradient
                again = [batch.again() for batch in self._batches]
                self.all.append([*map(Interception, again)])
        part = self.all[number][replica]
        with part.batch.as_current():
            gradients = part.gradients(request)
        for read in part.reads:
            self._reads.setdefault(read, number)
        return gradients

    def _place_of(self, tops: list[tf.Tensor]) -> tuple[int | None, int]:
        """Returns the phase and the replica of a gradient; None if it needs no batch."""
        if not self._is_traced:
            if of_batch(self._batches[0]).isdisjoint(top.op for top in tops):
                return None, 0
            needed = ancestors(top.op for top in tops) if self._reads else {}
            if needed.keys().isdisjoint(self._reads):
                return 0, 0
        times = self.times()
        number = times.of_tensors(tops)
        if number and not self._is_traced:
            check_one_replica(tops[0])
        return number, times.replica_of(tops)

    def times(self, ends: Iterable[tf.Operation] = ()) -> "Times":
        """Returns when operations run, as the graph is now.

        Args:
            ends: In the graph of a model_fn, operations that run; their ancestors do.
        """
        handles = {op for part in self._parts for op in part.batch.works.handles}
        for batch in self._batches:
            handles |= {write.inputs[0].op for write in batch.stage[1]}
        of_batches = [of_batch(batch) for batch in self._batches]
        tops = [top for tops, _ in self._requests for top in tops]
        operations = self._graph.get_operations()
        if self._is_traced:
            return Times(operations, of_batches, self._requests, self._reads, handles)
        needed = ancestors([*ends, *(top.op for top in tops)])
        operations = [operation for operation in operations if operation in needed]
        return TimesOfModelFn(
            operations, of_batches, self._requests, self._reads, handles
        )

    def check(self, times: "Times") -> None:
        """Raises ValueError if a gradient is no longer in its phase.

        Args:
            times: When operations run in the whole step.
        """
        for tops, number in self._requests:
            if number not in (None, times.of_tensors(tops)):
                raise ValueError(
                    "The gradient of a loss must be taken before a variable is changed by "
                    "what is computed from the loss. Received: a gradient of "
                    f"{tops[0].name}, which sees such a change whose own gradient comes "
                    "later. Take that gradient before the change."
                )

    @property
    def is_used(self) -> bool:
        """Whether a gradient with respect to a variable was computed."""
        return any(part.is_used for part in self._parts)

    @property
    def reads(self) -> list[tf.Operation]:
        """The operations that read sums of gradients."""
        return [read for part in self._parts for read in part.reads]

    @property
    def _parts(self) -> list[Interception]:
        return [part for parts in self.all for part in parts]
