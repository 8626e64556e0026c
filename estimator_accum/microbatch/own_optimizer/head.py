"""The head: operations that combine examples, run once, on the rows of the whole batch.

    micro-batch    parts of the batch -> rows -> | mixed -> loss
                                                 |   copied: the head
    whole batch                     all rows  -> | mixed -> loss

The operations behind the rows are copied, with whatever was derived from them, onto the
rows of all micro-batches, which are collected for it. So are entries of examples, such as
those that are computed behind `tf.boolean_mask`. Rows that need no variable and no
random number are computed by a copy as well, from the batch itself. Where only a shape
of rows is wanted, it is computed, and no row is collected.
"""

import collections
from collections.abc import Collection, Iterable

import tensorflow as tf

from estimator_accum.graph.branches import is_in_loop
from estimator_accum.graph.copies import changed_operations, define, insert
from estimator_accum.graph.devices import of_strings
from estimator_accum.graph.internals import context_of, is_in_while_loop
from estimator_accum.graph.names import (
    CONTROL_FLOW_V1,
    LOOK_UPS,
    OF_SHAPES,
    is_draw,
)
from estimator_accum.graph.walks import (
    control_inputs_of,
    data_ancestors,
    data_descendants,
    in_order,
)
from estimator_accum.graph.writers import may_be_variable
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.collecting import (
    WHOLE_BATCH_LOSS,
    collect,
    collect_moments,
    running_sum,
)
from estimator_accum.microbatch.replica import Refusal
from estimator_accum.microbatch.work import Turn
from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.declaration import MOMENTS_ATTRIBUTE
from estimator_accum.rows.entries import states_of_ragged, states_of_sparse
from estimator_accum.rows.guards import OwnRows, distinct
from estimator_accum.rows.sizes import Size
from estimator_accum.rows.states import Mixed, State

# Operations whose results depend on the number of examples alone.
_SHAPES = OF_SHAPES - {"Rank"}
# Operations that list values in places which integers tell.
_CHOOSING_BY_INTEGERS = {"DynamicPartition", "GatherV2", "RaggedGather"}
_CHOOSING_BY_INTEGERS |= {"SparseReorder", "SparseFillEmptyRows"}
_OF_WHOLE_BATCH = "_estimator_accum_whole_batch"  # attribute of copies


class View:
    """Analysis of the graph of one micro-batch, as the graph is now.

    Args:
        batch: The batch.
        targets: Tensors to look at, with all that they are computed from.
        mixed: Tensors that belong to no example.
        can_check: As for `Analysis`.

    Attributes:
        batch: The batch.
        of_batch: The operations that are computed from the micro-batch.
    """

    def __init__(
        self, batch: WholeBatch, targets: list[tf.Tensor], mixed=(), can_check=True
    ):
        self.batch = batch
        self._parts = {part.sliced.ref(): part for part in batch.parts}
        rows = [part.sliced for part in batch.parts if part.has_rows]
        sparse, ragged = (collections.defaultdict(list) for _ in range(2))
        for part in batch.parts:
            if part.sparse is not None:
                sparse[part.sparse].append(part.sliced)
            elif part.ragged is not None:
                ragged[part.ragged].append(part.sliced)
        list_states, values = states_of_sparse(sparse)
        list_states |= states_of_ragged(ragged)
        states = {t.ref(): state for t, state in batch.rows_of_others}
        states = list_states | states
        self.analysis = Analysis(rows, mixed, states, values, can_check=can_check)
        self.analysis.analyze(targets)
        self._targets, self._pure, self._by_weights = targets, {}, {}
        self._note_graph()

    def of_now(self, targets: list[tf.Tensor]) -> "View":
        """Returns the analysis up to `targets`, as the graph is now.

        It is this one, of these and further targets, as long as no input has changed.
        """
        changed = changed_operations(self.batch.begin.graph)[self._changes :]
        has_changed = any(map(self.analysis.has_seen, changed))
        has_changed |= self._others != len(self.batch.rows_of_others)
        references = {tensor.ref() for tensor in targets}
        is_part = references >= {tensor.ref() for tensor in self._targets}
        if has_changed or not is_part or not self.analysis.analyze_further(targets):
            return View(self.batch, targets)
        self._targets = targets
        if self.batch.batch_norm != "batch":
            self._pure = {}  # moments may have been marked
        self._note_graph()
        return self

    def take_identities(self, identities: Collection[tf.Tensor]) -> None:
        """Takes down that some of the tensors are read through Identities."""
        self.analysis.analyze_further(identities)
        self._changes = len(changed_operations(self.batch.begin.graph))
        self.of_batch |= {tensor.op for tensor in identities}

    def _note_graph(self) -> None:
        self._others = len(self.batch.rows_of_others)
        self._changes = len(changed_operations(self.batch.begin.graph))
        self.of_batch = of_batch(self.batch)

    def state(self, tensor: tf.Tensor) -> State:
        """Returns the tensor's state."""
        return self.analysis.state(tensor)

    def is_part(self, tensor: tf.Tensor) -> bool:
        """Returns whether the tensor is a slice of the batch itself."""
        return tensor.ref() in self._parts

    def whole_part(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the part of the batch of which the tensor is a slice."""
        return self._parts[tensor.ref()].whole

    def is_frontier(self, tensor: tf.Tensor) -> bool:
        """Returns whether the tensor has rows that micro-batches must compute."""
        kinds = {self.state(other).kind for other in tensor.op.inputs}
        is_read = self.state(tensor).kind == "entries" and "rows" in kinds
        # The rows from which entries are read take no more memory.
        return not is_read and self.has_size(tensor)

    def has_size(self, tensor: tf.Tensor) -> bool:
        """Returns whether the batch's shape is computed without the batch's rows."""
        state = self.state(tensor)
        is_own = state.kind == "rows" and state.distance is None
        is_own |= state.kind == "entries" and self._is_list(tensor)
        return is_own and not is_in_loop(tensor.op) and not self.is_pure(tensor)

    def _is_list(self, tensor: tf.Tensor) -> bool:
        """Returns whether micro-batches' entries, one after the other, are the batch's."""
        if self.state(tensor).is_place or not self.analysis.can_check:
            return False
        if not self.analysis.is_in_order(tensor) or self._is_by_weights(tensor):
            return False
        try:
            tail = self.analysis.dims(tensor)[1:]
        except Mixed:
            return False
        return not any(size.power or size.counted for size in tail)

    def _is_by_weights(self, tensor: tf.Tensor) -> bool:
        """Returns whether a network chooses a tensor's entries.

        Passes that compute the same choose others where rounding decides.
        """

        first = self.analysis.first_of_list(tensor)
        if first.ref() not in self._by_weights:
            self._by_weights[first.ref()] = self._reads_weights(first)
        return self._by_weights[first.ref()]

    def _reads_weights(self, first: tf.Tensor) -> bool:
        def before(operation: tf.Operation) -> list[tf.Tensor]:
            if operation.type in _SHAPES and self._have_rows(operation.inputs):
                return []
            inputs = [t for t in operation.inputs if not self.is_part(t)]
            if operation is first.op and operation.type in _CHOOSING_BY_INTEGERS:
                inputs = [t for t in inputs if not t.dtype.is_floating]
            return inputs

        needed = () if self.is_part(first) else data_ancestors([first.op], before)
        return any(
            operation.type not in LOOK_UPS
            and any(map(may_be_variable, before(operation)))
            for operation in needed
        )

    def _have_rows(self, tensors: Iterable[tf.Tensor]) -> bool:
        return all(self.state(tensor).kind == "rows" for tensor in tensors)

    def is_shared_draw(self, tensor: tf.Tensor) -> bool:
        """Returns whether the tensor is random numbers that all examples share."""
        return is_draw(tensor.op) and self.state(tensor).kind == "fixed"

    def is_pure(self, tensor: tf.Tensor) -> bool:
        """Returns whether constants and the batch alone decide the tensor's value."""

        def before(operation: tf.Operation) -> list[tf.Operation]:
            if operation not in self._pure and self._is_source(operation):
                self._pure[operation] = any(map(self.is_part, operation.outputs))
            if operation in self._pure:
                return []
            return [t.op for t in operation.inputs if not self.is_part(t)]

        for operation in in_order([tensor.op], before):
            if operation not in self._pure:
                inputs = operation.inputs
                are_pure = (self.is_part(t) or self._pure[t.op] for t in inputs)
                self._pure[operation] = all(are_pure)
        return self._pure[tensor.op]

    def _is_source(self, operation: tf.Operation) -> bool:
        is_stateful = operation.op_def.is_stateful and operation.type not in LOOK_UPS
        is_fed = operation.type.startswith("Placeholder")
        is_part = any(map(self.is_part, operation.outputs))
        # Of a part of the batch only: a copy would compute others.
        is_part |= hasattr(operation, MOMENTS_ATTRIBUTE)
        return is_stateful or is_fed or is_part or operation.type in CONTROL_FLOW_V1


def of_batch(batch: WholeBatch) -> set[tf.Operation]:
    """Returns the operations that compute from a micro-batch, or take it."""
    slices = [part.sliced for part in batch.parts]
    slices += [rows for rows, _ in batch.rows_of_others]
    users = data_descendants(slices, lambda op: not hasattr(op, _OF_WHOLE_BATCH))
    return users | {tensor.op for tensor in slices}


def check_guards(batch: WholeBatch, views: list[View]) -> dict[tf.Operation, Refusal]:
    """Returns the facts of the analysis by operations that fail where they do not hold.

    Every micro-batch runs these. One that is the whole batch relies on few facts.
    """
    checks = {}
    for guard in distinct(g for view in views for g in view.analysis.guards):
        with tf.control_dependencies(None):
            holds = guard.holds(batch.size, tf.equal(batch.size, batch.rows))
            with of_strings():
                check = tf.raw_ops.Assert(condition=holds, data=["row"])
            batch.works.add(micro_ops=[check])
            checks[check] = Refusal(guard, is_of_model=False)
            # A lookup outside of the table fails beside its check.
            if isinstance(guard, OwnRows):
                lookup = Refusal(guard, is_of_model=True)
                checks |= dict.fromkeys(guard.lookups, lookup)
    return checks


def find_rows(
    batch: WholeBatch, targets: list[tf.Tensor], mixed: list[tf.Tensor], fed: set
) -> list[tuple[tf.Tensor, int | None]]:
    """Returns tensors from whose values in micro-batches others are computed.

    Args:
        batch: The batch.
        targets: The others, for the whole batch.
        mixed: Tensors that belong to no example.
        fed: References of tensors that are fed for the whole batch, such as its loss.

    Returns:
        Pairs (rows, their axis), and (summary of a histogram of rows, None).
    """
    view = View(batch, targets, mixed, can_check=False)
    histograms = {
        operation.outputs[0].ref(): None
        for operation in Border(view, targets, values=fed).operations
        if operation.type == "HistogramSummary"
        if view.is_frontier(operation.inputs[1]) and context_of(operation) is None
    }
    border = Border(view, targets, values=fed | histograms.keys())
    frontier = {tensor.ref(): tensor for tensor in border.frontier}
    # Else the network would compute them all at once, for their shape alone.
    for operation in border.shapes:
        inputs = (tensor for tensor in operation.inputs if tensor.op in view.of_batch)
        frontier |= {tensor.ref(): tensor for tensor in inputs}
    rows = [(tensor, view.state(tensor).axis) for tensor in frontier.values()]
    return rows + [(summary.deref(), None) for summary in histograms]


class Border:
    """Boundary between copied operations and those that the copies read.

    Args:
        view: The graph.
        targets: Tensors to copy.
        new_ops: Operations that were derived from others, and are copied.
        values: Replacements of tensors; the search stops at these tensors.

    Attributes:
        operations: The operations to copy, in the order of the search.
        frontier: Tensors whose rows micro-batches compute.
        shapes: Operations of which only the shape of rows is wanted.
    """

    def __init__(self, view: View, targets, new_ops=frozenset(), values=()):
        # As keys: a set's order would make another graph in each process.
        self.operations, self.shapes = {}, {}
        self._reads_new = False  # a value of no batch that each run has anew
        frontier, seen, waiting = {}, set(), list(targets)
        while waiting:
            tensor = waiting.pop()
            operation = tensor.op
            if tensor.ref() in seen or tensor.ref() in values:
                continue
            seen.add(tensor.ref())
            is_new = operation in new_ops
            in_loop = is_in_loop(operation)
            is_needed = is_new or in_loop or operation in view.of_batch
            if view.is_part(tensor) or not is_needed:
                is_mixed = view.state(tensor).kind == "mixed"
                self._reads_new |= is_mixed and not view.is_part(tensor)
                continue
            if not (is_new or in_loop) and view.is_shared_draw(tensor):
                continue
            if operation.type in _SHAPES and _are_rows(view, operation, new_ops):
                self.shapes[operation] = None
                continue
            if not is_new and view.is_frontier(tensor):
                frontier[tensor.ref()] = tensor
                continue
            self.operations[operation] = None
            waiting += operation.inputs
            for other in control_inputs_of(operation) if is_new or in_loop else ():
                # The gradient of a tf.py_function reads what its own run has recorded.
                is_read = other.type == operation.type == "EagerPyFunc"
                if is_read or other in new_ops or is_in_loop(other):
                    waiting += other.outputs[:1]
        self.frontier = list(frontier.values())

    def draws(self) -> bool:
        """Returns whether the copy draws random numbers, or reads some that are drawn."""
        return self._reads_new or any(map(is_draw, self.operations))


def _are_rows(view: View, operation: tf.Operation, new_ops) -> bool:
    """Returns whether inputs have rows that micro-batches must compute, or are fixed."""
    inputs = [tensor for tensor in operation.inputs if tensor.op in view.of_batch]
    are_known = [t.op not in new_ops and view.has_size(t) for t in inputs]
    return bool(inputs) and all(are_known)


def _check_no_draw_in_a_loop(operations) -> None:
    for operation in filter(is_draw, operations):
        if is_in_while_loop(operation):
            raise ValueError(
                "Random numbers that all examples share must not be drawn in a loop of "
                f"TensorFlow 1. Received: {operation.name} of type {operation.type}. "
                "Draw them before the loop, or for each example."
            )


def axis_of_rows(view: View, tensor: tf.Tensor) -> int | None:
    """Returns the axis of a tensor's rows; None of entries."""
    state = view.state(tensor)
    return None if state.kind == "entries" else state.axis


class Copies:
    """Copies on the rows of the whole batch, which run after one pass.

    Args:
        batch: The batch.
        is_early: Whether the first pass collects the rows, not the last one.

    Attributes:
        collected: Tensors whose rows the pass collects, and the axis of these; None of
            entries.
        counted: Tensors whose entries the pass counts.
        draws: Whether copies draw numbers that another copy would draw anew.
    """

    def __init__(self, batch: WholeBatch, is_early: bool):
        self._batch, self._is_early = batch, is_early
        self.collected, self.counted, self.draws = [], [], False
        self._found = {}  # copies by the tensors that they are of
        self._losses = {}  # those of results of whole_batch_loss

    def border(self, view: View, targets: list[tf.Tensor]) -> Border:
        """Returns where a copy of `targets` begins, if nothing was copied before."""
        return Border(view, targets, values=self._losses)

    def take_losses(self, view: View, targets: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the results of whole_batch_loss that `targets` are computed from.

        They are of the whole batch already.
        """
        losses = []
        for operation in Border(view, targets).operations:
            loss = getattr(operation, WHOLE_BATCH_LOSS, None)
            if loss is not None:
                losses.append(operation.outputs[0])
                # In the run in which it is computed, or in a later one.
                is_now = self._is_early and not loss.is_joint
                value = loss.loss if is_now else loss.value
                self._losses[losses[-1].ref()] = value
        self._found |= self._losses
        return losses

    def take(self, tensors: list[tf.Tensor]) -> None:
        """Has tensors read as they are, which are fed with values of the whole batch."""
        self._losses |= {tensor.ref(): tensor for tensor in tensors}
        self._found |= self._losses

    def take_moments(self, view: View, targets: list[tf.Tensor]) -> None:
        """Has moments of the whole batch computed from those of its micro-batches.

        Gradients do not flow through them.
        """
        operations = Border(view, targets, values=self._found).operations
        moments = [getattr(op, MOMENTS_ATTRIBUTE, None) for op in operations]
        by_mean = {m.mean.ref(): m for m in moments if m is not None}
        turn = self._turn()
        for mean, moments in by_mean.items():
            if view.state(moments.mean).kind == "fixed":
                values = collect_moments(self._batch, turn, moments)
                self._found[mean], self._found[moments.variance.ref()] = values

    def make(
        self, view: View, targets: list[tf.Tensor], new_ops=frozenset()
    ) -> list[tf.Tensor]:
        """Returns the values of tensors for the whole batch.

        Args:
            view: The graph.
            targets: Tensors of the micro-batch.
            new_ops: Operations that were derived from others, and are copied.
        """
        graph = tf.compat.v1.get_default_graph()
        before = set(graph.get_operations())
        copies = self._make(view, targets, new_ops)
        for operation in set(graph.get_operations()) - before:
            setattr(operation, _OF_WHOLE_BATCH, True)
        return copies

    def _turn(self) -> Turn:
        return self._batch.works.first_turn() if self._is_early else Turn.LAST

    def _make(self, view: View, targets: list[tf.Tensor], new_ops) -> list[tf.Tensor]:
        self.take_losses(view, targets)
        border = Border(view, targets, new_ops, self._found)
        _check_no_draw_in_a_loop(border.operations)
        axes = [axis_of_rows(view, tensor) for tensor in border.frontier]
        if border.frontier:
            rows = collect(self._batch, self._turn(), border.frontier, axes)
            self.collected += zip(border.frontier, axes, strict=True)
            for tensor, whole in zip(border.frontier, rows, strict=True):
                self._found[tensor.ref()] = whole
        for operation in border.shapes:
            self._make_shapes(view, operation)
        inputs = {}
        for operation in border.operations:
            for tensor in operation.inputs:
                if tensor.ref() in self._found:
                    inputs[tensor.name] = self._found[tensor.ref()]
                elif view.is_part(tensor):
                    inputs[tensor.name] = view.whole_part(tensor)
                elif tensor.op not in border.operations:
                    inputs[tensor.name] = tensor
        outputs = [tensor for op in border.operations for tensor in op.outputs]
        definition, _ = define(border.operations)
        copies = insert(definition, inputs, outputs, "whole_batch")
        self._found |= {
            tensor.ref(): copy
            for tensor, copy in zip(outputs, copies, strict=True)
            # A loop stays whole, with what its rounds keep.
            if not is_in_loop(tensor.op) and tensor.dtype != tf.resource
        }
        return [self._value(view, tensor) for tensor in targets]

    def _value(self, view: View, tensor: tf.Tensor) -> tf.Tensor:
        if view.is_part(tensor):
            return view.whole_part(tensor)
        return self._found.get(tensor.ref(), tensor)

    def _make_shapes(self, view: View, operation: tf.Operation) -> None:
        for tensor, output in zip(operation.inputs, operation.outputs, strict=True):
            shape = self._shape(view, tensor)
            if operation.type == "Size":
                value = tf.cast(tf.reduce_prod(shape), output.dtype)
            elif operation.type == "ZerosLike":
                value = tf.zeros(shape, output.dtype)
            elif operation.type == "OnesLike":
                value = tf.ones(shape, output.dtype)
            else:
                value = tf.cast(shape, output.dtype)
            self._found[output.ref()] = value

    def _number_of_entries(self, view: View, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the number of entries of the whole batch, scalar int64."""
        first = view.analysis.first_of_list(tensor)
        if view.is_part(first) or first.ref() in self._found:
            return tf.shape(self._value(view, first), tf.int64)[0]
        if view.is_pure(first):
            (whole,) = self._make(view, [first], frozenset())
            return tf.shape(whole, tf.int64)[0]
        with tf.device("/cpu:0"):
            number = tf.shape(first, tf.int64)[0]
            _, total = running_sum(self._batch, self._turn(), "entries", number)
        self.counted.append(first)
        return total

    def _shape(self, view: View, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the shape of a tensor's rows for the whole batch, int64 [rank]."""
        if tensor.op not in view.of_batch:
            return tf.shape(tensor, tf.int64)
        sizes = {
            f"{part.sliced.name}:{axis}": tf.shape(part.whole, tf.int64)[axis]
            for part in self._batch.parts
            if part.has_rows and part.sliced.shape.rank is not None
            for axis in range(1, part.sliced.shape.rank)
        }
        dims, state = view.analysis.dims(tensor), view.state(tensor)
        total = None
        if state.kind == "entries":
            total = self._number_of_entries(view, tensor)
            sizes |= dict.fromkeys(state.length.symbols, total)
        if not all(symbol in sizes for size in dims for symbol in size.symbols):
            # The same in all micro-batches, but for the number of examples.
            shape, axis, rows = tf.shape(tensor, tf.int64), state.axis, total
            if rows is None:
                span = shape[axis] // self._batch.divisor(self._batch.size)
                rows = span * self._batch.rows
            return tf.concat([shape[:axis], [rows], shape[axis + 1 :]], 0)

        def number(size: Size) -> tf.Tensor:
            result = tf.constant(size.factor, tf.int64)
            for factor in (
                *[self._batch.rows] * size.power,
                *map(sizes.get, size.symbols),
            ):
                result *= factor
            return result

        return tf.stack([number(size) for size in dims])
