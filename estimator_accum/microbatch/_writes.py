"""Variables that operations write, and their roll back.

What runs with every micro-batch may write variables, such as batch normalization's
averages. They must be as before, if memory runs out in mid-batch and it is retried.
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
from estimator_accum.microbatch._staging import Slot

_WRITERS = re.compile(r"Assign|Scatter|ResourceApply|ResourceSparseApply|Rng|Stateful")
_PASSING = {"Identity", "Enter", "RefEnter", "Switch", "RefSwitch", "Merge", "RefMerge"}


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
