"""Phases of a step: passes of its micro-batches, then changes, then passes that see these.

    phase 0    gradients of the critic       the critic's update
    phase 1    gradients of the generator    the generator's update, and the results

A traced step does one thing after the other, in the order of its operations. A gradient
belongs to the first phase in which all variables that it reads are as they are there in
the step; a change to that of the gradients and values that it is computed from. Most
steps have one phase.

A value that was read before a change and is needed in a later phase is handed on.
"""

from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.graph.functions import (
    functions_of,
    library_of_functions,
    nodes_of,
)
from estimator_accum.graph.internals import set_control_inputs
from estimator_accum.graph.names import SHOWING
from estimator_accum.graph.walks import (
    ancestors,
    data_ancestors,
    in_order,
    needed_by,
)
from estimator_accum.graph.writers import (
    may_be_variable,
    source_of_handle,
    variable_of,
    writers_of,
    written_handles,
)
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.own_optimizer.batch_norm import find_moments
from estimator_accum.microbatch.own_optimizer.head import of_batch
from estimator_accum.microbatch.own_optimizer.interception import Interception
from estimator_accum.microbatch.own_optimizer.patches import Request
from estimator_accum.microbatch.own_optimizer.refusals import (
    check_first_order,
    check_replicas,
)
from estimator_accum.microbatch.repeatable import changes_something
from estimator_accum.microbatch.work import OWN_CHECK

_BEFORE = -1  # all phases


class Part(NamedTuple):
    """A replica's part of a phase.

    Attributes:
        batch: The replica's batch, with the work of this phase.
        interception: The gradients of this phase.
    """

    batch: WholeBatch
    interception: Interception


class Phases:
    """The phases of a step, which its gradients begin.

    Args:
        batches: The batch of each replica.

    Attributes:
        all: The parts of each phase, one for each replica.
    """

    def __init__(self, batches: list[WholeBatch]):
        self._batches = batches
        self._graph = tf.compat.v1.get_default_graph()
        self.all = [[Part(batch, Interception(batch)) for batch in batches]]
        self._requests, self._reads = [], {}  # of sums, by the phase that has them

    def gradients(self, request: Request) -> list:
        """Returns the gradients of a call, in its phase."""
        check_replicas(len(self._batches))
        for batch in self._batches:  # else averages that were written begin a phase
            find_moments(batch)
        reads = {}
        for part in self._parts:
            reads |= part.interception.reads
        if any(top.graph is not self._graph for top in request.tops):
            return self._parts[0].interception.gradients(request)  # as in no phase
        check_first_order(request.ys, reads)
        self._requests.append((request.tops, None))
        times = self.times()
        number, replica = times.of_tensors(request.tops), times.replica_of(request.tops)
        self._requests[-1] = request.tops, number
        while number >= len(self.all):
            with self._graph.as_default():  # also where a branch takes a gradient
                again = [batch.again() for batch in self._batches]
                self.all.append([Part(batch, Interception(batch)) for batch in again])
        part = self.all[number][replica]
        with part.batch.as_current():
            gradients = part.interception.gradients(request)
        for read in part.interception.reads:
            self._reads.setdefault(read, number)
        return gradients

    def times(self) -> "Times":
        """Returns when operations run, as the graph is now."""
        handles = {op for part in self._parts for op in part.batch.works.handles}
        for batch in self._batches:
            handles |= {write.inputs[0].op for write in batch.stage[1]}
        of_batches = [of_batch(batch) for batch in self._batches]
        tops = [top for tops, _ in self._requests for top in tops]
        return Times(self._graph, of_batches, tops, self._reads, handles)

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
    def _parts(self) -> list[Part]:
        return [part for parts in self.all for part in parts]


class Times:
    """When the operations of a step run.

    Args:
        graph: The step's graph.
        of_batches: For each replica, the operations that compute from a micro-batch.
        tops: Tensors that gradients are computed from.
        reads: Operations that read sums of gradients, and the phases of these.
        handles: Operations whose outputs are handles of the batch's own variables.

    Attributes:
        changes: Operations that change something, or show it aside from losses, in their
            order.
        of_batch: Operations that compute from a micro-batch of any replica.
        late: Those that need a value from after its passes.
        handles: As given.
    """

    def __init__(self, graph, of_batches: list, tops: list, reads: dict, handles: set):
        operations = graph.get_operations()
        self._of_batches, self.of_batch = of_batches, set().union(*of_batches)
        self._places = {operation: i for i, operation in enumerate(operations)}
        self.handles, self._reads = handles, reads
        # Losses are computed from their results, whatever they show.
        layers = self.of_batch & data_ancestors(t.op for t in tops).keys()
        with graph.as_default():
            library = library_of_functions()
            self.changes = [
                operation
                for operation in operations
                if not any(tensor.op in handles for tensor in operation.inputs)
                if not hasattr(operation, OWN_CHECK)
                if changes_something(operation, library)
                or (_shows(operation, library) and operation not in layers)
            ]
            self._writers = writers_of(self.changes, handles)
        self._changing = {*self.changes}
        self._waited_for = {*self.changes}
        for operation in operations:
            passes_on = operation.type in ("Identity", "NoOp")  # as of an assertion
            if passes_on and not self._waited_for.isdisjoint(needed_by(operation)):
                self._waited_for.add(operation)
        for operation, handle in written_handles(graph):
            if operation in self._changing and variable_of(handle) is None:  # a table
                table = source_of_handle(handle)
                self._writers.setdefault(table, []).append(operation)
        self._looking_up = {}
        for operation in operations:  # plain reads are handed on
            if operation in self.of_batch or functions_of(operation):
                for variable in self._variables(operation):
                    self._looking_up.setdefault(variable, []).append(operation)
        self._forward = ancestors(t.op for t in tops)
        self.late, self._times = set(), {}
        for operation in in_order(operations, self._before):
            self._times[operation] = self._time(operation)

    def of_tensors(self, tensors: Iterable[tf.Tensor]) -> int:
        """Returns the phase whose passes compute tensors."""
        return max([0, *(self._needed_in_pass(tensor.op) for tensor in tensors)])

    def of(self, operation: tf.Operation) -> int:
        """Returns the phase whose passes compute an operation, or that it comes after.

        -1 if it may run before all of them.
        """
        return self._times[operation]

    def replica_of(self, tensors: Iterable[tf.Tensor]) -> int:
        """Returns the replica whose micro-batches compute tensors; 0 if none does.

        Raises:
            ValueError: If several do.
        """
        operations = {tensor.op for tensor in tensors}
        replicas = [
            i for i, of in enumerate(self._of_batches) if not of.isdisjoint(operations)
        ]
        if len(replicas) > 1:
            names = ", ".join(sorted(operation.name for operation in operations))
            raise ValueError(
                "A loss must be computed from the examples of its own replica. Received: "
                f"{names}, from those of {len(replicas)}. Combine gradients, not losses."
            )
        return replicas[0] if replicas else 0

    def is_as_before(self, operation: tf.Operation, phase: int) -> bool:
        """Returns whether a phase may run an operation of an earlier one.

        Not so if it reads sums, which are cleared, or a variable that is another one by
        then, and not if it waits for a change, which would be made again.
        """
        if operation not in self._times or self.of(operation) >= phase:
            return True
        waits = any(other in self._waited_for for other in operation.control_inputs)
        is_read = operation in self._reads
        return not (is_read or waits or self._is_overwritten(operation, phase))

    def is_in_passes(self, operation: tf.Operation) -> bool:
        """Returns whether micro-batches compute an operation."""
        return operation in self.of_batch and operation not in self.late

    def cut_waits(self, passes: Iterable[tf.Operation]) -> None:
        """Has micro-batches and later phases wait for no change: it has been made.

        Args:
            passes: The operations of micro-batches, with all that they need.
        """
        for operation in self._times:
            waits = operation.control_inputs
            stays = [
                other
                for other in waits
                if other not in self._waited_for
                or (operation not in passes and self.of(other) >= self.of(operation))
            ]
            if len(stays) < len(waits):
                set_control_inputs(operation, stays)

    def _is_overwritten(self, operation: tf.Operation, phase: int) -> bool:
        """Returns whether an operation reads a variable that is another one by a phase."""
        place = self._places[operation]
        return any(
            self._places[writer] > place and self._times[writer] < phase
            for variable in self._variables(operation)
            for writer in self._writers.get(variable, ())
            if writer is not operation
        )

    def _time(self, operation: tf.Operation) -> int:
        if operation in self._reads:
            return self._reads[operation]
        times = [(op, self._times.get(op, _BEFORE)) for op in self._before(operation)]
        passes = [time for op, time in times if self.is_in_passes(op)]
        others = [time for op, time in times if not self.is_in_passes(op)]
        after = max(others, default=_BEFORE)
        is_change = operation in self._changing
        if not is_change and operation not in self.of_batch:
            return max(after, *passes, _BEFORE)
        replicas = sum(operation in of for of in self._of_batches)
        runs_once = is_change or after != _BEFORE or replicas > 1
        is_apart = operation in self.of_batch and operation not in self._forward
        if is_apart and runs_once:
            self.late.add(operation)
        if is_change or operation in self.late:
            return max(0, after, *passes)
        return max(0, after + 1, *passes)

    def _needed_in_pass(self, operation: tf.Operation) -> int:
        time = self._times[operation]
        return time if self.is_in_passes(operation) else time + 1

    def _before(self, operation: tf.Operation) -> list[tf.Operation]:
        """Returns the operations that come before another one in the step."""
        if operation in self._reads:
            return []
        earlier = self._earlier(operation, self._writers)
        if operation in self._changing:
            earlier += self._earlier(operation, self._looking_up)
        needed = needed_by(operation)
        if operation not in self._changing:  # it computes the same without waiting
            inputs = {tensor.op for tensor in operation.inputs}
            needed = [op for op in needed if op in inputs or op not in self._waited_for]
        return [*needed, *earlier]

    def _earlier(self, operation: tf.Operation, users: dict) -> list[tf.Operation]:
        """Returns the users of an operation's variables that come before it."""
        place = self._places[operation]
        return [
            user
            for variable in self._variables(operation)
            for user in users.get(variable, ())
            if self._places[user] < place
        ]

    def _variables(self, operation: tf.Operation) -> set[tf.Operation]:
        """Returns the variables and tables that an operation reads or writes."""
        handles = [t for t in operation.inputs if may_be_variable(t)]
        return {source_of_handle(tensor) for tensor in handles} - self.handles


def _shows(operation: tf.Operation, library: dict) -> bool:
    """Returns whether an operation, or one that it calls, shows or checks something."""
    inner = nodes_of(functions_of(operation), library)
    return operation.type in SHOWING or any(node.op in SHOWING for node in inner)
