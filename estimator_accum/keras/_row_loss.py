"""Losses of which each example's part needs no other example.

    loss = sum_i loss(outputs_i, targets_i) * (1, or n_i / B for a mean)

The proof reads the graph of the loss without its reduction, so a loss of the user's own
may be one, too. B = examples in the batch, n_i = examples in micro-batch i.
"""

from collections.abc import Callable

import tensorflow as tf

import estimator_accum.keras._internals as internals
from estimator_accum.graph.functions import all_nodes, operations_with_own_gradients
from estimator_accum.graph.internals import captures_of, is_composite
from estimator_accum.graph.names import draws_from_seed
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.keras._forward import Forward, are_rows, constants_of
from estimator_accum.keras._models import keras_of

_MEANS = ("auto", "mean", "sum_over_batch_size")
_REDUCTIONS = (*_MEANS, "sum")


def row_loss_of(
    keras_model, model, forward: Forward, targets: list, rows: int | None
) -> Callable | None:
    """Returns the loss by micro-batches, or None if it is not known to be such a loss.

    Args:
        keras_model: The family's functions.
        model: The model.
        forward: Its forward pass.
        targets: The batch's targets, and its weights of examples if there are some.
        rows: Static number of examples in the batch.

    Returns:
        Function of a micro-batch's part of the batch, of its outputs with companions and
        of its targets; the sum of its values is the loss that `compile` got.
    """
    keras = keras_of(model)
    own_mask = type(model).compute_mask.__module__.split(".")[0] != keras.__name__
    # The gradient reaches the outputs of `call`, so nothing may follow it.
    is_plain = (
        type(model).compute_loss is keras.Model.compute_loss
        and type(model).__call__ is keras.Model.__call__
        and model.activity_regularizer is None
        and not own_mask
        and tf.is_tensor(forward.structure)
        and all(name != internals.MASK for _, name in forward.companions)
        and all(_is_dense(value) and value.shape[0] == rows for value in targets)
        and not _is_in_float16(forward.function.graph)
        # A gradient that somebody wrote, such as a clipped one, may not be linear.
        and not (forward.has_own_gradients and keras_model.scales_losses(model))
    )
    if not is_plain:
        return None
    losses = keras_model.losses_of(model, forward.structure, targets[0])
    if len(losses) != 1:
        return None
    ((loss, weight),) = losses
    if type(loss).__call__ is not keras.losses.Loss.__call__ or (
        loss.reduction not in _REDUCTIONS
    ):
        return None

    def values(outputs, targets):
        output, *targets = keras_model.arguments_of_loss(
            keras.__name__, forward.dressed(outputs), *targets
        )
        if getattr(loss.call(targets[0], output), internals.MASK, None) is not None:
            raise _Masked
        reduction, loss.reduction = loss.reduction, "none"
        try:
            return loss(targets[0], output, *targets[1:])
        finally:
            loss.reduction = reduction

    if not _has_row_of_each_example(values, forward.function.outputs, targets):
        return None

    def part_of_loss(part, outputs, targets):
        output, *targets = keras_model.arguments_of_loss(
            keras.__name__, forward.dressed(outputs), *targets
        )
        value = loss(targets[0], output, *targets[1:])
        if weight is not None:
            value *= tf.cast(weight, value.dtype)
        if loss.reduction in _MEANS:
            value *= tf.cast(part * keras_model.part_of_replica(), value.dtype)
        return value

    return part_of_loss


class _Masked(Exception):
    """A loss leaves elements out, and divides by the number of those left."""


def _is_dense(value) -> bool:
    return tf.is_tensor(value) and not is_composite(value) and bool(value.shape.rank)


def _has_row_of_each_example(function: Callable, outputs, targets) -> bool:
    specs = [
        [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in tensors]
        for tensors in (outputs, targets)
    ]
    try:
        # In the step Keras's losses are not converted either.
        run = tf.function(function, autograph=False)
        graph = run.get_concrete_function(*specs).graph
    except Exception:  # noqa: BLE001 - a wrong loss is Keras's to report
        return False
    operations = graph.get_operations()
    with graph.as_default():
        has_own_gradients = bool(operations_with_own_gradients(operations))
        draws = any(draws_from_seed(node.op) for node in all_nodes(operations))
    # A loss with variables has gradients of its own; one with states, random numbers or
    # conditions of the batch would give other values in the pass than for the batch.
    is_stateful = any(
        operation.op_def.is_stateful and not _asserts_equal_shapes(operation)
        for operation in operations
    )
    has_rows = not (
        has_own_gradients
        or is_stateful
        or draws
        or captures_of(graph)
        or _is_in_float16(graph)
    ) and are_rows(graph, len(outputs) + len(targets))
    return has_rows and not _reads_number_of_examples(function, graph, outputs, targets)


def _reads_number_of_examples(function, graph: tf.Graph, outputs, targets) -> bool:
    """Returns whether Python in a function reads the static number of examples.

    Args:
        function: The function.
        graph: Its graph for any number of examples.
        outputs: The model's outputs.
        targets: The batch's targets, and its weights of examples if there are some.
    """
    rows = targets[0].shape[0]
    if rows is None:
        return False
    specs = [
        [tf.TensorSpec([rows, *t.shape[1:]], t.dtype) for t in tensors]
        for tensors in (outputs, targets)
    ]
    run = tf.function(function, autograph=False)  # traces anew
    sized = run.get_concrete_function(*specs).graph
    return constants_of(sized) != constants_of(graph)


def _asserts_equal_shapes(operation: tf.Operation) -> bool:
    """Returns whether an operation asserts that two tensors have the same dimensions.

    Losses of sparse labels do; parts of a batch then have the same dimensions, too.
    """
    if operation.type != "Assert":
        return False
    condition = operation.inputs[0].op
    equal = condition.inputs[0].op if condition.type == "All" else condition
    return equal.type == "Equal" and all(
        any(ancestor.type == "Shape" for ancestor in data_ancestors([tensor.op]))
        for tensor in equal.inputs
    )


def _is_in_float16(graph: tf.Graph) -> bool:
    """Returns whether a gradient may be float16: a loss scale would come too late."""
    half = tf.float16.as_datatype_enum
    with graph.as_default():
        nodes = all_nodes(graph.get_operations())
    return any(attr.type == half for node in nodes for attr in node.attr.values())
