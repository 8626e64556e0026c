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
    the rows that any replica touched, each row once; only those rows travel.

    Returns:
        The sums, and the operations that clear the sparse accumulators.
    """
    rows = _touched_rows(accumulators)
    local = []
    for accumulator, touched in zip(accumulators, rows, strict=True):
        total = accumulator.total
        if touched is None:
            value = tf.raw_ops.ReadVariableOp(resource=total.handle, dtype=total.dtype)
            value.set_shape(total.shape)
        else:
            value = tf.raw_ops.ResourceGather(
                resource=total.handle, indices=touched, dtype=total.dtype
            )
        local.append(value)
    cleared = []
    for accumulator, touched, value in zip(accumulators, rows, local, strict=True):
        if touched is not None:
            cleared.extend(_clear_rows(accumulator, touched, value))
    sums = [
        total
        if touched is None
        else tf.IndexedSlices(total, touched, tf.constant(accumulator.total.shape.as_list()))
        for accumulator, touched, total in zip(
            accumulators, rows, sum_over_replicas(local), strict=True
        )
    ]
    return sums, cleared


def _touched_rows(accumulators: list[Accumulator]) -> list[tf.Tensor | None]:
    masks = [
        tf.raw_ops.ReadVariableOp(resource=a.touched.handle, dtype=tf.float32)
        for a in accumulators
        if a.touched is not None
    ]
    masks = iter(sum_over_replicas(masks))
    return [
        None if a.touched is None else tf.where(next(masks) > 0)[:, 0]
        for a in accumulators
    ]


def _clear_rows(accumulator: Accumulator, rows: tf.Tensor, read: tf.Tensor):
    with tf.control_dependencies([read]):
        return [
            tf.raw_ops.ResourceScatterUpdate(
                resource=accumulator.total.handle,
                indices=rows,
                updates=tf.zeros_like(read),
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
