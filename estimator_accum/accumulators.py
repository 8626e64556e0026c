"""What is accumulated: running gradient sums, dense and sparse.

    first micro-step of a window:   accumulator  = w * g
    every later micro-step:         accumulator += w * g

so a dense accumulator is never zeroed: after an update it holds the old window's sum
until the next window's first micro-step overwrites it. A sparse one is scattered into,
and only the rows that the window touched are read and cleared at the boundary.

Accumulators are ON_READ variables: under a `tf.distribute` strategy every replica adds
to its own copy and nothing crosses the network until the boundary.
"""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum.window import root_variable_scope

Gradient = tf.Tensor | tf.IndexedSlices


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


def create_accumulator(name: str, shape, dtype: tf.DType, is_sparse: bool):
    """Creates `<name>` and, for sparse gradients, `<name>_rows`, all zeros."""
    total = _create(name, shape, dtype)
    touched = _create(f"{name}_rows", shape[:1], tf.float32) if is_sparse else None
    return Accumulator(total, touched)


def _create(name: str, shape, dtype: tf.DType) -> tf.Variable:
    with root_variable_scope():
        return tf.compat.v1.get_variable(
            name,
            shape=shape,
            dtype=dtype,
            initializer=tf.compat.v1.zeros_initializer(),
            trainable=False,
            use_resource=True,  # reads and writes must be orderable
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )


def accumulate(
    accumulators: list[Accumulator], gradients: list[Gradient], is_first: tf.Tensor
) -> list[tf.Operation]:
    """Adds one micro-batch's weighted gradients to this replica's accumulators.

    Args:
        accumulators: One for each gradient.
        gradients: Of this replica's micro-batch, already weighted.
        is_first: Scalar bool, whether this is the window's first micro-step.

    Returns:
        The operations after which the sums contain the gradients.
    """
    dense, scattered = [], []
    for accumulator, gradient in zip(accumulators, gradients, strict=True):
        if accumulator.touched is None:
            value = tf.cast(gradient, accumulator.total.dtype)
            dense.append((accumulator.total.handle, value))
        else:
            scattered.extend(_scatter(accumulator, gradient))

    def write(raw_op) -> tf.Tensor:
        with tf.control_dependencies([raw_op(resource=h, value=v) for h, v in dense]):
            return tf.constant(True)

    written = tf.cond(
        is_first,
        lambda: write(tf.raw_ops.AssignVariableOp),
        lambda: write(tf.raw_ops.AssignAddVariableOp),
    )
    return [written.op, *scattered]


def _scatter(accumulator: Accumulator, gradient: tf.IndexedSlices):
    values = tf.cast(gradient.values, accumulator.total.dtype)
    # `.handle` is this replica's copy; ON_READ variables refuse scatter_add().
    return (
        tf.raw_ops.ResourceScatterAdd(
            resource=accumulator.total.handle, indices=gradient.indices, updates=values
        ),
        tf.raw_ops.ResourceScatterUpdate(
            resource=accumulator.touched.handle, indices=gradient.indices, updates=1.0
        ),
    )


def take_window(
    accumulators: list[Accumulator],
) -> tuple[list[Gradient], list[tf.Operation]]:
    """Reads the window's sums over all replicas, in replica context, at a boundary.

    This is the window's one reduction. A sparse sum comes back as `IndexedSlices` over
    the rows that any replica touched, each row once. One replica alone reads those
    rows and no others; several reduce the whole table, because a collective's shape
    must be the same at every run.

    Returns:
        The sums, and the operations that clear the sparse accumulators.
    """
    is_alone = tf.distribute.get_replica_context().num_replicas_in_sync == 1
    local = []
    for accumulator in accumulators:
        if accumulator.touched is None or not is_alone:
            local.append(_read(accumulator.total))
        if accumulator.touched is not None:
            local.append(_read(accumulator.touched))
    reduced = iter(sum_over_replicas(local))
    sums, cleared = [], []
    for accumulator in accumulators:
        total = accumulator.total
        if accumulator.touched is None:
            sums.append(next(reduced))
            continue
        table = None if is_alone else next(reduced)
        rows = tf.where(next(reduced) > 0)[:, 0]
        if is_alone:
            values = tf.raw_ops.ResourceGather(
                resource=total.handle, indices=rows, dtype=total.dtype
            )
        else:
            values = tf.gather(table, rows)
        shape = tf.constant(total.shape.as_list(), tf.int64)
        sums.append(tf.IndexedSlices(values, rows, shape))
        cleared.extend(_clear_rows(accumulator, rows, values))
    return sums, cleared


def _read(variable: tf.Variable) -> tf.Tensor:
    """Reads this replica's copy."""
    value = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
    value.set_shape(variable.shape)
    return value


def _clear_rows(accumulator: Accumulator, rows: tf.Tensor, values: tf.Tensor):
    with tf.control_dependencies([values]):
        return [
            tf.raw_ops.ResourceScatterUpdate(
                resource=accumulator.total.handle,
                indices=rows,
                updates=tf.zeros_like(values),
            ),
            tf.raw_ops.ResourceScatterUpdate(
                resource=accumulator.touched.handle, indices=rows, updates=0.0
            ),
        ]


def sum_over_replicas(tensors: list[Gradient]) -> list[Gradient]:
    """Sums each tensor over all replicas; call in replica context."""
    context = tf.distribute.get_replica_context()
    if not tensors or context.num_replicas_in_sync == 1:
        return tensors
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tensors)
