"""The backward pass of a recomputed layer, moved behind the gradient that arrives."""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum.graph.copies import define, insert
from estimator_accum.graph.names import CONTROL_FLOW_V1, SHAPES
from estimator_accum.graph.replicas import flatten
from estimator_accum.graph.walks import control_inputs_of, origin_of
from estimator_accum.recomputing.gates import gated, merged, switched

GRADIENT = "EstimatorAccumRecompute"
ATTRIBUTE = "_estimator_accum_recompute"
# Results that are kept; a shape must not ask for a whole tensor again.
SMALL = {"Const", *SHAPES}
_READING = {"Identity", "Cast", "ReadVariableOp"}


class Layer(NamedTuple):
    """A layer's part of the graph.

    Attributes:
        outputs: Its results.
        kept: Trainable tensors that are kept and from which `outputs` are computed.
        inside: Operations that are run again.
        drawn: Operations that compute from random numbers alone; they are not.
        switch: Scalar bool, whether the layer is recomputed; None means always.
    """

    outputs: list[tf.Tensor]
    kept: list[tf.Tensor]
    inside: set[tf.Operation]
    drawn: set[tf.Operation]
    switch: tf.Tensor | None


def is_trainable(tensor: tf.Tensor) -> bool:
    """Returns whether a gradient may flow through a tensor, or a list of them."""
    kind = tensor.dtype.base_dtype
    return kind.is_floating or kind.is_complex or kind == tf.variant


def needed_inside(
    operations: list[tf.Operation],
    inside: set[tf.Operation],
    with_order: frozenset[tf.Operation] = frozenset(),
) -> tuple[set[tf.Operation], list[tf.Tensor]]:
    """Returns the operations of `inside` that are needed, and the tensors they get.

    Args:
        operations: Operations that are wanted.
        inside: Operations to stay in.
        with_order: Operations of `inside` of which control inputs are needed too.
    """
    needed, sources, waiting = set(), [], list(operations)
    while waiting:
        operation = waiting.pop()
        if operation in needed or operation not in inside:
            continue
        needed.add(operation)
        sources += [tensor for tensor in operation.inputs if tensor.op not in inside]
        waiting += [tensor.op for tensor in operation.inputs]
        if operation in with_order:
            waiting += control_inputs_of(operation)
    return needed, sources


@tf.RegisterGradient(GRADIENT)
def _gradient(operation: tf.Operation, *gradients):
    layer: Layer | None = getattr(operation, ATTRIBUTE, None)
    if layer is None:
        raise ValueError(
            "The gradient of a recomputed layer must be taken once. Received: a second "
            f"derivative, through {operation.name}. Leave recompute out there."
        )
    pairs = [
        (y, dy)
        for y, result, dy in zip(layer.outputs, operation.outputs, gradients)
        if is_trainable(y) and not _is_unused(result, dy)
    ]
    if not pairs:
        return [None] * len(operation.inputs)
    outputs, arrived = zip(*pairs, strict=True)
    graph = operation.graph
    before = len(graph.get_operations())
    derived = tf.gradients(
        outputs, layer.kept, grad_ys=arrived, stop_gradients=layer.kept
    )
    backward = graph.get_operations()[before:]
    moved = _moved(derived, layer, backward, arrived)
    return [None] * len(layer.outputs) + _together(moved, layer.kept)


def _together(gradients: list, kept: list[tf.Tensor]) -> list:
    """Returns `gradients`; those for the layer before wait for those of variables.

    A thread goes on to the layer before as soon as it can. The gradients of variables,
    which nobody waits for, would come last, and each would keep its operands until then.

    Args:
        gradients: Gradients of `kept`; Tensors, IndexedSlices or None.
        kept: Tensors that the layer reads.
    """
    variables = tf.compat.v1.trainable_variables()
    replicas = tf.distribute.get_strategy()  # each of which has its own
    trainable = {variable.op for variable in flatten(replicas, variables)}
    is_own = [origin_of(tensor, _READING).op in trainable for tensor in kept]
    of_variables = [
        gradient for gradient, yes in zip(gradients, is_own, strict=True) if yes
    ]
    flat = tf.nest.flatten(of_variables, expand_composites=True)
    waited = [tensor for tensor in flat if tensor is not None]

    def identity(gradient):
        return gradient if gradient is None else tf.identity(gradient)

    together = []
    for gradient, yes in zip(gradients, is_own, strict=True):
        # TensorFlow 1's loops find their lists of gradients by the scope of what arrives.
        with tf.control_dependencies([] if yes else waited):
            together.append(
                tf.nest.map_structure(identity, gradient, expand_composites=True)
            )
    return together


def _is_unused(result: tf.Tensor, gradient) -> bool:
    """Returns whether nothing that is derived depends on a result of the layer.

    TensorFlow then passes zeros, since others of the results are used. Through the layer
    they would be NaN where a slope is infinite, and zeros in place of None.
    """
    if not isinstance(gradient, tf.Tensor):  # IndexedSlices or None
        return gradient is None
    return gradient.op.type == "ZerosLike" and gradient.op.inputs[0].name == result.name


def _moved(derived: list, layer: Layer, backward: list[tf.Operation], arrived) -> list:
    """Returns copies of the gradients that wait for `arrived` before anything is run.

    Args:
        derived: Gradients of the layer; Tensors, IndexedSlices or None.
        layer: The layer.
        backward: Operations that compute them, in their order.
        arrived: Gradients of the layer's outputs.
    """
    flat = tf.nest.flatten(derived, expand_composites=True)
    created = frozenset(backward)
    order = frozenset(op for op in backward if not _is_of_forward(op, created))
    inside = layer.inside | order
    wanted = [tensor for tensor in flat if tensor is not None and tensor.op in inside]
    arrived = tf.nest.flatten(list(arrived), expand_composites=True)
    arrived = {tensor.name: tensor for tensor in arrived if tensor is not None}

    needed, sources = needed_inside([tensor.op for tensor in wanted], inside, order)
    gates = {t.name: gated(t, arrived, layer.drawn, layer.switch) for t in sources}
    early = _early(needed, [op for op in backward if op in order], arrived)
    definition, waits = define(needed, order, *early)
    moved = insert(definition, {**gates, **waits}, wanted, "recompute")
    if layer.switch is not None:
        unmoved, sources = needed_inside([t.op for t in wanted], created, created)
        sources += [tensor for tensor in wanted if tensor.op not in created]
        inputs = {tensor.name: switched(tensor, layer.switch)[0] for tensor in sources}
        definition, waits = define(unmoved, created)
        kept = insert(definition, {**inputs, **waits}, wanted, "recompute")
        moved = [merged(*pair) for pair in zip(moved, kept, strict=True)]
    moved = iter(moved)
    flat = [
        next(moved) if tensor is not None and tensor.op in inside else tensor
        for tensor in flat
    ]
    return tf.nest.pack_sequence_as(derived, flat, expand_composites=True)


def _early(
    needed: set[tf.Operation], backward: list[tf.Operation], arrived: dict
) -> tuple[list[tf.Operation], set[tf.Operation]]:
    """Returns operations to run first, and those that wait for them.

    The factors of a gradient that do not need it, such as the slope of an activation
    function, are computed first. They then take the place of what they are computed
    from, instead of standing beside it and the gradients.
    """
    if any(op.type in CONTROL_FLOW_V1 for op in needed):
        return [], set()  # of a layer inside: one that is not run would stop the rest
    first, late = set(), {tensor.op for tensor in arrived.values()}
    for operation in backward:
        before = [*(t.op for t in operation.inputs), *operation.control_inputs]
        if any(other in late for other in before):
            late.add(operation)
        elif operation in needed and any(other in needed for other in before):
            first.add(operation)
    within, _ = needed_inside(list(first), needed, frozenset(backward))
    rest = needed - within
    waiting = {op for op in rest if not any(t.op in rest for t in op.inputs)}
    read = {t.op for op in first for t in op.inputs}
    return sorted(first - read, key=lambda op: op.name), waiting


def _is_of_forward(operation: tf.Operation, backward: frozenset) -> bool:
    """Returns whether an operation of the backward pass is a shape of the forward."""
    is_shape = operation.type in SMALL and operation.inputs
    return bool(is_shape) and not any(t.op in backward for t in operation.inputs)
