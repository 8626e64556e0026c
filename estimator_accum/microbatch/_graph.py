"""Graph analysis for micro-batches: splits the train op, finds written variables.

Operations of a train op that need the micro-batch (statistics, metrics) run with every
micro-batch, and the rest, the update itself, once per batch. Variables that the first
part writes must be rolled back if memory runs out in mid-batch.
"""

import functools
import re
from collections.abc import Collection, Iterable

import tensorflow as tf

from estimator_accum._graph import (
    READERS,
    VARIABLES,
    ancestors,
    functions_of,
    library_of_functions,
    nodes_of,
)
from estimator_accum.microbatch._export import TAKES_A_BATCH, inputs_of
from estimator_accum.microbatch._staging import Slot

_WRITERS = re.compile(r"Assign|Scatter|ResourceApply|ResourceSparseApply|Rng|Stateful")
_PASSING = {"Identity", "Enter", "RefEnter", "Switch", "RefSwitch", "Merge", "RefMerge"}


def split_train_op(
    train_op: tf.Operation, begin: tf.Operation
) -> tuple[list[tf.Operation], list[tf.Operation]]:
    """Splits `train_op` into (per-micro-batch, per-batch) operations.

    Args:
        train_op: Train op of an EstimatorSpec; groups of operations are taken apart.
        begin: The placeholder on which every slice of the batch depends.
    """
    each, once, seen, waiting = [], [], set(), [train_op]
    while waiting:
        operation = waiting.pop()
        if operation in seen:
            continue
        seen.add(operation)
        if begin not in ancestors([operation]):
            once.append(operation)
        elif operation.type == "NoOp":
            waiting += operation.control_inputs
        else:
            each.append(operation)
    return each, once


def check_input_summaries(batch: dict) -> None:
    """Raises ValueError if a summary of input_fn would take a batch from training.

    Args:
        batch: The features and labels from input_fn, in any structure.
    """
    takers = {op for op in inputs_of(batch) if TAKES_A_BATCH.match(op.type)}
    for summary in tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SUMMARIES):
        if takers & ancestors([summary.op]).keys():
            raise ValueError(
                "A summary must not read the input pipeline, of which every read takes "
                f"a batch. Received: {summary.op.name}, made by input_fn. Make it in "
                "model_fn."
            )


def path_to(needed: dict, operation: tf.Operation | None, first: int = 3) -> str:
    """Returns the names of operations that need each other, down to `operation`.

    Args:
        needed: The result of `ancestors`.
        operation: One of its keys.
        first: Number of names before three dots; the last three are always there.
    """
    names = []
    while operation is not None:
        names.append(operation.name)
        operation = needed[operation]
    names.reverse()
    if len(names) > first + 3:
        names[first:-3] = ["..."]
    return ", which needs ".join(names)


def snapshot(
    operations: list[tf.Operation], without: list[tf.Tensor]
) -> tuple[list[tf.Operation], list[tf.Operation]]:
    """Returns operations that copy the variables that others write, and restore them.

    Args:
        operations: Operations that may write variables.
        without: Handles of variables that need no copy.
    """
    take, restore = [], []
    for variable in written_by(ancestors(operations), {each.op for each in without}):
        dtype, handle = _dtype_of(variable), variable.outputs[0]
        with tf.control_dependencies(None), tf.device(variable.device):
            shape = tf.TensorShape(variable.get_attr("shape"))
            slot = Slot("snapshot", dtype, shape)
            if handle.dtype == tf.resource:
                value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
                back = tf.raw_ops.AssignVariableOp(resource=handle, value=slot.read())
            else:  # a reference variable, whose value is overwritten in place
                value = tf.raw_ops.DeepCopy(x=handle)
                back = tf.raw_ops.Assign(
                    ref=handle, value=slot.read(), validate_shape=False
                ).op
            take.append(slot.write(value))
            restore.append(back)
    return take, restore


def _dtype_of(variable: tf.Operation) -> tf.DType:
    return tf.as_dtype(variable.get_attr("dtype"))


def needed_by_updates() -> dict[tf.Operation, tf.Operation | None]:
    """Returns the ancestors of all updates that layers have registered."""
    updates = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS)
    return ancestors([getattr(update, "op", update) for update in updates])


def written_by(
    operations: Iterable[tf.Operation], without: Collection[tf.Operation] = ()
) -> list[tf.Operation]:
    """Returns the variables that `operations` may write, sorted by name."""
    return sorted(writers_of(operations, without), key=lambda each: each.name)


def writers_of(
    operations: Iterable[tf.Operation], without: Collection[tf.Operation] = ()
) -> dict[tf.Operation, list[tf.Operation]]:
    """Maps each variable that `operations` may write to those that do.

    Args:
        operations: Operations of one graph.
        without: Variables to leave out.
    """
    found = {}
    library = functools.cache(library_of_functions)
    for operation in operations:
        for tensor in operation.inputs:
            if tensor.dtype == tf.resource or tensor.dtype._is_ref_dtype:
                variable = variable_of(tensor)
                if variable is None or variable in without:
                    continue
                if _may_write(operation, tensor, library):
                    found.setdefault(variable, []).append(operation)
    return found


def variable_of(tensor: tf.Tensor) -> tf.Operation | None:
    """Returns the variable that `tensor` is a handle of; None for tables etc."""
    operation = tensor.op
    while operation.type in _PASSING:
        operation = operation.inputs[0].op
    return operation if operation.type in VARIABLES else None


def _may_write(operation: tf.Operation, tensor: tf.Tensor, library) -> bool:
    if operation.type in READERS or operation.type in _PASSING:
        return False
    if tensor.dtype._is_ref_dtype:
        return _WRITERS.search(operation.type) is not None
    functions = functions_of(operation)
    return not functions or any(map(_writes, nodes_of(functions, library())))


def _writes(node) -> bool:
    if functions_of(node):  # it does what the functions do
        return False
    return node.op not in READERS and _WRITERS.search(node.op) is not None
