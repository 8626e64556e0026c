"""Values of a batch that a run fetches outside of the passes.

    of the input pipeline    fetched where the batch is staged, and fed from then on
    of a micro-batch         its rows from the last pass; their combination is computed
                             once, before the update, and fed
    a change of something    runs once, in the batch's own run, with these values
    of a variable alone      read before the run changes it

So a batch is taken once, and nothing outside of the passes sees a micro-batch. The graph
tells which of these a run needs, whoever has made the operations.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

import tensorflow as tf

from estimator_accum.graph.copies import define, insert, replace
from estimator_accum.graph.functions import library_of_functions
from estimator_accum.graph.internals import context_of, set_control_inputs
from estimator_accum.graph.walks import (
    ancestors,
    control_inputs_of,
    data_ancestors,
    data_descendants,
    path_to,
    walk,
)
from estimator_accum.graph.writers import may_be_variable, variable_of, writes
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.inputs import can_be_fed, gives_another, pipeline_of
from estimator_accum.microbatch.own_optimizer.refusals import SUM_OF
from estimator_accum.microbatch.repeatable import changes_something, takes_any
from estimator_accum.microbatch.replica import ReplicaBatch, StepPhase
from estimator_accum.microbatch.writes import written_by


class Needs(NamedTuple):
    """Tensors of the batch that one set of fetches needs.

    Attributes:
        taken: Those of the input pipeline, and reads of variables before the update.
        values: Those of micro-batches, whose values for the batch are wanted.
        rows: For each replica, tensors from whose rows `values` are computed, and the
            axis of these; None of histograms of rows, which are added up.
        fed: Those that are fed anyway.
    """

    taken: list[tf.Tensor]
    values: list[tf.Tensor]
    rows: list[list[tuple[tf.Tensor, int | None]]]
    fed: list[tf.Tensor]


def check_sources(batch: WholeBatch, fetched: Iterable[tf.Tensor] = ()) -> None:
    """Raises ValueError if a micro-batch is computed from values that are not split.

    Args:
        batch: The batch.
        fetched: Tensors that are fetched with each micro-batch.
    """
    _, pipeline = pipeline_of(batch.stage[1])
    work = batch.works.total
    needed = ancestors(
        [*work.micro_ops, *work.once, *(tensor.op for tensor in fetched)]
    )
    for operation in needed:
        if operation in pipeline:
            raise ValueError(
                "A micro-batch must be computed from the features and labels of its "
                "model_fn: every read of the input pipeline takes a batch. Received: "
                f"{path_to(needed, operation)}. Pass the outermost model_fn to "
                "microbatch_model_fn."
            )


class Outside:
    """The graph of a batch outside of its passes.

    Args:
        replicas: All replicas of this process.
        feeds: Tensors that are fed anyway.
        find_rows: Function of a replica's batch, tensors of its micro-batch, and tensors
            that belong to no example. Returns rows from which the former are computed
            for the whole batch, and the axis of each, as in `Needs.rows`.
        phases: The phases of a model_fn, of which `replicas` are the last.
    """

    def __init__(
        self,
        replicas: list[ReplicaBatch],
        feeds: Iterable[tf.Tensor],
        find_rows: Callable,
        phases: Sequence[StepPhase] = (),
    ):
        self._graph = tf.compat.v1.get_default_graph()
        self._replicas, self._find_rows, self._phases = replicas, find_rows, phases
        earlier = phases[:-1]
        everything = [*(r for phase in earlier for r in phase.replicas), *replicas]
        fed = [*feeds, *(tensor for phase in earlier for tensor in phase.kept)]
        for replica in everything:
            fed += [*(t for t, _ in replica.reported), *replica.total.done]
        self._given = {tensor.ref() for tensor in fed}
        self._library = library_of_functions()
        self._handles = {op for r in everything for op in r.batch.works.handles}
        self._stages = [op for r in everything for op in r.batch.stage[1]]
        self._staged = {operation.inputs[0].op for operation in self._stages}
        staging, self._pipeline = pipeline_of(self._stages)
        totals = [replica.total for replica in everything]
        self._passes = ancestors(op for t in totals for op in (*t.micro_ops, *t.once))
        self._changes_before = [op for phase in earlier for op in phase.changes]
        self._needs = {}  # by the names of what is fetched
        self._feedable = set()  # names of tensors that were fed and may be
        self._check_initializers()
        if earlier:
            phases[-1].times.see_new_operations()
        self._wait_for_nothing_done(staging.keys() | self._passes.keys())
        if earlier:
            self._check_not_of_pipeline(ancestors(self._changes_before))
            inside = ancestors(op for phase in phases for op in phase.changes)
            self._wait_for_none_of({*self._changes_before}, inside)
            self._read_sums_anew(inside)

    def needs(self, fetches) -> Needs:
        """Returns the batch's tensors that the fetches of its own run need.

        Args:
            fetches: As `session.run` takes them, in a finished graph.

        Raises:
            ValueError: If they take another batch, or run again what has run with the
                micro-batches.
        """
        items = list(_items(self._graph, fetches))
        names = frozenset(item.name for item in items)
        if names not in self._needs:
            with self._graph.as_default():
                self._needs[names] = self._find(items)
        return self._needs[names]

    def needs_batch(self, fetches) -> bool:
        """Returns whether a run beside that of a batch needs a batch."""
        items = list(_items(self._graph, fetches))
        names = "other run", frozenset(item.name for item in items)
        if names not in self._needs:
            self._needs[names] = self._path_to_batch(items) is not None
        return self._needs[names]

    def refuse_other_run(self, fetches) -> NoReturn:
        """Raises ValueError for a run beside that of a batch."""
        path = self._path_to_batch(list(_items(self._graph, fetches)))
        raise ValueError(
            "A value of a batch must be fetched in the batch's own run. Received: "
            f"another run, of {path}. Return it from `before_run` of a hook, in "
            "SessionRunArgs; in the function of a `run_step_fn`, use run_with_hooks."
        )

    def needs_at_end(self, fetches) -> tuple[Needs, dict[tf.Tensor, tf.Tensor]]:
        """Returns the needs of a run on the last batch, and where its inputs are kept.

        Args:
            fetches: As for `needs`.

        Raises:
            ValueError: If the run changes more than local variables, such as those of a
                streaming metric, or the inputs are not kept.
        """
        items = list(_items(self._graph, fetches))
        before, done = self._given, [t for r in self._replicas for t in r.total.done]
        self._given = {tensor.ref() for tensor in done}  # no results of the last run
        try:
            users, _ = self._walk(items, self._is_known)
            with self._graph.as_default():
                needs = self._find(items)
        finally:
            self._given = before
        slots = {
            write.inputs[1].ref(): write.inputs[0]
            for replica in self._replicas
            for write in replica.batch.stage[1]
        }
        if self._changes_before:
            self.refuse_other_run(fetches)
        is_kept = all(tensor.ref() in slots for tensor in needs.taken)
        if not is_kept or not self._changes_local_variables_alone(users):
            self.refuse_other_run(fetches)
        kept = {
            tensor: reader.outputs[0]
            for tensor in needs.taken
            for reader in slots[tensor.ref()].consumers()
            if reader.type == "ReadVariableOp"
        }
        return needs, kept

    def _path_to_batch(self, items: list) -> str | None:
        needed = ancestors({getattr(item, "op", item) for item in items})
        for operation in (*self._staged, *self._handles):
            if operation in needed:
                return path_to(needed, operation)
        return None

    def check_feeds(self, feeds: Mapping) -> None:
        """Raises ValueError if a fed tensor is computed from a micro-batch."""
        items = [self._graph.as_graph_element(fed) for fed in feeds]
        new = [item for item in items if item.name not in self._feedable]
        of_batch = self._of_batch() if new else ()  # it walks through the whole graph
        for item in new:
            if item.op in of_batch:
                raise ValueError(
                    "A tensor of a batch that is split must not be fed, for its micro-"
                    f"batches have one each. Received: {item.name}. Feed a tensor of "
                    "input_fn, or train without micro-batches."
                )
        self._feedable |= {item.name for item in new}

    def _slices(self) -> list[tf.Tensor]:
        return [part.sliced for r in self._replicas for part in r.batch.parts]

    def _of_batch(self) -> set[tf.Operation]:
        """Returns the operations that compute from a micro-batch, or take it."""
        slices = self._slices()
        earlier = [r for phase in self._phases[:-1] for r in phase.replicas]
        reported = {tensor.op for r in earlier for tensor, _ in r.reported}
        users = data_descendants(slices, lambda operation: operation not in reported)
        return users | {tensor.op for tensor in slices}

    def _check_initializers(self) -> None:
        variables = [*tf.compat.v1.global_variables(), *tf.compat.v1.local_variables()]
        needed = ancestors({variable.initializer for variable in variables})
        for tensor in self._slices():
            if tensor.op in needed:
                raise ValueError(
                    "A variable must be initialized without the batch, which is split "
                    f"later. Received: {path_to(needed, tensor.op)}. Initialize it from "
                    "other values, or train without micro-batches."
                )

    def _wait_for_nothing_done(self, inside: Iterable[tf.Operation]) -> None:
        """Lets operations outside not wait for operations of earlier runs."""
        of_batch = self._of_batch()
        done = self._pipeline | {
            operation
            for operation in self._passes
            if not takes_any(operation, self._handles)
            and (operation in of_batch or self._changes(operation))
        }
        self._wait_for_none_of(done, inside)

    def _wait_for_none_of(self, done: set, inside: Iterable[tf.Operation]) -> None:
        for operation in self._graph.get_operations():
            waits = operation.control_inputs
            if operation not in inside and not done.isdisjoint(waits):
                rest = [other for other in waits if other not in done]
                set_control_inputs(operation, rest)

    def _read_sums_anew(self, inside: Mapping) -> None:
        """Has sums of earlier phases read outside without waits for their changes.

        Sums of gradients stay as they are until the next batch, but sparse ones.

        Args:
            inside: Operations that the changes of all phases need.
        """
        needed, sparse = ancestors(self._changes_before), self._cleared()
        sums = [operation for operation in needed if hasattr(operation, SUM_OF)]
        kept = [op for op in sums if sparse.isdisjoint(data_ancestors([op]))]
        outputs = [[t for op in ops for t in op.outputs] for ops in (kept, sums)]
        computed = data_descendants(outputs[0]).union(kept)
        computed -= data_descendants([t for t in outputs[1] if t.op not in computed])
        readers = {}
        for operation in self._graph.get_operations():
            if operation not in inside and operation not in self._passes:
                for tensor in operation.inputs:
                    if tensor.op in computed and tensor.op in inside:
                        readers.setdefault(tensor.ref(), []).append(operation)
        wanted = [key.deref() for key in readers]
        behind = [data_ancestors([t.op]).keys() & computed for t in wanted]
        pairs = [
            (tensor, operations)
            for tensor, operations in zip(wanted, behind, strict=True)
            if not any(self._changes(op) or context_of(op) for op in operations)
        ]
        wanted = [tensor for tensor, _ in pairs]
        copied = set().union(*(operations for _, operations in pairs))
        inputs = [tensor for operation in copied for tensor in operation.inputs]
        inputs = {tensor.name: tensor for tensor in inputs if tensor.op not in copied}
        definition, _ = define(copied)
        copies = insert(definition, inputs, wanted, "sums")
        for tensor, copy in zip(wanted, copies, strict=True):
            replace(tensor, copy, readers[tensor.ref()])

    def _cleared(self) -> set[tf.Operation]:
        """Returns the sums of sparse gradients that earlier phases have cleared."""
        return self._handles.intersection(written_by(self._changes_before))

    def _check_not_of_pipeline(self, needed: dict) -> None:
        """Raises ValueError if an update before the last one reads another batch."""
        for operation in needed.keys() & self._pipeline:
            raise ValueError(
                "An update before the last one must be computed from the features and "
                "labels of its model_fn: every read of the input pipeline takes a batch. "
                f"Received: {path_to(needed, operation)}. Pass it as a feature."
            )

    def _read_before(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the reads of variables that earlier phases change, for some tensors.

        Sums of gradients stay as they are until the next batch.

        Raises:
            ValueError: If rows of examples are computed from such a variable, or a value
                between two of its changes.
        """
        times, of_batch = self._phases[-1].times, self._of_batch()
        last, reads = len(self._phases) - 1, []

        def is_needed(operation: tf.Operation) -> bool:
            return not any(tensor.ref() in self._given for tensor in operation.outputs)

        needed = ancestors((tensor.op for tensor in tensors), is_needed)
        for operation in needed:
            if times.is_as_before(operation, last) or hasattr(operation, SUM_OF):
                continue
            is_early = times.is_of_beginning(operation, last)
            is_early &= operation not in of_batch
            if not is_early or not all(map(can_be_fed, operation.outputs)):
                raise ValueError(
                    "Hooks and summaries of a model_fn whose optimizers change variables "
                    "in order must fetch losses, scalars between them and the results of "
                    "examples, or values that come after all updates but the last. "
                    f"Received: {path_to(needed, operation)}. Leave it out, or take all "
                    "gradients before the first update."
                )
            reads += operation.outputs
        return reads

    def _find(self, items: list) -> Needs:
        """Returns the batch's tensors that `items` need."""
        is_fed = self._is_known
        users, _ = self._walk(items, is_fed)
        of_batch, late = self._of_batch(), self._late(users)
        written = set(written_by([*late, *self._changes_before])) - self._handles

        def is_value(tensor: tf.Tensor) -> bool:
            operation = tensor.op
            is_early = operation in of_batch and operation not in late
            return is_early and can_be_fed(tensor)

        def is_end(tensor: tf.Tensor) -> bool:
            return is_fed(tensor) or is_value(tensor)

        users, ends = self._walk(items, is_end)
        self._check_not_cleared(users)
        self._check_not_again(users, late)
        before = [
            item
            for item in items
            if getattr(item, "op", item) not in of_batch | late
            and self._reads(item, written)
        ]
        values = [tensor for tensor in ends if not is_fed(tensor)]
        _, more = self._walk([*values, *before], is_fed)
        ends = {tensor.ref(): tensor for tensor in [*ends, *more] if is_fed(tensor)}
        fed = [tensor for ref, tensor in ends.items() if ref in self._given]
        taken = [tensor for ref, tensor in ends.items() if ref not in self._given]
        for tensor in before:
            of_run, ends = self._walk([tensor], is_end)
            slots = self._handles | self._staged
            is_of_batch = bool(ends) or not slots.isdisjoint(of_run)
            is_of_batch |= self._reads_change(of_run)
            (values if is_of_batch else taken).append(tensor)
        if self._changes_before:
            self._check_not_cleared(ancestors(tensor.op for tensor in values))
            taken += self._read_before(values)
        return Needs(taken, values, self._rows(values, taken), fed)

    def _rows(
        self, values: list, taken: list
    ) -> list[list[tuple[tf.Tensor, int | None]]]:
        """Returns `Needs.rows`."""
        if not values:
            return [[] for _ in self._replicas]
        rows = []
        for replica in self._replicas:
            refs = {part.sliced.ref() for part in replica.batch.parts}
            others = [tensor for tensor in self._slices() if tensor.ref() not in refs]
            mixed = [*taken, *others]
            rows.append(self._find_rows(replica.batch, values, mixed, self._given))
        return rows

    def _reads(self, item, variables: set[tf.Operation]) -> bool:
        """Returns whether a tensor reads one of some variables.

        If the run changes it, a plain run reads it first: its update comes after the
        forward pass.
        """
        if not isinstance(item, tf.Tensor) or not can_be_fed(item):
            return False
        needed, _ = self._walk([item], self._is_known)
        read = {
            variable_of(t) for op in needed for t in op.inputs if may_be_variable(t)
        }
        return not variables.isdisjoint(read)

    def _reads_change(self, operations: Iterable[tf.Operation]) -> bool:
        """Returns whether one of some operations reads a change of an earlier phase."""
        if not self._changes_before:
            return False
        times, last = self._phases[-1].times, len(self._phases) - 1
        return not all(times.is_of_beginning(op, last) for op in operations)

    def _is_known(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is fed in the batch's own run, or may be."""
        is_taken = tensor.op in self._pipeline and can_be_fed(tensor)
        return is_taken or tensor.ref() in self._given

    def _walk(self, items: list, is_end: Callable) -> tuple[dict, list[tf.Tensor]]:
        """Returns the operations that `items` need, with users, and where they end.

        Args:
            items: Tensors and operations.
            is_end: Condition on tensors at which the walk ends.
        """
        users, ends = {}, {}
        waiting = [(item, None) for item in items]
        while waiting:
            item, user = waiting.pop()
            if isinstance(item, tf.Tensor):
                if is_end(item):
                    ends[item.ref()] = item
                    continue
                item = item.op
            if item in users:
                users[item].append(user)
                continue
            users[item] = [user]
            if item in self._pipeline and gives_another(item, self._library):
                raise ValueError(
                    "A fetched tensor must not take another batch from the input "
                    f"pipeline. Received: {path_to(_firsts(users), item)}. Fetch a "
                    "tensor of input_fn, not its operation, and wait for none of them."
                )
            waiting += [
                (other, item) for other in (*item.inputs, *control_inputs_of(item))
            ]
        return users, list(ends.values())

    def _late(self, users: dict) -> set[tf.Operation]:
        """Returns the operations that change something, or run only after a change."""
        late = walk(
            filter(self._changes, users), lambda operation: users.get(operation, ())
        )
        return late.keys() - {None}

    def _changes(self, operation: tf.Operation) -> bool:
        """Returns whether an operation changes a resource that is not of this batch alone."""
        return changes_something(operation, self._library, self._handles)

    def _changes_local_variables_alone(self, users: dict) -> bool:
        """Returns whether operations change no more than variables of the session.

        No checkpoint keeps them, so training does not see that a metric is updated again.
        """
        changing = [op for op in users if self._changes(op)]
        local_results = tf.distribute.get_strategy().experimental_local_results
        parts = map(local_results, tf.compat.v1.local_variables())
        local = {variable.op for variable in itertools.chain.from_iterable(parts)}
        return all(map(writes, changing)) and local.issuperset(written_by(changing))

    def _check_not_cleared(self, needed: Iterable[tf.Operation]) -> None:
        """Raises ValueError if a sparse gradient of an update before the last is read."""
        cleared = self._cleared()
        for operation in needed if cleared else ():
            is_sum = hasattr(operation, SUM_OF)
            if is_sum and not cleared.isdisjoint(data_ancestors([operation])):
                raise ValueError(
                    "Hooks and summaries must not fetch a sparse gradient of an update "
                    f"before the last one. Received: {operation.name}, the gradient of "
                    f"{getattr(operation, SUM_OF)}. Leave it out, or take all gradients "
                    "before the first update."
                )

    def _check_not_again(self, users: dict, late: set[tf.Operation]) -> None:
        for operation in late & users.keys() & self._passes.keys():
            if self._changes(operation):
                raise ValueError(
                    "An operation that runs with every micro-batch must not run with the "
                    f"batch as well. Received: {path_to(_firsts(users), operation)}. "
                    "Leave it out of the runs of hooks and of the outer model_fn."
                )
        for operation in late.intersection(users, self._changes_before):
            if self._changes(operation):
                raise ValueError(
                    "A hook or summary must not make a change again that an update "
                    "before the last one makes, or that it or a change after it waits "
                    f"for. Received: {path_to(_firsts(users), operation)}. Fetch the "
                    "variable itself, or take all gradients before the first update."
                )


def _firsts(users: dict) -> dict:
    return {operation: first for operation, (first, *_) in users.items()}


def _items(graph: tf.Graph, fetches) -> Iterator[tf.Tensor | tf.Operation]:
    """Yields the tensors and operations that `session.run(fetches)` fetches."""
    if isinstance(fetches, Mapping):
        fetches = list(fetches.values())  # hooks, which cannot be sorted, may be keys
    if isinstance(fetches, list | tuple):
        for fetch in fetches:
            yield from _items(graph, fetch)
    elif isinstance(fetches, tf.Variable):
        yield graph.as_graph_element(fetches)
    else:
        parts = tf.nest.flatten(fetches, expand_composites=True)
        yield from (graph.as_graph_element(part) for part in parts if part is not None)
