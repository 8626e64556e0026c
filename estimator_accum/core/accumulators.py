"""Accumulators: the running sums of a window's gradients.

    first micro-step of a window:   accumulator = 0 + w * g
    every later micro-step:         accumulator = accumulator + w * g

A dense accumulator is not zeroed at the boundary: it holds the old window's sum until the
first micro-step of the next one. Each new sum is computed as soon as its gradient is,
while that is still in a cache. It becomes the accumulator, without a copy, only after
all sums are computed and checked: a micro-step that fails has added nothing. A sparse
gradient is scattered into its accumulator, and only the rows that the window touched
are read and cleared at the boundary (several replicas read the table); on a CPU a large
one takes memory only for rows that some micro-batch touched, until a restore writes all
of them.

Accumulators are ON_READ variables: under a `tf.distribute` strategy every replica adds
to its own copy and nothing crosses the network until the boundary.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.gradients import Gradient, cast
from estimator_accum.core.reduction import sum_over_replicas
from estimator_accum.core.slice_list import SliceList, append, clear, take
from estimator_accum.graph.branches import either, is_in_function, run_either
from estimator_accum.graph.variables import create_variable, read, zeros


class Accumulator(NamedTuple):
    """The running sum of one variable's weighted gradients.

    Attributes:
        total: The sum, of the variable's shape.
        touched: float32 [rows], 1 where the open window touched the row of a sparse
            gradient's variable; None for dense gradients. A float, because a restore
            splits ON_READ sums over replicas and an integer 1 would round to 0.
    """

    total: tf.Variable
    touched: tf.Variable | None

    @property
    def shape(self) -> tf.TensorShape:
        """Static shape of the trained variable."""
        return self.total.shape


def create_accumulator(
    name: str, shape, dtype: tf.DType, is_sparse: bool = False, **options
) -> Accumulator:
    """Creates `<name>` and, for sparse gradients, `<name>_rows`, all zeros.

    Args:
        name: Its name from the graph's root.
        shape: The trained variable's static shape.
        dtype: Dtype of the sum.
        is_sparse: Whether gradients are `IndexedSlices`.
        **options: Further arguments of tf.compat.v1.Variable.
    """

    def create(name, shape, dtype, has_idle_rows=False):
        return create_variable(
            name,
            shape,
            dtype,
            has_idle_rows,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
            **options,
        )

    total = create(name, shape, dtype, has_idle_rows=is_sparse)
    return Accumulator(
        total, create(f"{name}_rows", shape[:1], tf.float32) if is_sparse else None
    )


def variables_of(accumulators: list[Accumulator]) -> list[tf.Variable]:
    """Returns all variables of the accumulators."""
    return [v for a in accumulators for v in (a.total, a.touched) if v is not None]


def add_up(
    accumulators: list[Accumulator], gradients: list[Gradient], is_first: tf.Tensor
) -> list[Gradient]:
    """Returns this replica's new sums, for `commit`.

    Args:
        accumulators: One for each gradient.
        gradients: Weighted gradients of this replica's micro-batch.
        is_first: Scalar bool, whether this is the window's first micro-step.

    Returns:
        For each dense gradient the new sum, for each sparse one the gradient itself. A
        value is not finite if its gradient is not.
    """
    dense = [a.total for a in _dense(accumulators)]

    def nothing():
        if is_in_function():  # XLA requires the same shapes of both branches
            return [tf.zeros(total.shape, total.dtype) for total in dense]
        zero = {dtype: tf.zeros([], dtype) for dtype in {t.dtype for t in dense}}
        return [zero[total.dtype] for total in dense]

    # No gradient is an input of a branch, which would wait until all are computed.
    before = iter(either(is_first, nothing, lambda: [read(total) for total in dense]))
    sums = []
    for accumulator, gradient in zip(accumulators, gradients, strict=True):
        total = accumulator.total
        value = cast(gradient, total.dtype)
        if accumulator.touched is None:
            # The sum reuses the gradient's buffer, if no other operation needs it.
            value = tf.raw_ops.AddV2(x=next(before), y=value)
            value.set_shape(total.shape)
        sums.append(value)
    return sums


def commit(
    accumulators: list[Accumulator],
    sums: list[Gradient],
    is_first: tf.Tensor,
    is_good: tf.Tensor | None = None,
) -> list[tf.Operation]:
    """Writes the sums from `add_up` to the accumulators.

    Args:
        accumulators: As for `add_up`.
        sums: The values that `add_up` returned.
        is_first: As for `add_up`.
        is_good: Scalar bool, whether the micro-batch counts; None means True. A skipped
            first micro-batch still resets the sums, because other replicas' may count.

    Returns:
        The operations that write.
    """

    def write():
        pairs = zip(accumulators, sums, strict=True)
        return [op for accumulator, value in pairs for op in _write(accumulator, value)]

    def begin():
        return [run_either(is_first, lambda: assign_zeros(accumulators), list)]

    return write() if is_good is None else [run_either(is_good, write, begin)]


def _write(accumulator: Accumulator, value: Gradient) -> list[tf.Operation]:
    if isinstance(accumulator, SliceList):
        return append(accumulator, value)
    # `.handle` is this replica's copy.
    handle = accumulator.total.handle
    if accumulator.touched is None:
        return [tf.raw_ops.AssignVariableOp(resource=handle, value=value)]
    # ON_READ variables refuse scatter_add().
    touched = tf.raw_ops.ResourceScatterUpdate(
        resource=accumulator.touched.handle, indices=value.indices, updates=1.0
    )
    # Rows are marked before they are added to: if the run fails in between, they are
    # still found and cleared.
    with tf.control_dependencies([touched]):
        added = tf.raw_ops.ResourceScatterAdd(
            resource=handle, indices=value.indices, updates=value.values
        )
    return [touched, added]


def take_window(
    accumulators: list[Accumulator], more: Sequence[tf.Tensor] = ()
) -> tuple[list[Gradient], Callable[[], list[tf.Operation]]]:
    """Reads the window's sums over all replicas, in replica context, at a boundary.

    This is the window's only reduction. A sparse sum is returned as `IndexedSlices` of
    the rows that any replica touched, each row once. A single replica reads only those
    rows; several replicas reduce the whole table, because a collective's shape must be
    the same at every run.

    Returns:
        The sums, and a function that makes the operations that clear the sparse
        accumulators.
    """
    is_alone = tf.distribute.get_replica_context().num_replicas_in_sync == 1
    local = []
    for accumulator in accumulators:
        if accumulator.touched is None:
            local.append(read(accumulator.total))
        elif not is_alone:
            local += [read(accumulator.total), read(accumulator.touched)]
    reduced = iter(sum_over_replicas([*local, *more]))
    sums, sparse = [], []
    for accumulator in accumulators:
        if accumulator.touched is None:
            sums.append(next(reduced))
            continue
        if is_alone:
            total = take_rows(accumulator)
        else:
            table, rows = next(reduced), touched_rows(next(reduced))
            shape = tf.constant(accumulator.shape.as_list(), tf.int64)
            total = tf.IndexedSlices(tf.gather(table, rows), rows, shape)
        sums.append(total)
        sparse.append((accumulator, total))

    def clear_sparse() -> list[tf.Operation]:
        return [
            op for accumulator, total in sparse for op in clear_rows(accumulator, total)
        ]

    return [*sums, *reduced], clear_sparse


def take_rows(
    accumulator: Accumulator | SliceList, dtype: tf.DType = tf.int64
) -> tf.IndexedSlices:
    """Returns this replica's sparse sum: the touched rows, each once.

    Args:
        accumulator: The accumulator of a sparse gradient.
        dtype: Dtype of the rows' numbers.
    """
    if isinstance(accumulator, SliceList):
        values, rows = take(accumulator)
    else:
        rows = touched_rows(read(accumulator.touched))
        values = tf.raw_ops.ResourceGather(
            resource=accumulator.total.handle,
            indices=rows,
            dtype=accumulator.total.dtype,
        )
    shape = tf.constant(accumulator.shape.as_list(), dtype)
    return tf.IndexedSlices(values, tf.cast(rows, dtype), shape)


def assign_zeros(accumulators: list[Accumulator]) -> list[tf.Operation]:
    """Sets this replica's dense sums to 0."""
    return [
        tf.raw_ops.AssignVariableOp(
            resource=total.handle, value=zeros(total.shape, total.dtype)
        )
        for total, _ in _dense(accumulators)
    ]


def _dense(accumulators: list) -> list[Accumulator]:
    return [a for a in accumulators if a.touched is None]


def release_sums(accumulators: list[Accumulator]) -> list[tf.Operation]:
    """Frees the memory of this replica's dense sums, until they are assigned again."""
    totals = [total for total, _ in _dense(accumulators)]
    if not tf.compat.v1.get_default_graph().building_function:
        return [tf.raw_ops.DestroyResourceOp(resource=t.handle) for t in totals]
    # A variable of eager execution lives as long as its handle.
    nothing = [tf.zeros([0], total.dtype) for total in totals]
    values = [tf.raw_ops.PlaceholderWithDefault(input=n, shape=None) for n in nothing]
    return [
        tf.raw_ops.AssignVariableOp(resource=total.handle, value=value)
        for total, value in zip(totals, values, strict=True)
    ]


def touched_rows(touched: tf.Tensor) -> tf.Tensor:
    """Returns the numbers of the rows that the open window touched."""
    return tf.where(touched > 0)[:, 0]


def clear_rows(
    accumulator: Accumulator | SliceList, total: tf.IndexedSlices
) -> list[tf.Operation]:
    """Clears a sparse sum after `total`, its touched rows, has been read."""
    with tf.control_dependencies([total.values]):
        if isinstance(accumulator, SliceList):
            return clear(accumulator)
        return [
            tf.raw_ops.ResourceScatterUpdate(
                resource=accumulator.total.handle,
                indices=total.indices,
                updates=tf.zeros_like(total.values),
            ),
            tf.raw_ops.ResourceScatterUpdate(
                resource=accumulator.touched.handle, indices=total.indices, updates=0.0
            ),
        ]
