"""Cuts a train op that knows nothing of micro-batches: each micro-batch, and once.

    computed from the micro-batch's values      runs with each micro-batch
    all else                                    runs once, after them

An operation of the second kind that waits for one of the first (tf.control_dependencies)
no longer does: it comes later anyway. Losses count as known, for the train op is fed
with their values for the whole batch. An update that is computed from other values of a
micro-batch is refused.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum._graph import ancestors
from estimator_accum.microbatch._graph import needed_by_updates, writers_of

_LINEAR = {"Add", "AddN", "AddV2", "Identity", "Neg", "Sub"}
_STATISTICS = re.compile(r"moving_(mean|variance|stddev)|renorm_")  # of batch norm
_TIMELESS = {"Const", "Placeholder", "VarHandleOp", "VariableV2"}
_DRAWS = re.compile(r"Rng|Stateful")


def cut_train_op(
    train_op: tf.Operation, of_batch: set[tf.Operation], known: list[tf.Tensor]
) -> list[tf.Operation]:
    """Makes `train_op` independent of micro-batches.

    Args:
        train_op: The train op of an EstimatorSpec.
        of_batch: The operations whose inputs are computed from a micro-batch.
        known: Tensors of micro-batches with which the train op is fed.

    Returns:
        The operations for which it waited, to run with each micro-batch.

    Raises:
        ValueError: If a micro-batch decides whether an operation runs.
    """
    if train_op in of_batch:
        return [train_op]
    fed = {tensor.name for tensor in known}
    each, seen, waiting = {}, {train_op}, [train_op]
    while waiting:
        operation = waiting.pop()
        cut = [other for other in operation.control_inputs if other in of_batch]
        rest = [other for other in operation.control_inputs if other not in of_batch]
        if cut:
            _check_unconditional(operation, cut)
            operation._remove_all_control_inputs()
            operation._add_control_inputs(rest)
            each |= dict.fromkeys(cut)
        inputs = [each.op for each in operation.inputs if each.name not in fed]
        for other in (*rest, *inputs):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return list(each)


class Cut(NamedTuple):
    """One replica's train op after `cut_train_op`.

    Attributes:
        train_op: The train op; None if it is an operation of the micro-batch.
        sums: The operations that read the gradients.
        fed: Tensors of micro-batches with which the train op is fed.
    """

    train_op: tf.Operation | None
    sums: list[tf.Operation]
    fed: list[tf.Tensor]


def update_last(cuts: list[Cut]) -> None:
    """Makes the reads of gradients wait for all that needs none.

    Without micro-batches gradients take longest, so an average of variables beside the
    update, or a schedule that reads a counter, sees the values from before it.

    Args:
        cuts: Those of all replicas, which may wait for each other in the update.
    """
    sums = [read for cut in cuts for read in cut.sums]
    after, waiting = set(sums), list(sums)
    while waiting:
        operation = waiting.pop()
        users = [user for out in operation.outputs for user in out.consumers()]
        for user in (*users, *operation._control_outputs):
            if user not in after:
                after.add(user)
                waiting.append(user)
    fed = {tensor.op for cut in cuts for tensor in cut.fed}
    roots = [cut.train_op for cut in cuts if cut.train_op is not None]
    before = [
        operation
        for operation in _reachable(roots, fed)
        if operation not in after
        and operation.type not in _TIMELESS
        and operation._get_control_flow_context() is None
    ]
    with tf.control_dependencies(None):
        done = tf.group(*before, name="before_update")
    for operation in sums:
        operation._add_control_inputs([done])


def _reachable(roots: list[tf.Operation], fed: set[tf.Operation]) -> list[tf.Operation]:
    """Returns what runs with `roots` if the outputs of `fed` are fed."""
    found, waiting = dict.fromkeys(roots), list(roots)
    while waiting:
        operation = waiting.pop()
        needed = [*(each.op for each in operation.inputs), *operation.control_inputs]
        for other in needed:
            if other not in found and other not in fed:
                found[other] = None
                waiting.append(other)
    return list(found)


def _check_unconditional(operation: tf.Operation, cut: list[tf.Operation]) -> None:
    context = operation._get_control_flow_context()
    while context is not None:
        pivot = getattr(context, "pivot", None)
        if pivot is not None and pivot.op in cut:
            raise ValueError(
                "A micro-batch must not decide whether an update is made: there are "
                f"several for one update. Received: {operation.name}, in a branch that "
                f"{pivot.op.name} chooses. Train without micro-batches."
            )
        context = context.outer_context


def check_each(
    operations: list[tf.Operation],
    of_batch: set[tf.Operation],
    sums: dict[tf.Operation, str],
    handles: list[tf.Tensor],
) -> None:
    """Raises ValueError if what runs with each micro-batch is an update.

    Args:
        operations: All operations that run with each micro-batch.
        of_batch: The operations whose inputs are computed from a micro-batch.
        sums: Names of the variables by the operations that read their gradients.
        handles: Handles of variables of this library.
    """
    needed = ancestors(operations)
    for read in filter(sums.__contains__, needed):
        while read not in of_batch and needed[read] is not None:
            read = needed[read]
        raise ValueError(
            "An update must be computed from gradients, losses and variables only: "
            "there are several micro-batches for one update. Received: "
            f"{read.name} of type {read.type}, which also needs {_of(read, of_batch)} "
            "of a micro-batch. Train without micro-batches."
        )
    statistics = needed_by_updates()
    local = {variable.op.name for variable in tf.compat.v1.local_variables()}
    written = writers_of(needed, {handle.op for handle in handles})
    for variable, writers in written.items():
        is_float = tf.as_dtype(variable.get_attr("dtype")).is_floating
        if not is_float or variable.name in local or _STATISTICS.search(variable.name):
            continue
        for writer in writers:
            if writer in of_batch and writer not in statistics:
                raise ValueError(
                    "A train op must not write to a variable what it computes from a "
                    "micro-batch, other than losses, counts, metrics and statistics of "
                    f"batch normalization. Received: {variable.name}, written by "
                    f"{writer.name}. Compute it from the loss, or with batch_mean."
                )


def _of(operation: tf.Operation, of_batch: set[tf.Operation]) -> str:
    needed = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    found = [each.name for each in needed if each in of_batch]
    return found[0] if found else operation.name


def repeated_writes(
    operations: list[tf.Operation],
    of_batch: set[tf.Operation],
    handles: list[tf.Tensor],
) -> list[str]:
    """Returns names of variables that each micro-batch writes as if it were a batch.

    Args:
        operations: All operations that run with each micro-batch.
        of_batch: The operations whose inputs are computed from a micro-batch.
        handles: Handles of variables of this library.
    """
    written = writers_of(ancestors(operations), {handle.op for handle in handles})
    return sorted(
        variable.name
        for variable, writers in written.items()
        if any(w not in of_batch and not _DRAWS.search(w.type) for w in writers)
    )


def known_losses(
    losses: Iterable[tf.Tensor], of_batch: set[tf.Operation]
) -> list[tf.Tensor]:
    """Returns scalars of a micro-batch whose values for the batch add up like the loss's.

    Args:
        losses: Losses, whose terms are returned as well.
        of_batch: The operations whose inputs are computed from a micro-batch.
    """
    found, waiting = {}, list(losses)
    while waiting:
        tensor = waiting.pop()
        is_scalar = tensor.shape.rank == 0 and tensor.dtype.is_floating
        if tensor.name in found or tensor.op not in of_batch or not is_scalar:
            continue
        if tensor.op._get_control_flow_context() is not None:
            continue
        found[tensor.name] = tensor
        if _is_linear(tensor.op, of_batch):
            waiting += tensor.op.inputs
    return list(found.values())


def _is_linear(operation: tf.Operation, of_batch: set[tf.Operation]) -> bool:
    """Returns whether `operation` is linear in what it computes from the micro-batch."""
    of_it = [tensor.op in of_batch for tensor in operation.inputs]
    if operation.type == "Mul":
        return sum(of_it) == 1
    if operation.type in ("RealDiv", "DivNoNan"):
        return of_it == [True, False]
    return operation.type in _LINEAR
