"""Sums of gradients over the micro-batches of a batch.

The model_fn gets reads of the sums, in the run of its train op.
"""

import itertools
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.accumulators import (
    Accumulator,
    add_up,
    clear_rows,
    commit,
    take_rows,
    variables_of,
)
from estimator_accum.core.gradients import Gradient, cast, dtype_of_sum
from estimator_accum.core.slice_list import SliceList
from estimator_accum.core.state import place_of_window
from estimator_accum.core.trained import device_here
from estimator_accum.graph.internals import dtype_of_handle
from estimator_accum.graph.outermost import in_graph, value_of_graph
from estimator_accum.graph.variables import read
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.collecting import keep
from estimator_accum.microbatch.own_optimizer.derivation import Derivation
from estimator_accum.microbatch.own_optimizer.patches import source_of
from estimator_accum.microbatch.own_optimizer.refusals import SUM_OF

_SUMS = "_estimator_accum_sums"  # attribute of a graph


class SliceSum(NamedTuple):
    """Sum of a sparse gradient; its users, which come later, decide its summands.

    Attributes:
        accumulator: Its accumulator.
        gradient: The micro-batch's gradient.
        total: The sum, as the model_fn reads it.
        clear: Operations that clear the accumulator.
    """

    accumulator: Accumulator | SliceList
    gradient: tf.IndexedSlices
    total: tf.IndexedSlices
    clear: list[tf.Operation]


class Sums(NamedTuple):
    """Gradients of the whole batch, to read when all its micro-batches have run.

    Attributes:
        totals: The gradient with respect to each x; None if there is none.
        reads: Operations that read the sums.
        slices: Sums of sparse gradients, to which nothing is added yet.
    """

    totals: list[Gradient | None]
    reads: list[tf.Operation]
    slices: list[SliceSum]


def sum_over_batch(
    batch: WholeBatch, xs: list, derivation: Derivation, after: list[tf.Operation]
) -> Sums:
    """Returns the sums over micro-batches, with the gradients of the head itself.

    Args:
        batch: The batch.
        xs: Variables and tensors.
        derivation: Their gradients.
        after: Operations after which the sums are read.
    """
    direct = _keep(batch, derivation.direct)
    gradients = [
        g if g is None else cast(g, dtype_of_sum(g.dtype)) for g in derivation.gradients
    ]
    totals, reads, slices = _add(batch, xs, gradients, after)
    with tf.control_dependencies(after):
        for i, gradient in enumerate(direct):
            if gradient is not None:
                parts = tf.nest.flatten(gradient, expand_composites=True)
                parts = [tf.identity(part) for part in parts]
                reads += _marked(parts, xs[i])
                copy = tf.nest.pack_sequence_as(gradient, parts, expand_composites=True)
                totals[i] = _added(totals[i], copy)
    totals = [
        total if total is None else cast(total, _dtype_of(x, total))
        for total, x in zip(totals, xs, strict=True)
    ]
    return Sums(totals, reads, slices)


def add_to_sums(
    batch: WholeBatch, accumulators: list[Accumulator], gradients: list[Gradient]
) -> None:
    """Adds each micro-batch's gradients to accumulators."""
    sums = add_up(accumulators, gradients, batch.is_first)
    commits = commit(accumulators, sums, batch.is_first)
    with tf.control_dependencies(None):
        batch.add_sums(commits, accumulators)


def _keep(batch: WholeBatch, direct: list) -> list:
    """Stores gradients of variables that the head reads; returns them, for later."""
    parts = tf.nest.flatten(direct, expand_composites=True)
    values = [part for part in parts if part is not None]
    if not values:
        return direct
    kept = keep(batch, batch.works.first_turn(), "direct", values)
    # With the micro-batch that is the whole batch.
    batch.works.add(micro_ops=[tf.group(*kept)])
    kept = iter(kept)
    parts = [part if part is None else next(kept) for part in parts]
    return tf.nest.pack_sequence_as(direct, parts, expand_composites=True)


def _add(batch: WholeBatch, xs: list, gradients: list, after: list) -> Sums:
    """Returns the sums of `gradients`, read after `after` has run."""
    places = [i for i, gradient in enumerate(gradients) if gradient is not None]
    pairs = [(xs[i], gradients[i]) for i in places]
    accumulators = _create_accumulators(pairs)
    pairs = list(zip(places, accumulators, strict=True))
    dense = [(a, gradients[i]) for i, a in pairs if a.touched is None]
    if dense:
        add_to_sums(batch, *map(list, zip(*dense, strict=True)))
    totals, reads, slices = [None] * len(xs), [], []
    rows, clear = {}, {}
    with tf.control_dependencies(None):  # a roll-back clears, and must not run `after`
        for i, accumulator in pairs:
            if accumulator.touched is not None:
                rows[i] = take_rows(accumulator, gradients[i].indices.dtype)
                clear[i] = clear_rows(accumulator, rows[i])
                handles = [in_graph(v.handle) for v in variables_of([accumulator])]
                batch.works.add(handles=handles)
    with tf.control_dependencies(None), tf.control_dependencies(after):
        for i, accumulator in pairs:
            if accumulator.touched is None:
                total = read(accumulator.total)
                parts = [total]
            else:
                # `add_slices` may replace the tensors that they read.
                parts = [tf.identity(rows[i].values), tf.identity(rows[i].indices)]
                total = tf.IndexedSlices(*parts, rows[i].dense_shape)
                slices.append(SliceSum(accumulator, gradients[i], total, clear[i]))
            reads += _marked(parts, xs[i])
            totals[i] = total
    return Sums(totals, reads, slices)


def _create_accumulators(pairs: list[tuple]) -> list[Accumulator]:
    """Returns an accumulator for each x and its gradient."""
    variables = [x for x, _ in pairs if isinstance(x, tf.Variable)]
    graph = tf.compat.v1.get_default_graph()
    place = place_of_window(variables, device_here(), has_counter=False)
    arguments = []
    for x, gradient in pairs:
        shape = x.shape if x.dtype != tf.resource else gradient.shape
        if not shape.is_fully_defined():
            raise ValueError(
                "A tensor whose gradient is computed apart from a micro-batch must have "
                f"a static shape. Received: {source_of(x).name} of shape {shape}. Make "
                "it with its shape."
            )
        dtype = dtype_of_sum(gradient.dtype)
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        # A variable's `op` has the same name in every replica.
        name = f"{getattr(x, 'op', source_of(x)).name}/batch_gradient"
        if graph.building_function:  # which knows its variables by name
            name = graph.unique_name(name)
        arguments.append((name, shape, dtype, is_sparse))

    @tf.autograph.experimental.do_not_convert  # of a step, which may be converted
    def create(strategy):
        del strategy
        # They are not saved: checkpoints are written between batches.
        return list(itertools.starmap(place.create_sum, arguments))

    accumulators = tf.distribute.get_replica_context().merge_call(create)
    # A variable of eager execution lives as long as something refers to it.
    value_of_graph(graph, _SUMS, []).append(accumulators)
    return accumulators


def _marked(parts: list[tf.Tensor], x) -> list[tf.Operation]:
    """Returns the operations that read a sum of gradients, which get the name of `x`."""
    operations = [part.op for part in parts]
    for operation in operations:
        name = x.name if isinstance(x, tf.Variable) else source_of(x).name
        setattr(operation, SUM_OF, name)
    return operations


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
