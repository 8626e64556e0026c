"""Batch normalization of each micro-batch by its own statistics.

    micro-batch i    (x_i - mean_i) / sqrt(variance_i + epsilon)
    once per batch   moving averages, by the mean and variance of the whole batch

Two forms are recognized: the fused operation, and moments of one tensor, as of
tf.nn.moments, that a step writes to variables. What else looks like them is refused.
"""

import contextlib
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum.graph.copies import change_input, replace
from estimator_accum.graph.functions import library_of_functions
from estimator_accum.graph.internals import set_number
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.graph.writers import may_be_variable, variable_of
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.collecting import Moments
from estimator_accum.microbatch.own_optimizer.head import View, of_batch
from estimator_accum.microbatch.repeatable import changes_something
from estimator_accum.rows.declaration import MOMENTS_ATTRIBUTE

FUSED = {"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"}
# Attributes of an operation: whether a gradient was taken, and what blends its moments.
_DERIVED, _BLENDED = "_estimator_accum_derived", "_estimator_accum_blended"
_LATE = "whose results a variable gets after the gradient is taken; write it before"
_ROOTS = {"Pow", "Rsqrt", "Sqrt"}
_REMEDY = (
    "Use batch_norm='batch', which normalizes by the statistics of the whole batch."
)


class _Uses(NamedTuple):
    """Uses of moments.

    Attributes:
        operations: Operations that compute from moments and from no example.
        written: Variables to which they write.
        readers: Those that the rows are normalized with.
    """

    operations: dict[tf.Operation, None]
    written: set[tf.Operation]
    readers: set[tf.Operation]

    @property
    def is_normalization(self) -> bool:
        """Whether rows are normalized with moments that variables get as well."""
        return bool(self.written and self.readers)


def find_moments(batch: WholeBatch) -> None:
    """Marks the operations that compute moments of a micro-batch, for `View`.

    Raises:
        ValueError: If batch normalization is corrected by its moving averages, or if these
            are written after a gradient is taken.
    """
    if batch.batch_norm == "batch":
        return
    operations = of_batch(batch)
    new = [op for op in operations if not hasattr(op, MOMENTS_ATTRIBUTE)]
    fused = [op for op in new if _is_fused(op) and op.inputs[1].op not in operations]
    for operation in fused:
        _without_averages(operation)
        mean, variance = operation.outputs[1:3]
        moments = Moments(operation.inputs[0], mean, variance, True)
        setattr(operation, MOMENTS_ATTRIBUTE, moments)
    library = library_of_functions()
    blended = [op for op in operations if hasattr(op, _BLENDED)]
    for operation in blended:
        others = getattr(operation, _BLENDED)
        uses = _uses_of(operation.outputs[1:3], operations, library, others)
        if uses.written - batch.works.handles:
            _refuse(operation, _LATE)
    for operation in new:
        mean = _mean_of_variance(operation)
        if mean is None:
            continue
        moments = Moments(mean.inputs[0], mean.outputs[0], operation.outputs[0], False)
        uses = _uses_of([moments.mean, moments.variance], operations, library)
        if uses.is_normalization:
            if hasattr(operation, _DERIVED):
                _refuse(operation, _LATE)
            _check_not_corrected(operation, uses)
            setattr(mean, MOMENTS_ATTRIBUTE, moments)
            setattr(operation, MOMENTS_ATTRIBUTE, moments)


def is_normalization(operation: tf.Operation, of_batch: set[tf.Operation]) -> bool:
    """Returns whether an operation computes moments that `find_moments` would mark.

    Args:
        operation: An operation that combines examples.
        of_batch: Operations that compute from a micro-batch.
    """
    if _is_fused(operation):
        return operation.inputs[1].op not in of_batch
    library, is_mean = library_of_functions(), operation.type == "Mean"
    for other in of_batch if is_mean else ():
        if _mean_of_variance(other) is operation:
            moments = operation.outputs[0], other.outputs[0]
            uses = _uses_of(moments, of_batch, library)
            with contextlib.suppress(ValueError):
                _check_not_corrected(other, uses)
                return uses.is_normalization
    return False


def check_moments(view: View) -> None:
    """Raises ValueError if batch normalization has examples of several micro-batches."""
    if view.batch.batch_norm == "batch":
        return
    seen = [op for op in view.of_batch if view.analysis.has_seen(op)]
    for operation in seen:
        moments = getattr(operation, MOMENTS_ATTRIBUTE, None)
        if operation.type == "Mean":
            setattr(operation, _DERIVED, True)
        if moments is not None and view.state(moments.mean).kind == "mixed":
            _refuse(operation, "whose values are not computed for each example")
    for operation in filter(_is_fused, (o.operation for o in view.analysis.origins)):
        _refuse(operation, "which is inside of a function, branch or loop")
    sums = [
        op for op in seen if op.type in ("Mean", "Sum") and _is_of_examples(view, op)
    ]
    tensors = [operation.outputs[0] for operation in sums]
    uses = _uses_of(tensors, view.of_batch, library_of_functions())
    if uses.is_normalization and any(op.type in _ROOTS for op in uses.operations):
        name = min(operation.name for operation in sums)
        operation = view.batch.begin.graph.get_operation_by_name(name)
        _refuse(operation, "which is part of others, as if masked or synchronized")


def _is_of_examples(view: View, operation: tf.Operation) -> bool:
    """Returns whether channels are reduced over examples."""
    shape = operation.outputs[0].shape
    is_of_channels = shape.rank != 0 and shape.is_fully_defined()
    return is_of_channels and view.state(operation.outputs[0]).kind == "mixed"


def _refuse(operation: tf.Operation, reason: str) -> None:
    raise ValueError(
        "With batch_norm='micro_batch' the statistics of a layer must be mean and variance "
        "of its own values, over the examples of one micro-batch. Received: "
        f"{operation.name} of type {operation.type}, {reason}. {_REMEDY}"
    )


def _is_fused(operation: tf.Operation) -> bool:
    return operation.type in FUSED and operation.get_attr("is_training")


def _without_averages(operation: tf.Operation) -> None:
    """Has a fused operation return moments, from which moving averages are computed.

    It would compute these itself, from averages that an earlier call may have written.
    """
    if operation.type != "FusedBatchNormV3":
        return
    factor = operation.get_attr("exponential_avg_factor")
    if factor == 1:
        return
    graph, averages, blends = operation.graph, operation.inputs[3:5], []
    with graph.as_default(), tf.control_dependencies(None), tf.device(operation.device):
        for place, average in enumerate(averages):
            moment = operation.outputs[1 + place]
            readers = moment.consumers()
            scaled = factor * moment
            blends.append(scaled.op)
            blended = scaled + (1 - factor) * average
            replace(moment, blended, readers)
            change_input(operation, 3 + place, tf.zeros(moment.shape, moment.dtype))
    set_number(operation, "exponential_avg_factor", 1.0)
    setattr(operation, _BLENDED, blends)


def _mean_of_variance(operation: tf.Operation) -> tf.Operation | None:
    """Returns the mean of the values whose variance an operation computes, if so.

    mean(squared_difference(x, stop_gradient(mean(x))))
    """
    if operation.type != "Mean":
        return None
    squares = operation.inputs[0].op
    if squares.type != "SquaredDifference":
        return None
    values, centre = squares.inputs
    mean = centre.op.inputs[0].op if centre.op.type == "StopGradient" else centre.op
    if mean.type != "Mean" or mean.inputs[0] is not values:
        return None
    axes = [tf.get_static_value(op.inputs[1]) for op in (mean, operation)]
    are_same = all(a is not None for a in axes) and np.array_equal(*axes)
    keep_dims = all(op.get_attr("keep_dims") for op in (mean, operation))
    return mean if are_same and keep_dims else None


def _uses_of(
    moments: Iterable[tf.Tensor],
    of_batch: Collection[tf.Operation],
    library: dict,
    without: Collection[tf.Operation] = (),
) -> _Uses:
    """Returns the uses of moments.

    Args:
        moments: Tensors.
        of_batch: Operations that compute from a micro-batch.
        library: Definitions of functions by name.
        without: Uses to leave out.
    """
    operations, tensors = {}, {tensor.ref() for tensor in moments}
    joining, waiting = {}, list(moments)  # operations that join others of the batch
    while waiting:
        tensor = waiting.pop()
        for reader in tensor.consumers():
            values = [t for t in reader.inputs if t.dtype.is_floating]
            others = {t.ref() for t in values if t.op in of_batch}
            if reader in without:
                continue
            if others - tensors:
                joining[reader] = tensor.op
            elif reader not in operations:
                operations[reader] = None
                tensors |= {output.ref() for output in reader.outputs}
                waiting += reader.outputs
    writers = [
        operation
        for operation in operations
        if changes_something(operation, library)
        if any(t.ref() in tensors and t.shape.rank != 0 for t in operation.inputs)
    ]
    handles = [t for op in writers for t in op.inputs if may_be_variable(t)]
    written = {variable_of(handle) for handle in handles} - {None}
    readers = {op for reader, op in joining.items() if reader not in operations}
    return _Uses(operations, written, readers)


def _check_not_corrected(operation: tf.Operation, uses: _Uses) -> None:
    """Raises ValueError if rows are normalized with averages of earlier batches."""
    within = [op for op in data_ancestors(uses.readers) if op in uses.operations]
    outside = [t.op for op in within for t in op.inputs if t.op not in uses.operations]
    for other in data_ancestors(
        outside, lambda op: op.inputs if op not in within else ()
    ):
        if any(
            may_be_variable(t) and variable_of(t) in uses.written for t in other.inputs
        ):
            raise ValueError(
                "With batch_norm='micro_batch' a layer must be normalized by statistics "
                f"of the micro-batch alone. Received: {operation.name}, whose results "
                f"{other.name} corrects by moving averages (renorm). {_REMEDY}"
            )
