"""Gradients of a batch, for a model_fn that knows nothing of micro-batches.

    head             d loss / d rows, once, on the rows of the whole batch
    micro-batches    sum over i of (d rows_i / d variable) * (its rows of d loss / d rows)
    variables that the head reads itself: their gradients, once

Nothing is assumed of the loss. What the model_fn gets are reads of the sums, which are
computed before the train op runs. So all that it does with them (clipping, its
optimizer, schedules, counters) runs once per batch, with the whole batch's gradient.

A sparse gradient is the sum over the rows that the batch touched. Code that looks at
the slices of one row separately gets them: `tf.global_norm` their norm, which is summed
as well, anything else the slices themselves.
"""

import contextlib
import re
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.accumulators import (
    Accumulator,
    add_up,
    clear_rows,
    commit,
    create_accumulator,
    touched_rows,
)
from estimator_accum.core.gradients import Gradient, cast
from estimator_accum.core.trained import check_own_job
from estimator_accum.graph.copies import replace
from estimator_accum.graph.functions import operations_with_own_gradients
from estimator_accum.graph.internals import (
    context_of,
    counts_vectorized,
    current_control_dependencies,
    dtype_of_handle,
    gradient_scope_of,
    is_in_while_loop,
    set_input,
)
from estimator_accum.graph.variables import read
from estimator_accum.graph.walks import data_ancestors, data_descendants
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.collecting import WHOLE_BATCH_LOSS, keep, keep_rows
from estimator_accum.microbatch.own_optimizer.head import Copies, View, of_batch
from estimator_accum.microbatch.own_optimizer.patches import PASSES_ON, put_behind
from estimator_accum.microbatch.staging import Slot
from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.states import FIXED

_HALVES = (tf.float16, tf.bfloat16)
# What computes the same from slices of one row and from their sum: the places of slices
# and of the numbers of their rows.
_SUMMING = {
    "ResourceScatterAdd": (2, 1),
    "ResourceScatterSub": (2, 1),
    "ScatterAdd": (2, 1),
    "ScatterSub": (2, 1),
    "UnsortedSegmentSum": (0, 1),
}
# What the order of rows does not change: updates of a variable, and sums.
_UPDATING = re.compile(r"(Resource)?(Scatter|SparseApply)")
_IN_ANY_ORDER = {
    *("All", "Any", "L2Loss", "Max", "Mean", "Min", "Prod", "Sum"),
    "UnsortedSegmentSum",
}
_PASSING = {"Cast", "Identity", "Neg"}
_SCALING = {"Mul", "RealDiv"}


class _Sparse(NamedTuple):
    """A sparse gradient, whose way of accumulation depends on what uses its sum."""

    accumulator: Accumulator
    gradient: tf.IndexedSlices
    total: tf.IndexedSlices
    clear: list[tf.Operation]


class Derived(NamedTuple):
    """Gradients of one call, for the spot check.

    Attributes:
        view: The graph at the time.
        rows: Tensors whose rows the head gets.
        arriving: For each of them, the gradient that arrives at its micro-batch's rows.
        gradients: The micro-batch's gradients of variables.
        is_simple: Whether nothing else arrives, such as from a whole_batch_loss.
    """

    view: View
    rows: list[tf.Tensor]
    arriving: list[tf.Tensor]
    gradients: list[Gradient]
    is_simple: bool


class Interception:
    """The gradients that one replica's model_fn computes.

    Args:
        batch: The replica's batch; the operations of its micro-batches are added to it.

    Attributes:
        early: Copies that run before gradients flow, after the first pass.
        sums: Names of the variables by the operations that read their gradients' sums.
        losses: The tensors whose gradients were computed.
        derived: Derived gradients, for the spot check.
        waited_for: Operations of the micro-batch that the gradients waited for.
        clear: Operations that run after the sums are read.
        is_used: Whether a gradient with respect to a variable was computed.
    """

    def __init__(self, batch: WholeBatch):
        self._batch = batch
        self._graph = tf.compat.v1.get_default_graph()
        self._sparse = []
        self.early = Copies(batch, is_early=True)
        self.sums, self.losses, self.derived = {}, [], []
        self.waited_for, self.clear, self.is_used = [], [], False

    def gradients(
        self,
        ys: list,
        xs: list,
        grad_ys: list | None,
        plain: Callable,
        compute: Callable,
    ) -> list:
        """Returns d ys / d xs of the whole batch where x is not of a micro-batch.

        Args:
            ys: Tensors.
            xs: Variables and tensors.
            grad_ys: Gradients of `ys`; None are ones.
            plain: Returns d ys / d xs as TensorFlow computes them.
            compute: tf.gradients, a function of ys, xs, grad_ys and stop_gradients.

        Raises:
            ValueError: If they cannot be summed over micro-batches.
        """
        sources = [_source(x) for x in xs]
        with contextlib.ExitStack() as stack:
            if self._is_in_branch():
                outer = [
                    op.graph is self._graph and not context_of(op) for op in sources
                ]
                if not any(outer):
                    return plain()
                self._check_outside(ys)
                stack.enter_context(tf.init_scope())
            of_it = of_batch(self._batch)
            self._check_first_order(ys)
            self._check_shapes()
            fixed = [source not in of_it for source in sources]
            self.is_used |= any(fixed)
            is_of_it = any(top.op in of_it for top in _tensors(ys, grad_ys))
            if not is_of_it or not any(fixed):
                return plain()
            self._check_not_repeated(ys)
            self.losses += ys
            after = self._dependencies(of_it)
            stack.enter_context(tf.control_dependencies(None))
            gradients = [None] * len(xs)
            if not all(fixed):
                gradients = plain()
            places = [i for i, is_fixed in enumerate(fixed) if is_fixed]
            found = self._derive(ys, [xs[i] for i in places], grad_ys, compute, after)
            for i, gradient in zip(places, found, strict=True):
                gradients[i] = gradient
            return gradients

    def _derive(self, ys, xs, grad_ys, compute: Callable, after: list) -> list:
        """Returns the gradients of the whole batch, read after `after` has run."""
        view = self._view(_tensors(ys, grad_ys))
        self.early.take_losses(view, _tensors(ys, grad_ys))
        border = self.early.border(view, _tensors(ys, grad_ys))
        rows = [each for each in border.frontier if _is_trainable(each)]
        rows = [each for each in rows if not hasattr(each.op, PASSES_ON)]
        behind = put_behind(rows, border.operations)
        ys = [behind.get(y.name, y) for y in ys]
        tops = _tensors(ys, grad_ys)
        view = View(self._batch, tops)
        whole = self.early.take_losses(view, tops)
        border = self.early.border(view, tops)
        frontier = [each for each in border.frontier if _is_trainable(each)] + whole
        before = set(self._graph.get_operations())
        derived = compute(ys, [*frontier, *xs], grad_ys, frontier)
        of_rows, direct = derived[: len(frontier)], derived[len(frontier) :]
        pairs = [
            (tensor, tf.convert_to_tensor(gradient))
            for tensor, gradient in zip(frontier, of_rows, strict=True)
            if gradient is not None
        ]
        rows = [tensor for tensor, _ in pairs]
        wanted = [gradient for _, gradient in pairs]
        flat = tf.nest.flatten(direct, expand_composites=True)
        wanted += [each for each in flat if each is not None]
        if border.draws():  # once: what is reported of the loss draws the same numbers
            wanted += [tensor for tensor in rows if not _is_loss_of_all(tensor)]
        made = frozenset(self._graph.get_operations()) - before
        # All at once: loops of TensorFlow 1 hand values from one to the other.
        copies = iter(self.early.make(view, wanted, made))
        arriving = self._arriving(view, rows, [next(copies) for _ in rows])
        flat = [each if each is None else next(copies) for each in flat]
        direct = tf.nest.pack_sequence_as(direct, flat, expand_composites=True)
        gradients = [None] * len(xs)
        if rows:
            gradients = compute(rows, xs, arriving, [])
            known = [g for g in gradients if g is not None]
            _check_own_gradients(self._batch, view, rows, arriving, known)
            is_simple = not whole
            self.derived.append(Derived(view, rows, arriving, known, is_simple))
        return self._sum(xs, gradients, direct, after)

    def _view(self, tops: list[tf.Tensor]) -> View:
        """Returns what is known of the graph.

        A loop that runs up to the longest example of the batch must do so in every
        micro-batch: such numbers are computed from the whole batch there.
        """
        view = View(self._batch, tops)
        bounds = [
            (operation, i)
            for operation, i in view.analysis.bounds
            if view.is_pure(operation.inputs[i])
        ]
        if not bounds:
            return view
        for operation, i in bounds:
            (whole,) = self.early.make(view, [operation.inputs[i]])
            set_input(operation, i, whole)
        return View(self._batch, tops)

    def _arriving(self, view: View, rows: list, gradients: list) -> list[tf.Tensor]:
        """Returns the micro-batch's rows of what arrives at the rows of the batch.

        Args:
            view: The graph.
            rows: Tensors with rows, or results of whole_batch_loss.
            gradients: Their gradients, of the whole batch.
        """
        axes = [
            None if _is_loss_of_all(tensor) else view.state(tensor).axis
            for tensor in rows
        ]
        first = self._batch.first_pass()
        arriving = keep_rows(self._batch, first, "arriving", gradients, axes)
        for i, tensor in enumerate(rows):
            if axes[i] is None:
                arriving[i] = getattr(tensor.op, WHOLE_BATCH_LOSS).part(arriving[i])
            else:
                arriving[i].set_shape(tensor.shape)
        return arriving

    def _sum(self, xs: list, gradients: list, direct: list, after: list) -> list:
        """Returns the sums over micro-batches, with what the head derives itself."""
        direct = self._kept(direct)
        gradients = [None if g is None else _wide(g) for g in gradients]
        places = [i for i, gradient in enumerate(gradients) if gradient is not None]
        sums = self._add([xs[i] for i in places], [gradients[i] for i in places], after)
        found = [None] * len(xs)
        for i, total in zip(places, sums, strict=True):
            found[i] = total
        with tf.control_dependencies(after):
            for i, gradient in enumerate(direct):
                if gradient is not None:
                    found[i] = _added(found[i], self._read(xs[i], gradient))
        return [
            total if total is None else cast(total, _dtype_of(x, total))
            for total, x in zip(found, xs, strict=True)
        ]

    def _kept(self, direct: list) -> list:
        """Stores gradients of variables that the head reads; returns them, for later."""
        parts = tf.nest.flatten(direct, expand_composites=True)
        known = [each for each in parts if each is not None]
        if not known:
            return direct
        kept = keep(self._batch, self._batch.first_pass(), "direct", known)
        # With the micro-batch that is the whole batch.
        self._batch.register(each=[tf.group(*kept)])
        kept = iter(kept)
        parts = [each if each is None else next(kept) for each in parts]
        return tf.nest.pack_sequence_as(direct, parts, expand_composites=True)

    def _read(self, x, gradient: Gradient) -> Gradient:
        """Returns `gradient`, read for the update of `x`."""
        parts = tf.nest.flatten(gradient, expand_composites=True)
        parts = [tf.identity(part) for part in parts]
        self.sums |= {part.op: _source(x).name for part in parts}
        return tf.nest.pack_sequence_as(gradient, parts, expand_composites=True)

    def finish(self) -> None:
        """Adds the sparse gradients, when all that uses them is in the graph."""
        for sparse in self._sparse:
            norms = _norms(sparse.total)
            if norms is None:
                self._keep_slices(sparse)
                continue
            self._add_rows(sparse)
            if norms:
                self._replace_norms(sparse, norms)

    def _is_in_branch(self) -> bool:
        graph = tf.compat.v1.get_default_graph()
        return graph is not self._graph or bool(context_of(graph))

    def _check_outside(self, ys: list[tf.Tensor]) -> None:
        for y in ys:
            if y.graph is not self._graph or context_of(y.op):
                raise ValueError(
                    "A loss that is made inside of tf.cond, tf.while_loop or a function "
                    "must not have its gradients with respect to variables computed "
                    f"there: they are summed over micro-batches. Received: {y.name}. "
                    "Make the loss outside, or train without micro-batches."
                )

    def _check_first_order(self, ys: list[tf.Tensor]) -> None:
        needed = data_ancestors([y.op for y in ys])
        read = next(filter(needed.__contains__, self.sums), None)
        if read is not None:
            raise ValueError(
                "Gradients must not be computed of what is computed from gradients with "
                "respect to variables: a micro-batch has only its part of them. "
                f"Received: {ys[0].name}, which needs the gradient of "
                f"{self.sums[read]}. Train without micro-batches."
            )

    def _check_not_repeated(self, ys: list[tf.Tensor]) -> None:
        for operation in data_ancestors([y.op for y in ys]):
            if counts_vectorized(operation):
                raise ValueError(
                    "Gradients with respect to variables must be those of a loss, not "
                    "of one number after another, as in `GradientTape.jacobian` and "
                    f"`tf.vectorized_map`. Received: {ys[0].name}, which needs "
                    f"{operation.name}. Train without micro-batches."
                )

    def _check_shapes(self) -> None:
        for part in self._batch.parts:
            shape = part.sliced.shape
            if part.has_rows and shape.rank and shape.as_list()[0] is not None:
                raise ValueError(
                    "A batch that is cut must have no static number of examples. "
                    f"Received: {part.sliced.name} of shape {shape}. Call "
                    "`Tensor.set_shape` with None as the number of examples."
                )

    def _dependencies(self, of_it: set[tf.Operation]) -> list[tf.Operation]:
        """Returns the caller's control dependencies that are not of a micro-batch."""
        needed = current_control_dependencies(self._graph)
        operations = [getattr(each, "op", each) for each in needed]
        self.waited_for += [each for each in operations if each in of_it]
        return [each for each in operations if each not in of_it]

    def _add(self, xs: list, gradients: list[Gradient], after: list) -> list[Gradient]:
        """Returns the sums of the weighted `gradients`, read after `after` has run."""
        accumulators = self._create_accumulators(xs, gradients)
        pairs = list(zip(accumulators, gradients, strict=True))
        dense = [pair for pair in pairs if pair[0].touched is None]
        if dense:
            self._commit(*map(list, zip(*dense, strict=True)))
        sums = []
        with tf.control_dependencies(None), tf.control_dependencies(after):
            for x, (accumulator, gradient) in zip(xs, pairs, strict=True):
                if accumulator.touched is None:
                    total = read(accumulator.total)
                    self.sums[total.op] = _source(x).name
                else:
                    total, clear = _read_rows(accumulator, gradient.indices.dtype)
                    sparse = _Sparse(accumulator, gradient, total, clear)
                    self._sparse.append(sparse)
                    self.sums |= {
                        each.op: _source(x).name
                        for each in (total.values, total.indices)
                    }
                sums.append(total)
        return sums

    def _create_accumulators(self, xs: list, gradients: list) -> list[Accumulator]:
        check_own_job([x for x in xs if isinstance(x, tf.Variable)])
        wanted = []
        for x, gradient in zip(xs, gradients, strict=True):
            shape = x.shape if x.dtype != tf.resource else gradient.shape
            if not shape.is_fully_defined():
                raise ValueError(
                    "What gradients are computed of, apart from a micro-batch, must have "
                    f"a static shape. Received: {_source(x).name} of shape {shape}. Make "
                    "it with its shape."
                )
            dtype = tf.float32 if gradient.dtype in _HALVES else gradient.dtype
            is_sparse = isinstance(gradient, tf.IndexedSlices)
            # A variable's `op` has the same name in every replica.
            wanted.append((f"{x.op.name}/batch_gradient", shape, dtype, is_sparse))

        def create(strategy):
            del strategy
            # They are not saved: checkpoints are written between batches.
            return [create_accumulator(*each, collections=[]) for each in wanted]

        return tf.distribute.get_replica_context().merge_call(create)

    def _commit(self, accumulators: list, gradients: list[Gradient]) -> None:
        batch = self._batch
        sums = add_up(accumulators, gradients, batch.is_first)
        each = commit(accumulators, sums, batch.is_first)
        with tf.control_dependencies(None):
            batch.register_sums(each, accumulators)

    def _add_rows(self, sparse: _Sparse) -> None:
        gradient = cast(sparse.gradient, sparse.accumulator.total.dtype)
        self._commit([sparse.accumulator], [gradient])
        self.clear += sparse.clear
        self._batch.register(roll_back=sparse.clear)

    def _replace_norms(self, sparse: _Sparse, norms: list[tf.Operation]) -> None:
        """Replaces L2Loss of the sum by the sum of L2Loss of the slices."""
        values = cast(sparse.gradient, sparse.total.values.dtype).values
        half = self._batch.slot("half_squared_slices", values.dtype)
        with tf.control_dependencies(None):
            zero = tf.zeros([], values.dtype)
            total = half.read()
        self._register(half, zero)
        before = tf.where(self._batch.is_first, zero, half.read())
        add = half.write(before + tf.nn.l2_loss(values))
        self._batch.register(each=[add])
        for norm in norms:
            replace(norm.outputs[0], total)

    def _keep_slices(self, sparse: _Sparse) -> None:
        """Makes the sum what it is for the whole batch: the slices of all examples."""
        gradient = cast(sparse.gradient, sparse.total.values.dtype)
        written = []
        total = sparse.total
        pairs = [(total.values, gradient.values), (total.indices, gradient.indices)]
        for total, part in pairs:
            part = tf.cast(part, total.dtype)
            slot = self._batch.slot("slices", total.dtype, total.shape)
            with tf.control_dependencies(None):
                self._register(slot, tf.zeros([0, *total.shape[1:]], total.dtype))
                set_input(total.op, 0, slot.read())
            before = slot.read()
            kept = tf.where(self._batch.is_first, 0, tf.shape(before)[0])
            written.append(slot.write(tf.concat([before[:kept], part], 0)))
        self._batch.register(each=written)

    def _register(self, slot: Slot, zero: tf.Tensor) -> None:
        with tf.control_dependencies(None):
            self._batch.register(
                initialize=[slot.write(zero)],
                empty=[slot.write(zero)],
            )


def _read_rows(
    accumulator: Accumulator, dtype: tf.DType
) -> tuple[tf.IndexedSlices, list[tf.Operation]]:
    """Returns the sum over the touched rows, and the operations that clear them.

    Args:
        accumulator: The accumulator of a sparse gradient.
        dtype: Dtype of the rows' numbers.
    """
    rows = touched_rows(read(accumulator.touched))
    values = tf.raw_ops.ResourceGather(
        resource=accumulator.total.handle, indices=rows, dtype=accumulator.total.dtype
    )
    shape = tf.constant(accumulator.total.shape.as_list(), dtype)
    # What they read may be replaced in `finish`.
    total = tf.identity(values), tf.identity(tf.cast(rows, dtype))
    return tf.IndexedSlices(*total, shape), clear_rows(accumulator, rows, values)


def _check_own_gradients(batch, view, rows: list, arriving: list, gradients) -> None:
    """Raises ValueError if a tf.custom_gradient combines the examples.

    The gradient of what has rows is sums of rows, unless somebody wrote another one.
    """
    needed = data_ancestors([tensor.op for tensor in rows])
    own = operations_with_own_gradients(needed)
    parts = tf.nest.flatten(gradients, expand_composites=True)
    if not own or not parts:
        return
    scopes = [gradient_scope_of(operation) for operation in own]
    states = {a.ref(): view.state(r) for r, a in zip(rows, arriving, strict=True)}
    analysis = View(batch, parts, states).analysis
    for operation in own:
        if is_in_while_loop(operation):
            raise ValueError(
                "A tf.custom_gradient in a loop of TensorFlow 1 hides whether it combines "
                f"examples. Received: {operation.name}. Write the layer without one, "
                "enable control flow v2, or train without micro-batches."
            )
    for operation, inner in analysis.combining:
        if any(scope in f"/{operation.name}" for scope in scopes):
            raise ValueError(
                "A tf.custom_gradient must be computed for each example by itself. "
                f"Received: {operation.name} of type {inner.type}, which combines "
                "examples. Train without micro-batches."
            )


def _source(x) -> tf.Operation:
    """Returns the operation of a tensor, or of a variable's handle."""
    handle = getattr(x, "handle", None)
    return x.op if handle is None else handle.op


def _wide(gradient: Gradient) -> Gradient:
    return cast(gradient, tf.float32) if gradient.dtype in _HALVES else gradient


def _tensors(ys: list, grad_ys: list | None) -> list[tf.Tensor]:
    """Returns all that gradients are computed from."""
    given = [each for each in grad_ys or [] if each is not None]
    return tf.nest.flatten([*ys, *given], expand_composites=True)


def _dtype_of(x, total: Gradient) -> tf.DType:
    """Returns the dtype of the gradient of `x`, a tensor, variable or its handle."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or dtype == tf.resource:
        return dtype_of_handle(x) or total.dtype
    return tf.as_dtype(dtype).base_dtype


def _added(one: Gradient | None, other: Gradient) -> Gradient:
    """Returns the sum as tf.gradients has it: of slices only, if both are sparse."""
    if one is None:
        return other
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        indices = tf.concat([one.indices, tf.cast(other.indices, one.indices.dtype)], 0)
        values = tf.concat([one.values, tf.cast(other.values, one.values.dtype)], 0)
        return tf.IndexedSlices(values, indices, one.dense_shape)
    one, other = tf.convert_to_tensor(one), tf.convert_to_tensor(other)
    return one + tf.cast(other, one.dtype)


def _is_trainable(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _is_loss_of_all(tensor: tf.Tensor) -> bool:
    """Returns whether `tensor` is the result of whole_batch_loss."""
    return hasattr(tensor.op, WHOLE_BATCH_LOSS) and tensor is tensor.op.outputs[0]


@tf.autograph.experimental.do_not_convert  # see make_accumulating_train_op
def _norms(total: tf.IndexedSlices) -> list[tf.Operation] | None:
    """Returns the L2Loss operations of a sum's values; None if it has other users.

    Users that add up the slices of each row do not count.
    """
    norms, adding, waiting = [], set(), [total.values]
    while waiting:
        tensor = waiting.pop()
        for user in tensor.consumers():
            if user.type == "L2Loss" and tensor.name == total.values.name:
                norms.append(user)
            elif user.type in _PASSING or _is_scaled(user, tensor):
                waiting += user.outputs
            elif _reads(user, tensor, 0):
                adding.add(user)
            else:
                return None
    adding_by_row, rows, waiting = set(), [], [total.indices]
    while waiting:
        tensor = waiting.pop()
        for user in tensor.consumers():
            if user.type in _PASSING:
                waiting += user.outputs
            elif user.type == "Unique" and tensor.op.type != "Unique":
                rows.append(user.outputs[0])
                waiting.append(user.outputs[1])
            elif _reads(user, tensor, 1):
                adding_by_row.add(user)
                rows += user.outputs if tensor.op.type == "Unique" else []
            else:
                return None
    return norms if adding == adding_by_row and _are_in_any_order(rows) else None


def _reads(user: tf.Operation, tensor: tf.Tensor, place: int) -> bool:
    """Returns whether `user` adds up slices, and reads `tensor` as these, or as rows."""
    if user.type not in _SUMMING:
        return False
    places = [i for i, read in enumerate(user.inputs) if read.name == tensor.name]
    return places == [_SUMMING[user.type][place]]


def _are_in_any_order(rows: list[tf.Tensor]) -> bool:
    """Returns whether all that is computed from rows is the same in another order.

    Args:
        rows: Numbers of rows, each once, and their values.
    """
    users = data_descendants(rows, lambda user: not _UPDATING.match(user.type))
    states = {}
    while True:
        analysis = Analysis(rows, states=states)
        analysis.analyze([output for user in users for output in user.outputs])
        mixing = {origin.operation for origin in analysis.origins}
        sums = {each for each in mixing if each.type in _IN_ANY_ORDER}
        if not sums:
            return not mixing
        states |= {output.ref(): FIXED for each in sums for output in each.outputs}


def _is_scaled(user: tf.Operation, tensor: tf.Tensor) -> bool:
    """Returns whether `user` multiplies `tensor` by a scalar."""
    if user.type not in _SCALING or user.inputs[0].name != tensor.name:
        others = list(user.inputs)[:1] if user.type == "Mul" else []
    else:
        others = list(user.inputs)[1:]
    return bool(others) and others[0].shape.rank == 0
