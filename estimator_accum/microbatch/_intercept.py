"""Gradients of a batch, for a model_fn that knows nothing of micro-batches.

    gradient that tf.gradients returns = sum_i w_i * g_i    over micro-batches i

with w_i = examples of i / examples of the batch, or 1 for a loss that sums. The g_i are
computed and added before the train op runs; what the model_fn gets are reads of the
sums. So all that it does with them (clipping, its optimizer, schedules, counters) runs
once per batch, with the whole batch's gradient.

A sparse gradient is the sum over the rows that the batch touched. Code that looks at
the slices of one row separately gets them: `tf.global_norm` their norm, which is summed
as well, anything else the slices themselves.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.eager import backprop
from tensorflow.python.ops import gradients_util

from estimator_accum._accumulators import (
    Accumulator,
    add,
    assign_zeros,
    clear_rows,
    commit,
    create_accumulator,
    touched_rows,
    variables_of,
)
from estimator_accum._checks import check_own_job, has_half_precision
from estimator_accum._gradients import Gradient, cast, scaled
from estimator_accum._graph import data_ancestors, read
from estimator_accum._kinds import are_gradients_own, own_gradients
from estimator_accum.microbatch._batch import WholeBatch
from estimator_accum.microbatch._loss import Losses, Reduction, computed_from
from estimator_accum.microbatch._staging import Slot

_HALVES = (tf.float16, tf.bfloat16)
# What computes the same from slices of one row and from their sum.
_SUMMING = {
    "ResourceScatterAdd",
    "ResourceScatterSub",
    "ScatterAdd",
    "ScatterSub",
    "Shape",
    "Size",
    "UnsortedSegmentSum",
}
_PASSING = {"Cast", "Identity", "Neg"}
_SCALING = {"Mul", "RealDiv"}

_local = threading.local()  # replicas build their graphs in threads of their own
_lock = threading.Lock()
_users = []


class _Sparse(NamedTuple):
    """A sparse gradient, whose way of accumulation depends on what uses its sum."""

    accumulator: Accumulator
    gradient: tf.IndexedSlices
    total: tf.IndexedSlices
    clear: list[tf.Operation]


class Interception:
    """The gradients that one replica's model_fn computes.

    Args:
        batch: The replica's batch; the operations of its micro-batches are added to it.
        reductions: The reductions of losses.

    Attributes:
        sums: Names of the variables by the operations that read their gradients' sums.
        losses: The tensors whose gradients were computed.
        clear: Operations that run after the sums are read.
    """

    def __init__(self, batch: WholeBatch, reductions: Losses):
        self._batch, self._reductions = batch, reductions
        self._graph = tf.compat.v1.get_default_graph()
        self._sparse = []
        self.sums, self.losses, self.clear = {}, [], []

    def gradients(self, ys: list, xs: list, grad_ys: list | None, compute: Callable):
        """Returns d ys / d xs of the whole batch where x is not of a micro-batch.

        Args:
            ys: Tensors.
            xs: Variables and tensors.
            grad_ys: Gradients of `ys`; None are ones.
            compute: Function of `grad_ys` that returns the micro-batch's gradients.

        Raises:
            ValueError: If they cannot be summed over micro-batches.
        """
        sources = [_source(x) for x in xs]
        with contextlib.ExitStack() as stack:
            if self._is_in_branch():
                outer = [op.graph is self._graph and not _context(op) for op in sources]
                if not any(outer):
                    return compute(grad_ys)
                self._check_outside(ys)
                stack.enter_context(tf.init_scope())
            of_batch = computed_from(self._batch)
            self._check_first_order(ys)
            fixed = [source not in of_batch for source in sources]
            if not any(y.op in of_batch for y in ys) or not any(fixed):
                return compute(grad_ys)
            self.losses += ys
            before, after = self._dependencies()
            if after:
                stack.enter_context(tf.control_dependencies(None))
                stack.enter_context(tf.control_dependencies(before))
            scale = None if self._is_sum(ys, of_batch) else self._batch.share()
            seeds, is_weighted = grad_ys, scale is None
            if scale is not None and all(fixed) and not _has_half_precision(ys):
                seeds, is_weighted = _seeds(ys, grad_ys, scale), True
            gradients = compute(seeds)
            places = [
                i
                for i, gradient in enumerate(gradients)
                if gradient is not None and fixed[i]
            ]
            found = [gradients[i] for i in places]
            if not is_weighted:
                found = [scaled(_wide(gradient), scale) for gradient in found]
            sums = self._add([xs[i] for i in places], found, after)
            for i, total in zip(places, sums, strict=True):
                gradients[i] = cast(total, gradients[i].dtype)
            return gradients

    def finish(self) -> None:
        """Adds the sparse gradients, when all that uses them is in the graph."""
        for sparse in self._sparse:
            norms = _norms(sparse.total.values)
            if norms is None:
                self._keep_slices(sparse)
                continue
            self._add_rows(sparse)
            if norms:
                self._replace_norms(sparse, norms)

    def _is_in_branch(self) -> bool:
        graph = tf.compat.v1.get_default_graph()
        return graph is not self._graph or bool(graph._get_control_flow_context())

    def _check_outside(self, ys: list[tf.Tensor]) -> None:
        for y in ys:
            if y.graph is not self._graph or _context(y.op):
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

    def _dependencies(self) -> tuple[list, list]:
        """Returns the caller's control dependencies of a micro-batch, and the others."""
        of_batch = computed_from(self._batch, self.losses)
        needed = self._graph._current_control_dependencies()
        operations = [getattr(each, "op", each) for each in needed]
        before = [each for each in operations if each in of_batch]
        return before, [each for each in operations if each not in of_batch]

    def _is_sum(self, ys: list[tf.Tensor], of_batch: set[tf.Operation]) -> bool:
        """Returns whether gradients of all examples add up."""
        are_sums = set()
        for y in ys:
            if y.shape.rank == 0:
                if y.op in of_batch:
                    reduction = self._reductions.of(y, of_batch)
                    _check_known(reduction)
                    are_sums.add(reduction.is_sum)
            else:  # the gradient of a vector is that of the sum of its elements
                are_sums.add(y.shape.rank is None or y.shape[0] is None)
        if len(are_sums) > 1:
            raise ValueError(
                "Losses whose gradients are computed together must all be means over "
                f"examples, or all sums. Received: {', '.join(y.name for y in ys)}. "
                "Train without micro-batches."
            )
        return are_sums.pop()

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
            wanted.append((f"{_name(x)}/batch_gradient", shape, dtype, is_sparse))

        def create(strategy):
            del strategy
            # They are not saved: checkpoints are written between batches.
            return [create_accumulator(*each, collections=[]) for each in wanted]

        return tf.distribute.get_replica_context().merge_call(create)

    def _commit(self, accumulators: list, gradients: list[Gradient]) -> None:
        batch = self._batch
        sums = add(accumulators, gradients, batch.is_first)
        batch.micro_ops += commit(accumulators, sums, batch.is_first)
        with tf.control_dependencies(None):
            for variable in variables_of(accumulators):
                batch.initialize_ops.append(variable.initializer)
                batch.handles.append(variable.handle)
            batch.empty_ops += assign_zeros(accumulators)

    def _add_rows(self, sparse: _Sparse) -> None:
        gradient = cast(sparse.gradient, sparse.accumulator.total.dtype)
        self._commit([sparse.accumulator], [gradient])
        self.clear += sparse.clear
        self._batch.discard_ops += sparse.clear

    def _replace_norms(self, sparse: _Sparse, norms: list[tf.Operation]) -> None:
        """Replaces L2Loss of the sum by the sum of L2Loss of the slices."""
        values = cast(sparse.gradient, sparse.total.values.dtype).values
        half = Slot("half_squared_slices", values.dtype, tf.TensorShape([]))
        with tf.control_dependencies(None):
            zero = tf.zeros([], values.dtype)
            total = half.read()
        self._register(half, zero)
        before = tf.where(self._batch.is_first, zero, half.read())
        self._batch.micro_ops.append(half.write(before + tf.nn.l2_loss(values)))
        for norm in norms:
            for consumer in norm.outputs[0].consumers():
                for i, tensor in enumerate(consumer.inputs):
                    if tensor.name == norm.outputs[0].name:
                        consumer._update_input(i, total)

    def _keep_slices(self, sparse: _Sparse) -> None:
        """Makes the sum what it is for the whole batch: the slices of all examples."""
        gradient = cast(sparse.gradient, sparse.total.values.dtype)
        written = []
        total = sparse.total
        pairs = [(total.values, gradient.values), (total.indices, gradient.indices)]
        for total, part in pairs:
            part = tf.cast(part, total.dtype)
            slot = Slot("slices", total.dtype, total.shape)
            with tf.control_dependencies(None):
                self._register(slot, tf.zeros([0, *total.shape[1:]], total.dtype))
                total.op._update_input(0, slot.read())
            before = slot.read()
            kept = tf.where(self._batch.is_first, 0, tf.shape(before)[0])
            written.append(slot.write(tf.concat([before[:kept], part], 0)))
        self._batch.micro_ops += written

    def _register(self, slot: Slot, zero: tf.Tensor) -> None:
        self._batch.handles.append(slot.handle)
        with tf.control_dependencies(None):
            self._batch.initialize_ops.append(slot.write(zero))
            self._batch.empty_ops.append(slot.write(zero))


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


@contextlib.contextmanager
def intercepting(interception: Interception) -> Iterator[None]:
    """Gives this thread's calls of tf.gradients and tf.GradientTape to it."""
    with _lock:
        if not _users:
            _patch()
        _users.append(interception)
    _local.interception = interception
    try:
        yield
    finally:
        _local.interception = None
        with _lock:
            _users.remove(interception)
            if not _users:
                _restore()


def _check_known(reduction: Reduction) -> None:
    operation = reduction.unknown
    if operation is not None:
        raise ValueError(
            "A loss must be a mean or a sum over examples, or a sum divided by such a "
            f"sum of features or labels. Received: {operation.name} of type "
            f"{operation.type}, which is not known to be one. Pass reduction='mean' "
            "(also a flag of the runner) if it is a mean of independent examples, else "
            "train without micro-batches."
        )


def _current() -> Interception | None:
    return None if are_gradients_own() else getattr(_local, "interception", None)


_OWN = {}  # TensorFlow's functions, by place


def _patch() -> None:
    _OWN["gradients"] = helper = gradients_util._GradientsHelper
    _OWN["tape"] = tape_gradient = backprop.GradientTape.gradient

    def gradients(ys, xs, grad_ys=None, *args, **kwargs):
        interception = _current()
        # A source graph is given by TensorFlow itself, inside of functions.
        is_inner = len(args) > 6 or kwargs.get("src_graph") is not None
        if interception is None or is_inner or tf.executing_eagerly():
            return helper(ys, xs, grad_ys, *args, **kwargs)
        ys, xs = _as_list(ys), _as_list(xs)
        if _are_composite([*ys, *xs]):  # it calls itself with their tensors
            return helper(ys, xs, grad_ys, *args, **kwargs)
        ys = [tf.convert_to_tensor(y) for y in ys]

        def compute(grad_ys):
            with own_gradients():
                return helper(ys, xs, grad_ys, *args, **kwargs)

        grad_ys = None if grad_ys is None else _as_list(grad_ys)
        return interception.gradients(ys, xs, grad_ys, compute)

    def gradient(
        tape, target, sources, output_gradients=None, unconnected_gradients="none"
    ):
        def own(target, output_gradients):
            return tape_gradient(
                tape, target, sources, output_gradients, unconnected_gradients
            )

        interception = _current()
        if interception is None or tf.executing_eagerly():
            return own(target, output_gradients)
        ys = [tf.convert_to_tensor(y) for y in tf.nest.flatten(target)]
        xs = tf.nest.flatten(sources)
        given = output_gradients and tf.nest.flatten(output_gradients)

        def compute(grad_ys):
            with own_gradients():
                return tf.nest.flatten(own(ys, grad_ys))

        found = interception.gradients(ys, xs, given, compute)
        return tf.nest.pack_sequence_as(sources, found)

    gradients_util._GradientsHelper = gradients
    backprop.GradientTape.gradient = gradient


def _restore() -> None:
    gradients_util._GradientsHelper = _OWN["gradients"]
    backprop.GradientTape.gradient = _OWN["tape"]


def _as_list(value) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


def _are_composite(values: list) -> bool:
    return any(
        isinstance(value, tf.__internal__.CompositeTensor)
        and not isinstance(value, tf.Variable)
        for value in values
    )


def _source(x) -> tf.Operation:
    """Returns the operation of a tensor, or of a variable's handle."""
    handle = getattr(x, "handle", None)
    return x.op if handle is None else handle.op


def _name(x) -> str:
    """Returns the name, which is the same in every replica for a variable."""
    return x.op.name


def _context(operation: tf.Operation):
    return operation._get_control_flow_context()


def _has_half_precision(ys: list[tf.Tensor]) -> bool:
    return any(has_half_precision(y, None) for y in ys)


def _wide(gradient: Gradient) -> Gradient:
    return cast(gradient, tf.float32) if gradient.dtype in _HALVES else gradient


def _seeds(ys: list[tf.Tensor], grad_ys: list | None, scale: tf.Tensor) -> list:
    """Returns `scale` times the gradients of `ys`."""
    seeds = []
    for y, given in zip(ys, grad_ys or [None] * len(ys), strict=True):
        if given is None:
            ones = tf.cast(scale, y.dtype)
            seeds.append(ones if y.shape.rank == 0 else tf.fill(tf.shape(y), ones))
        else:
            given = given if isinstance(given, tf.IndexedSlices) else tf.identity(given)
            seeds.append(scaled(given, scale))
    return seeds


def _norms(values: tf.Tensor) -> list[tf.Operation] | None:
    """Returns the L2Loss operations of `values`; None if they have other users.

    Users that add up the slices of each row do not count.
    """
    norms, waiting = [], [values]
    while waiting:
        tensor = waiting.pop()
        for user in tensor.consumers():
            if user.type == "L2Loss" and tensor.name == values.name:
                norms.append(user)
            elif user.type in _PASSING or _is_scaled(user, tensor):
                waiting += user.outputs
            elif user.type not in _SUMMING:
                return None
    return norms


def _is_scaled(user: tf.Operation, tensor: tf.Tensor) -> bool:
    """Returns whether `user` multiplies `tensor` by a scalar."""
    if user.type not in _SCALING or user.inputs[0].name != tensor.name:
        others = list(user.inputs)[:1] if user.type == "Mul" else []
    else:
        others = list(user.inputs)[1:]
    return bool(others) and others[0].shape.rank == 0
