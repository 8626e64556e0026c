"""Computations that are the same."""

import tensorflow as tf

from estimator_accum.graph.functions import functions_of
from estimator_accum.graph.internals import context_of, is_stateful
from estimator_accum.graph.names import CONTROL_FLOW_V1, FED
from estimator_accum.graph.writers import is_reference

_MOST_OPERATIONS = 50  # before a result
_MOST_NUMBERS = 1_000  # of a constant


def computation_of(tensor: tf.Tensor) -> tuple:
    """Returns the last operations that compute a tensor, and the tensors they read.

    Tensors with equal results, which can be hashed, have equal values in each run, such
    as the `mask > 0` of two `tf.boolean_mask(x, mask > 0)`.
    """
    places, parts, waiting = {}, [], [tensor]
    for result in waiting:  # grows
        operation = result.op
        if operation in places:
            parts.append((places[operation], result.value_index))
        elif len(places) < _MOST_OPERATIONS and _is_pure(operation):
            places[operation] = len(places)
            inputs = operation.inputs
            settings = settings_of(operation)
            parts.append((operation.type, settings, result.value_index, len(inputs)))
            waiting += inputs
        else:
            parts.append(result.ref())
    return tuple(parts)


def _is_pure(operation: tf.Operation) -> bool:
    """Returns whether another operation of the type computes the same from its inputs."""
    if context_of(operation) is not None or functions_of(operation):
        return False
    kind = operation.type
    if kind in FED or kind in CONTROL_FLOW_V1 or is_stateful(kind) is not False:
        return False
    if any(map(is_reference, operation.inputs)):
        return False  # of another value after a change
    if kind == "Const":  # a table would be copied
        return (operation.outputs[0].shape.num_elements() or 0) <= _MOST_NUMBERS
    return bool(operation.inputs)


def settings_of(operation: tf.Operation) -> frozenset:
    """Returns (name, value) of each attribute of an operation, which can be hashed."""
    attributes = operation.node_def.attr.items()
    return frozenset(
        (name, value.SerializeToString(deterministic=True))
        for name, value in attributes
        if not name.startswith("_")
    )
