"""Gradients and their sums: over replicas, norms, clipping, and accumulators.

A gradient is dense, or sparse with a value for each row that was looked up. Accumulators
are the running sums of a window's gradients:

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

import contextlib
import threading
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from estimator_accum._graph import (
    ancestors,
    create_variable,
    either,
    is_in_function,
    read,
    run_either,
    zeros,
)

Gradient = tf.Tensor | tf.IndexedSlices

_current = threading.local()  # replicas build their graphs in threads of their own


def sum_over_replicas(tensors: list[Gradient]) -> list[Gradient]:
    """Sums each tensor over all replicas; call it in replica context."""
    context = tf.distribute.get_replica_context()
    if not tensors or context.num_replicas_in_sync == 1:
        return tensors
    # all_reduce follows each tensor's gradient path back to variables, and does not
    # recognize other replicas' copies of them.
    tensors = [_map_values(tf.stop_gradient, tensor) for tensor in tensors]
    if are_cpus_of_one_process(context.strategy):
        return context.merge_call(_sum_on_one_device, args=(tensors,))
    dtypes = {tensor.dtype: None for tensor in tensors}  # a collective takes one
    for dtype in dtypes:
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        sums = context.all_reduce(
            tf.distribute.ReduceOp.SUM, [tensors[i] for i in places]
        )
        for i, value in zip(places, sums, strict=True):
            tensors[i] = value
    return tensors


def are_cpus_of_one_process(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether all replicas, at least two, train on CPUs of this process.

    TensorFlow's collectives, the default of a MirroredStrategy that was made eagerly,
    then wait forever in a Session with fewer CPU devices than replicas, and a Session
    has one CPU device by default.
    """
    devices = strategy.extended.worker_devices
    is_one_process = len(devices) == strategy.num_replicas_in_sync > 1
    return is_one_process and all("CPU" in device.upper() for device in devices)


def _sum_on_one_device(strategy, tensors: list[Gradient]) -> list[Gradient]:
    """Sums each tensor without a collective, in cross-replica context."""
    del strategy
    return tf.distribute.ReductionToOneDevice().batch_reduce(
        tf.distribute.ReduceOp.SUM, [(tensor, tensor) for tensor in tensors]
    )


def cast(gradient: Gradient, dtype: tf.DType) -> Gradient:
    """Returns the gradient in `dtype`."""
    return _map_values(lambda values: tf.cast(values, dtype), gradient)


def scaled(gradient: Gradient, factor: tf.Tensor) -> Gradient:
    """Returns factor * gradient, in the gradient's dtype."""
    return _map_values(lambda v: v * tf.cast(factor, v.dtype), gradient)


def values_of(gradient: Gradient) -> tf.Tensor:
    """Returns a dense gradient unchanged, and the values of a sparse one's rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _map_values(function, gradient: Gradient) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return function(gradient)


def half_squared_norms(
    gradients: list[Gradient], dtype: tf.DType, has_unique_rows: bool = False
) -> tf.Tensor:
    """Returns sum(g**2) / 2 of each gradient, in one pass.

    Args:
        gradients: Tensors or `IndexedSlices`.
        dtype: Dtype of the result.
        has_unique_rows: Whether no `IndexedSlices` names a row twice.

    Returns:
        `dtype` [gradients].
    """
    halves = []
    for value in gradients:
        if isinstance(value, tf.IndexedSlices):
            value = value.values if has_unique_rows else _sum_duplicates(value)
        if value.dtype in (tf.float16, tf.bfloat16):
            value = tf.cast(value, dtype)  # squares may overflow float16
        halves.append(tf.cast(tf.nn.l2_loss(value), dtype))
    return tf.stack(halves)


def global_norm(
    gradients: list[Gradient], halves: tf.Tensor, half_of_slices: tf.Tensor | None
) -> tf.Tensor:
    """Returns the norm of all gradients together, a scalar.

    Args:
        gradients: Tensors or `IndexedSlices`.
        halves: Their `half_squared_norms`.
        half_of_slices: Sum of `half_squared_norms` of the slices from which the sparse
            gradients were summed, to count in place of theirs; None counts theirs.
    """
    half = tf.reduce_sum(halves)
    if half_of_slices is not None:
        dense = [i for i, g in enumerate(gradients) if isinstance(g, tf.Tensor)]
        half = half_of_slices + tf.reduce_sum(tf.gather(halves, dense))
    return tf.sqrt(half * tf.constant(2.0, halves.dtype))


def scale_and_clip(sums, factor, clip_norm, norm):
    """Returns (clip(factor * sums), norm of factor * sums), in one pass.

    Args:
        sums: Tensors or `IndexedSlices`.
        factor: Scalar of the dtype of `norm`; None means exactly 1.
        clip_norm: Largest global norm; None does not clip.
        norm: Global norm of `sums`.
    """
    if factor is not None:
        norm = norm * factor
    scale = factor
    if clip_norm is not None:
        # Bit for bit as tf.clip_by_global_norm: 1 if the norm is within the limit, NaN
        # if it is not finite.
        one = tf.constant(1.0, norm.dtype)
        clip = clip_norm * tf.minimum(one / norm, one / clip_norm)
        clip += norm - norm
        scale = clip if factor is None else clip * factor
    if scale is None:
        return sums, norm
    return [scaled(value, scale) for value in sums], norm


def _sum_duplicates(slices: tf.IndexedSlices) -> tf.Tensor:
    """Returns one value per row: a row that is looked up twice has the sum of both."""
    unique, positions = tf.unique(slices.indices)
    return tf.math.unsorted_segment_sum(slices.values, positions, tf.size(unique))


def loss_divisor_of(gradients: list[Gradient]) -> int:
    """Returns the number by which `compute_gradients` divided the loss.

    In Estimator's model_fns TensorFlow divides by the number of replicas, so that sums
    over replicas are means, and the graph only records whether its last call did. These
    gradients may come from another call, or from `tf.gradients`, so the function looks
    for the factor 1 / replicas among their ancestors.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas == 1:
        return 1
    needed = ancestors([values_of(gradient).op for gradient in gradients])
    return replicas if any(_scales_a_loss(op, replicas) for op in needed) else 1


def _scales_a_loss(operation: tf.Operation, replicas: int) -> bool:
    if operation.type != "Const":
        return False
    (constant,) = operation.outputs
    if constant.shape.rank != 0 or not constant.dtype.is_floating:
        return False
    value = tf.get_static_value(constant)
    if value != value.dtype.type(1.0 / replicas):
        return False
    # TensorFlow's own function, by its place: others may have its name.
    code = tf.compat.v1.train.Optimizer._scale_loss.__code__
    lines = {line for *_, line in code.co_lines()}
    return any(
        frame.filename == code.co_filename and frame.lineno in lines
        for frame in operation.traceback or ()  # a copied operation has none
    )


@contextlib.contextmanager
def without_interception():
    """Lets `tf.gradients` alone that a model_fn's code does not call by itself.

    Inside, `microbatch_model_fn` takes gradients as TensorFlow computes them, for
    callers that sum them over the batch.
    """
    before = is_interception_off()
    _current.is_interception_off = True
    try:
        yield
    finally:
        _current.is_interception_off = before


def is_interception_off() -> bool:
    """Returns whether this thread is inside of `without_interception`."""
    return getattr(_current, "is_interception_off", False)


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
    return [v for accumulator in accumulators for v in accumulator if v is not None]


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
    dense = [a.total for a in accumulators if a.touched is None]

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
) -> tuple[list[Gradient], list[tf.Operation]]:
    """Reads the window's sums over all replicas, in replica context, at a boundary.

    This is the window's only reduction. A sparse sum is returned as `IndexedSlices` of
    the rows that any replica touched, each row once. A single replica reads only those
    rows; several replicas reduce the whole table, because a collective's shape must be
    the same at every run.

    Returns:
        The sums, and the operations that clear the sparse accumulators.
    """
    is_alone = tf.distribute.get_replica_context().num_replicas_in_sync == 1
    local = []
    for accumulator in accumulators:
        if accumulator.touched is None or not is_alone:
            local.append(read(accumulator.total))
        if accumulator.touched is not None:
            local.append(read(accumulator.touched))
    reduced = iter(sum_over_replicas([*local, *more]))
    sums, cleared = [], []
    for accumulator in accumulators:
        total = accumulator.total
        if accumulator.touched is None:
            sums.append(next(reduced))
            continue
        table = None if is_alone else next(reduced)
        rows = touched_rows(next(reduced))
        if is_alone:
            values = tf.raw_ops.ResourceGather(
                resource=total.handle, indices=rows, dtype=total.dtype
            )
        else:
            values = tf.gather(table, rows)
        shape = tf.constant(total.shape.as_list(), tf.int64)
        sums.append(tf.IndexedSlices(values, rows, shape))
        cleared.extend(clear_rows(accumulator, rows, values))
    return [*sums, *reduced], cleared


def assign_zeros(accumulators: list[Accumulator]) -> list[tf.Operation]:
    """Sets this replica's dense sums to 0."""
    return [
        tf.raw_ops.AssignVariableOp(
            resource=total.handle, value=zeros(total.shape, total.dtype)
        )
        for total, touched in accumulators
        if touched is None
    ]


def release_sums(accumulators: list[Accumulator]) -> list[tf.Operation]:
    """Frees the memory of this replica's dense sums, until they are assigned again."""
    return [
        tf.raw_ops.DestroyResourceOp(resource=total.handle)
        for total, touched in accumulators
        if touched is None
    ]


def touched_rows(touched: tf.Tensor) -> tf.Tensor:
    return tf.where(touched > 0)[:, 0]


def clear_rows(accumulator: Accumulator, rows: tf.Tensor, values: tf.Tensor):
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
