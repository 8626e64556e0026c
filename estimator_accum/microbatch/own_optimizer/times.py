"""When the operations of a step or model_fn run: in the passes of a phase, or after them.

See phases.py for the phases.
"""

import collections
import functools
import itertools
from collections.abc import Iterable

import tensorflow as tf

from estimator_accum.graph.functions import functions_of, library_of_functions
from estimator_accum.graph.internals import set_control_inputs
from estimator_accum.graph.walks import (
    ancestors,
    control_inputs_of,
    data_ancestors,
    data_descendants,
    descendants,
    in_order,
    needed_by,
    users_of,
    walk,
)
from estimator_accum.graph.writers import (
    may_be_variable,
    source_of_handle,
    variable_of,
    writers_of,
    written_handles,
)
from estimator_accum.microbatch.repeatable import (
    changes_something,
    shows_something,
    takes_any,
)
from estimator_accum.microbatch.work import OWN_CHECK

_BEFORE = -1  # all phases


class Times:
    """When the operations of a step run.

    Args:
        operations: Those of the step, in the order in which they were made.
        of_batches: For each replica, the operations that compute from a micro-batch.
        requests: For each gradient, the tensors that it is computed from, and its phase;
            None if it is not known yet.
        reads: Operations that read sums of gradients, and the phases of these.
        handles: Operations whose outputs are handles of the batch's own variables.

    Attributes:
        changes: Operations that change something, or show it aside from losses, in their
            order.
        of_batch: Operations that compute from a micro-batch of any replica.
        late: Those that need a value from after its passes.
        handles: As given.
    """

    def __init__(
        self, operations: list, of_batches: list, requests, reads: dict, handles: set
    ):
        graph = operations[0].graph
        self._of_batches, self.of_batch = of_batches, set().union(*of_batches)
        self._places = {operation: i for i, operation in enumerate(operations)}
        self.handles, self._reads = handles, reads
        tops = [top.op for tops, _ in requests for top in tops]
        # Losses are computed from their results, whatever they show.
        layers = self.of_batch & data_ancestors(tops).keys()
        with graph.as_default():
            library = library_of_functions()
            self.changes, self._showing = [], set()
            for operation in operations:
                if hasattr(operation, OWN_CHECK):
                    continue
                if changes_something(operation, library, handles):
                    self.changes.append(operation)
                elif shows_something(operation, library) and operation not in layers:
                    self.changes.append(operation)
                    self._showing.add(operation)
            self._writers = writers_of(self.changes, handles)
        self._changing = {*self.changes}
        self._waited_for = {*self.changes}
        for operation in operations:
            needed = {*needed_by(operation)}
            if operation.type in ("Identity", "NoOp"):  # as of an assertion
                if not self._waited_for.isdisjoint(needed):
                    self._waited_for.add(operation)
                if self._showing.issuperset(needed):
                    self._showing.add(operation)
        for operation, handle in written_handles(graph):
            if operation in self._changing and variable_of(handle) is None:  # a table
                table = source_of_handle(handle)
                self._writers.setdefault(table, []).append(operation)
        self._looking_up = {}
        for operation in operations:  # plain reads are handed on
            if operation in self.of_batch or functions_of(operation):
                for variable in self._variables(operation):
                    self._looking_up.setdefault(variable, []).append(operation)
        self._forward = ancestors(tops)
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
        return self._times.get(operation, _BEFORE)

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

    def cut_waits(self, passes: list[list[tf.Operation]], losses: list[list]) -> None:
        """Has micro-batches and later phases wait for no change: it has been made.

        Args:
            passes: Operations of the micro-batches of each phase.
            losses: Losses of each phase.
        """
        del losses
        passes = walk(itertools.chain.from_iterable(passes), self._needed_beside_waits)
        for operation in self._times:
            waits = operation.control_inputs
            stays = [
                other
                for other in waits
                if other not in self._waited_for
                or (
                    operation not in passes
                    and self.of(other) == max(0, self.of(operation))
                )
            ]
            if len(stays) < len(waits):
                set_control_inputs(operation, stays)

    def _needed_beside_waits(self, operation: tf.Operation) -> list[tf.Operation]:
        """Returns the operations that one needs, without waits for changes."""
        inputs = {tensor.op for tensor in operation.inputs}
        return [
            other
            for other in needed_by(operation)
            if other in inputs or other not in self._waited_for
        ]

    def _is_overwritten(self, operation: tf.Operation, phase: int) -> bool:
        """Returns whether an operation reads a variable that is another one by a phase."""
        changes = self._changes_before(operation, phase)
        return not all(self._follows(operation, change) for change in changes)

    def _changes_before(
        self, operation: tf.Operation, phase: int
    ) -> list[tf.Operation]:
        """Returns the changes of an operation's variables in the phases before one."""
        return [
            writer
            for variable in self._variables(operation)
            for writer in self._writers.get(variable, ())
            if writer is not operation and self._times[writer] < phase
        ]

    def _follows(self, operation: tf.Operation, change: tf.Operation) -> bool:
        """Returns whether an operation comes after a change in the step."""
        return self._places[change] < self._places[operation]

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
        others = [
            time
            for op, time in times
            if not self.is_in_passes(op) and self._begins_phase(op)
        ]
        return max(0, max(others, default=_BEFORE) + 1, *passes)

    def _begins_phase(self, operation: tf.Operation) -> bool:
        """Returns whether a pass that needs an operation comes after it."""
        return True

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
        # It computes the same without waiting; a group of checks is when they are.
        if operation not in self._changing and operation not in self._showing:
            inputs = {tensor.op for tensor in operation.inputs}
            needed = [op for op in needed if op in inputs or op not in self._showing]
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


class TimesOfModelFn(Times):
    """When the operations of a model_fn run, which control dependencies alone order.

    A wait of a micro-batch for a change begins no phase by itself: the change runs once,
    after the passes. It does where an update has changed a variable that is read.
    """

    def __init__(
        self, operations: list, of_batches: list, requests, reads: dict, handles
    ):
        self._of_sums = descendants(reads) | reads.keys()
        self._requests = requests
        self._old = {*operations[0].graph.get_operations()}
        self._later = {}  # operations that follow each change, made since
        super().__init__(operations, of_batches, requests, reads, handles)
        self._check_references()
        self._changes_of = collections.defaultdict(list)
        for change in self.changes:
            self._changes_of[max(0, self.of(change))].append(change)
        # All this is as it was before waits are cut.
        self._counting = {
            operation: counts
            for operation in self._places
            if (counts := self._counts_before(operation))
        }
        self._run_once = {
            phase: ancestors(changes, lambda op: not self.is_in_passes(op))
            for phase, changes in self._changes_of.items()
        }

    @functools.cached_property
    def _behind(self) -> dict[tf.Operation, set[tf.Operation]]:
        """Operations that follow each change."""
        behind, walked = {}, {}  # most updates have the same users
        for operation in itertools.chain.from_iterable(self._writers.values()):
            users = frozenset(users_of(operation))
            if users not in walked:
                walked[users] = descendants([operation])
            behind[operation] = walked[users]
        for tops, phase in self._requests:  # sums follow all that their losses wait for
            reads = [read for read, number in self._reads.items() if number == phase]
            after = descendants(reads) | {*reads}
            for operation in behind.keys() & ancestors(top.op for top in tops):
                behind[operation] = behind[operation] | after
        return behind

    def see_new_operations(self) -> None:
        """Learns which operations follow each change that hooks have made since.

        Those that wait for an operation that came after a change, though it waits no more.
        """
        graph = next(iter(self._places)).graph
        sets = [*self._behind.values(), *self._later.values()]
        after_any = set().union(self._behind, *sets)
        for operation in graph.get_operations():
            needed = {*needed_by(operation)}
            if operation in self._old or after_any.isdisjoint(needed):
                continue
            after_any.add(operation)
            for change, behind in self._behind.items():
                later = self._later.setdefault(change, set())
                if change in needed or not (
                    behind.isdisjoint(needed) and later.isdisjoint(needed)
                ):
                    later.add(operation)

    @functools.cached_property
    def _updates(self) -> set[tf.Operation]:
        return self._of_sums & self._changing

    @functools.cached_property
    def _of_updates(self) -> set[tf.Operation]:
        return self._updates | descendants(self._updates)

    @functools.cached_property
    def _seeing(self) -> set[tf.Operation]:
        """Operations that compute from a variable that an update has changed before."""
        readers = [
            op for op in self._places if self._updates_of(self._variables(op), op)
        ]
        outputs = [tensor for op in readers for tensor in op.outputs]
        return {*readers, *data_descendants(outputs)}

    def _updates_of(
        self, variables: Iterable[tf.Operation], operation: tf.Operation
    ) -> list[tf.Operation]:
        """Returns the updates of variables that an operation comes after."""
        return [
            writer
            for variable in variables
            for writer in self._writers.get(variable, ())
            if writer in self._updates and self._follows(operation, writer)
        ]

    def _check_references(self) -> None:
        """Raises ValueError if the memory of a variable is read after an update of it."""
        for operation in filter(self.of_batch.__contains__, self._places):
            for tensor in operation.inputs:
                variable = None if may_be_variable(tensor) else variable_of(tensor)
                updates = self._updates_of([variable], operation)
                if updates:
                    raise ValueError(
                        "A variable that a loss reads after an update of it must be a "
                        f"resource variable. Received: {operation.name}, which reads "
                        f"{variable.name} after {updates[0].name}. Call "
                        "tf.compat.v1.enable_resource_variables, or take all gradients "
                        "before the first update (tf.gradients, then apply_gradients)."
                    )

    def is_as_before(self, operation: tf.Operation, phase: int) -> bool:
        time = self.of(operation)
        if time >= phase:
            return True
        if operation in self._reads or self._is_overwritten(operation, phase):
            return False
        return not self._is_shared(operation)

    def _is_shared(self, operation: tf.Operation) -> bool:
        """Returns whether a change of its own phase needs an operation behind an update.

        Without its waits it would lose its place there.
        """
        changes = self._run_once.get(max(0, self.of(operation)), ())
        is_behind = operation in self._of_updates or operation in self._counting
        return is_behind and operation in changes

    def _counts_before(self, operation: tf.Operation) -> list[tf.Operation]:
        """Returns the changes, other than updates, that an operation reads the results of."""
        return [
            writer
            for variable in self._variables(operation)
            for writer in self._writers.get(variable, ())
            if operation not in self._changing and writer not in self._updates
            if self._follows(operation, writer)
        ]

    def _check_counts(self, phase: int, needed: Iterable, inside: Iterable) -> None:
        """Raises ValueError if a phase reads a variable before a change, not after it.

        Args:
            phase: The phase.
            needed: Operations that it needs.
            inside: Those of its passes.
        """
        for operation in self._counting.keys() & needed:
            before = () if operation in inside else ancestors([operation])
            for writer in self._counting[operation]:
                if self.of(writer) >= phase and writer not in before:
                    raise ValueError(
                        "A variable must not be read by the forward pass after the "
                        "batch has changed it: every micro-batch would change it. "
                        f"Received: a change by {writer.name} and a read by "
                        f"{operation.name}. Change it after the update, or train by "
                        "microbatch_step."
                    )

    def is_of_beginning(self, operation: tf.Operation, phase: int) -> bool:
        """Returns whether an operation reads no change of the phases before one."""
        changes = self._changes_before(operation, phase)
        return not any(self._follows(operation, change) for change in changes)

    def _check_not_shared(self, operation: tf.Operation, phase: int) -> None:
        is_earlier = _BEFORE < self.of(operation) < phase
        if is_earlier and operation.inputs and self._is_shared(operation):
            raise ValueError(
                "A change that follows an update must not be computed from values that a "
                "later loss reads as well, as in spectral normalization. Received: "
                f"{operation.name}. Take all gradients before the first update "
                "(tf.gradients, then apply_gradients), or train by microbatch_step."
            )

    def cut_waits(self, passes: list[list[tf.Operation]], losses: list[list]) -> None:
        walks = []
        for phase, operations in enumerate(passes):
            needed = functools.partial(self._cut_waits_of, phase)
            shown = [loss.op for loss in losses[phase]]
            inside = walk([*operations, *shown], needed)
            for operation in inside:
                self._check_not_shared(operation, phase)
            walks.append((phase, inside, inside))
            walks.append((phase, walk(self._changes_of[phase], needed), inside))
        for of_phase in walks:
            self._check_counts(*of_phase)

    def _cut_waits_of(self, phase: int, operation: tf.Operation) -> list[tf.Operation]:
        """Returns the operations that one needs in a phase; it waits for no others."""
        if not self.is_as_before(operation, phase):
            return []
        is_pass = self.is_in_passes(operation)
        if operation not in self._reads and takes_any(operation, self.handles):
            return needed_by(operation)
        waits = control_inputs_of(operation)
        stays = [other for other in waits if not self._is_done(other, phase, is_pass)]
        if len(stays) < len(waits):
            set_control_inputs(operation, stays)
        return [*(tensor.op for tensor in operation.inputs), *stays]

    def _is_done(self, operation: tf.Operation, phase: int, is_pass: bool) -> bool:
        """Returns whether an operation has run before a phase, or comes after its passes."""
        is_change = operation in self._changing
        if not is_change and self.is_in_passes(operation):
            return False
        if takes_any(operation, self.handles):
            return False
        waits = operation.control_inputs
        is_late = is_change or operation in self._of_sums
        is_late |= operation.type == "NoOp" and not self._changing.isdisjoint(waits)
        return (is_pass and is_late) or _BEFORE < self.of(operation) < phase

    def _follows(self, operation: tf.Operation, change: tf.Operation) -> bool:
        behind = self._behind[change]
        return operation in behind or operation in self._later.get(change, ())

    def _time(self, operation: tf.Operation) -> int:
        is_once = operation not in self.of_batch and operation not in self._changing
        if is_once and operation not in self._of_sums:
            return _BEFORE
        return super()._time(operation)

    def _begins_phase(self, operation: tf.Operation) -> bool:
        return operation in self._seeing or operation in self._updates

    def _before(self, operation: tf.Operation) -> list[tf.Operation]:
        if operation in self._reads:
            return []
        waits = operation.control_inputs
        if operation in self.of_batch and operation not in self._changing:
            waits = [other for other in waits if other in self.of_batch]
        updates = self._updates_of(self._variables(operation), operation)
        return [*(tensor.op for tensor in operation.inputs), *waits, *updates]
