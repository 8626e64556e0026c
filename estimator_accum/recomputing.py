"""`recompute`: a layer's activations are computed again when their gradient arrives.

    forward     y = layer(x)                        keeps x, frees what is inside
    backward    dy arrives, then layer(x) again, then dx

The backward pass of a recomputed layer is the one that TensorFlow derives, moved: its
operations, and the operations of the layer that they need, are copied, and the copies
read what is kept through gates that open when `dy` is there:

    kept -> gate -> copy of the layer -> copy of its backward pass -> dx
             ^                            ^
             dy --------------------------'

So nothing is derived in a second way: masks, custom gradients, branches and sparse
gradients are the same operations with the same inputs. An operation that reads or
changes state, such as a random number, a variable's value or a side effect, is never
run again. Its result is kept; masks, which are bool, take one bit per element.

Where `microbatch_model_fn` chooses, the backward pass is there twice, and a switch, fed
with every run, opens one of the two and drops what only the other one reads:

    kept -> switch -> gate -> copy of the layer -> copy of its backward pass -> merge
                 `---------------------------------------> backward pass -----> merge
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.current_batch import current_batch
from estimator_accum.graph.copies import define, insert
from estimator_accum.graph.names import FED
from estimator_accum.graph.replicas import flatten

_GRADIENT = "EstimatorAccumRecompute"
_TWICE = "EstimatorAccumRecomputeTwice"
_ATTRIBUTE = "_estimator_accum_recompute"
_DRAWS = re.compile(r"Random|Truncated|Parameterized|Multinomial|Stateful")
# Results that are kept; a shape must not ask for a whole tensor again.
_SMALL = {"Const", "Shape", "ShapeN", "Size", "Rank"}
_CONTROL_FLOW_V1 = {"Switch", "RefSwitch", "Merge", "RefMerge", "Enter", "Exit"}


def recompute(layer: Callable, *, always: bool | tf.Tensor = False) -> Callable:
    """Returns a layer whose activations are recomputed in the backward pass.

        hidden = recompute(transformer_block)(hidden, mask)

    Inside `microbatch_model_fn(model_fn, "auto")` the layers of a model are recomputed
    together: when it saves time, or when one example would not fit otherwise. In all
    other graphs they always are.

    Between the passes it keeps the layer's inputs (and other tensors from outside that
    the layer uses), one bit per element of dropout masks, and other results of
    operations with state: random numbers that are not compared with a rate, looked-up
    rows of variables, and branches and loops with such operations or with variables
    inside. The gradients equal the gradients of `layer`, bit for bit, with two
    exceptions. If an input is used outside of the layer too, or by an operation whose
    result is kept, its gradients are added in another order. TensorFlow's graph
    optimizer may fuse or reorder operations in one of the two graphs only, and round
    the last bit differently (`rewrite_options`: turn `remapping` and
    `arithmetic_optimization` off).

    A layer's gradient leaves it after the gradients of its trainable variables are
    computed, and their activations freed. They are always computed: make a frozen
    variable with `trainable=False`.

    Updates that the layer registers, such as batch normalization's averages, run once.
    A recomputed layer may contain other recomputed layers. Only gradients of optimizers
    and tf.gradients recompute; a tf.GradientTape keeps the activations.

    Args:
        layer: Function of tensors, in any structure, and other arguments that returns
            tensors in any structure. It may create variables.
        always: Whether to recompute the layer even if "auto" would not. A scalar bool
            Tensor decides in each run, in place of "auto".

    Returns:
        A function with the arguments and results of `layer`, to be called in a graph,
        such as a model_fn's.

    Raises:
        TypeError: If `layer` is not callable.
        ValueError: When it is called eagerly, in a `tf.function`, or in a branch or
            loop; when the layer contains control flow of TensorFlow 1, or writes a
            reference variable that it reads.
    """
    if not callable(layer):
        raise TypeError(
            "`layer` must be a function of tensors. "
            f"Received: {layer!r}. Pass the layer itself, not its result."
        )

    def recomputed(*args, **kwargs):
        graph = _check_place()
        before = len(graph.get_operations())
        results = layer(*args, **kwargs)
        created = graph.get_operations()[before:]
        flat = tf.nest.flatten(results, expand_composites=True)
        tensors = [value for value in flat if tf.is_tensor(value)]
        if not tensors:
            return results
        batch = current_batch()
        if tf.is_tensor(always):
            switch = always
        else:
            switch = None if always or batch is None else batch.recompute_switch()
        detached = iter(_detached(tensors, created, switch))
        flat = [next(detached) if tf.is_tensor(value) else value for value in flat]
        return tf.nest.pack_sequence_as(results, flat, expand_composites=True)

    return recomputed


def _check_place() -> tf.Graph:
    """Returns the graph; raises ValueError where nothing can be recomputed."""
    place = None
    if tf.executing_eagerly():
        place = "eager execution, for which tf.recompute_grad exists"
    else:
        graph = tf.compat.v1.get_default_graph()
        if graph.building_function:
            place = "a tf.function, or a branch or loop of control flow v2"
        elif graph._get_control_flow_context() is not None:
            place = "a branch or loop of control flow v1"
    if place is None:
        return graph
    raise ValueError(
        "A recomputed layer must be called in a graph, outside of branches and loops. "
        f"Received: {place}. Call it in the model_fn itself; the branch or loop may be "
        "inside the layer."
    )


class _Layer(NamedTuple):
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


def _detached(
    outputs: list[tf.Tensor], created: list[tf.Operation], switch: tf.Tensor | None
) -> list[tf.Tensor]:
    """Returns `outputs`, with the gradient of a recomputed layer.

    Args:
        outputs: Results of the layer.
        created: Operations that the layer has created, in their order.
        switch: Scalar bool, whether the layer is recomputed; None means always.
    """
    drawn = _drawn(created)
    inside = {each for each in created if _can_run_again(each)} - drawn
    needed, given = _needed([tensor.op for tensor in outputs], inside)
    for operation in needed:
        if operation.type in _CONTROL_FLOW_V1:
            raise ValueError(
                "A recomputed layer must not contain control flow of TensorFlow 1. "
                f"Received: {operation.name} of type {operation.type}. Call "
                "tf.compat.v1.enable_control_flow_v2() at the program's start."
            )
    given += [tensor for tensor in outputs if tensor.op not in inside]
    _check_reads(given, created)
    kept = list({t.name: t for t in given if _is_trainable(t)}.values())
    graph = tf.compat.v1.get_default_graph()
    # Until the switch is known, everything that it may drop is in memory.
    decided = [] if switch is None else [switch.op]
    overridden = graph.gradient_override_map({"IdentityN": _GRADIENT})
    with overridden, tf.control_dependencies(decided):
        detached = tf.identity_n([*outputs, *kept])
    setattr(detached[0].op, _ATTRIBUTE, _Layer(outputs, kept, inside, drawn, switch))
    return detached[: len(outputs)]


def _check_reads(given: list[tf.Tensor], created: list[tf.Operation]) -> None:
    """Raises ValueError if a value that is kept changes before the backward pass."""
    known = tf.compat.v1.global_variables() + tf.compat.v1.local_variables()
    writers = set(created) - {variable.initializer for variable in known}
    for tensor in given:
        if tensor.op.type != "Identity" or not tensor.op.inputs[0].dtype._is_ref_dtype:
            continue
        variable = tensor.op.inputs[0]
        for user in variable.consumers():
            is_write = any(each.dtype._is_ref_dtype for each in user.outputs)
            if is_write and user in writers:
                raise ValueError(
                    "A recomputed layer must not write a reference variable that it "
                    f"reads. Received: {variable.op.name}, written by {user.name}. "
                    "Make it with use_resource=True."
                )


def _can_run_again(operation: tf.Operation) -> bool:
    """Returns whether an operation is run again, instead of its result being kept.

    It depends on its inputs alone, changes nothing, and its result may be large. What
    reads or writes a reference variable is not said to have state.
    """
    if operation.op_def.is_stateful or operation.type in _SMALL | FED:
        return False
    tensors = (*operation.inputs, *operation.outputs)
    return not any(tensor.dtype._is_ref_dtype for tensor in tensors)


def _drawn(created: list[tf.Operation]) -> set[tf.Operation]:
    """Returns the operations that compute from random numbers and scalars alone.

    What is kept of dropout is then its mask, and not the numbers that were compared.
    """
    found = set()
    for operation in created:
        if operation.op_def.is_stateful:
            if _DRAWS.match(operation.type):
                found.add(operation)
            continue
        is_cast_mask = operation.type == "Cast" and operation.inputs[0].dtype == tf.bool
        are_drawn = [tensor.op in found for tensor in operation.inputs]
        if any(are_drawn) and not is_cast_mask:
            pairs = zip(operation.inputs, are_drawn, strict=True)
            if all(is_drawn or tensor.shape.rank == 0 for tensor, is_drawn in pairs):
                found.add(operation)
    return found


def _is_trainable(tensor: tf.Tensor) -> bool:
    """Returns whether a gradient may flow through a tensor, or a list of them."""
    kind = tensor.dtype.base_dtype
    return kind.is_floating or kind.is_complex or kind == tf.variant


def _needed(
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
    needed, given, waiting = set(), [], list(operations)
    while waiting:
        operation = waiting.pop()
        if operation in needed or operation not in inside:
            continue
        needed.add(operation)
        given += [tensor for tensor in operation.inputs if tensor.op not in inside]
        waiting += [tensor.op for tensor in operation.inputs]
        if operation in with_order:
            waiting += operation.control_inputs
    return needed, given


@tf.RegisterGradient(_GRADIENT)
def _gradient(operation: tf.Operation, *gradients):
    layer: _Layer | None = getattr(operation, _ATTRIBUTE, None)
    if layer is None:
        raise ValueError(
            "The gradient of a recomputed layer must be taken once. Received: a second "
            f"derivative, through {operation.name}. Leave recompute out there."
        )
    pairs = [
        (y, dy)
        for y, result, dy in zip(layer.outputs, operation.outputs, gradients)
        if _is_trainable(y) and not _is_unused(result, dy)
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
    which nobody waits for, would come last, each of them with what it is computed from.

    Args:
        gradients: Gradients of `kept`; Tensors, IndexedSlices or None.
        kept: What the layer reads.
    """
    trainable = _trainable_operations()
    is_own = [_source(tensor) in trainable for tensor in kept]
    own = [each for each, yes in zip(gradients, is_own, strict=True) if yes]
    flat = tf.nest.flatten(own, expand_composites=True)
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


def _trainable_operations() -> set[tf.Operation]:
    """Returns the operations that hold trainable variables, of every replica."""
    variables = tf.compat.v1.trainable_variables()
    return {each.op for each in flatten(tf.distribute.get_strategy(), variables)}


def _source(tensor: tf.Tensor) -> tf.Operation:
    """Returns the operation that a value, read or cast, comes from."""
    operation = tensor.op
    while operation.type in {"Identity", "Cast", "ReadVariableOp"}:
        operation = operation.inputs[0].op
    return operation


def _is_unused(result: tf.Tensor, gradient) -> bool:
    """Returns whether nothing that is derived depends on a result of the layer.

    TensorFlow then passes zeros, since others of the results are used. Through the layer
    they would be NaN where a slope is infinite, and zeros in place of None.
    """
    if not isinstance(gradient, tf.Tensor):  # IndexedSlices or None
        return gradient is None
    return gradient.op.type == "ZerosLike" and gradient.op.inputs[0].name == result.name


def _moved(derived: list, layer: _Layer, backward: list[tf.Operation], arrived) -> list:
    """Returns copies of the gradients that wait for `arrived` before anything is run.

    Args:
        derived: Gradients of the layer; Tensors, IndexedSlices or None.
        layer: The layer.
        backward: Operations that compute them, in their order.
        arrived: Gradients of the layer's outputs.
    """
    flat = tf.nest.flatten(derived, expand_composites=True)
    created = frozenset(backward)
    order = frozenset(each for each in backward if not _is_of_forward(each, created))
    inside = layer.inside | order
    wanted = [each for each in flat if each is not None and each.op in inside]
    arrived = tf.nest.flatten(list(arrived), expand_composites=True)
    arrived = {tensor.name: tensor for tensor in arrived if tensor is not None}

    needed, given = _needed([each.op for each in wanted], inside, order)
    gates = {each.name: _gated(each, arrived, layer) for each in given}
    early = _early(needed, [each for each in backward if each in order], arrived)
    definition, waits = define(needed, order, *early)
    moved = insert(definition, {**gates, **waits}, wanted, "recompute")
    if layer.switch is not None:
        unmoved, given = _needed([each.op for each in wanted], created, created)
        given += [each for each in wanted if each.op not in created]
        inputs = {each.name: _switched(each, layer.switch)[0] for each in given}
        definition, waits = define(unmoved, created)
        kept = insert(definition, {**inputs, **waits}, wanted, "recompute")
        moved = [_merged(*pair) for pair in zip(moved, kept, strict=True)]
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
    if any(each.type in _CONTROL_FLOW_V1 for each in needed):
        return [], set()  # of a layer inside: one that is not run would stop the rest
    first, late = set(), {tensor.op for tensor in arrived.values()}
    for operation in backward:
        before = [*(t.op for t in operation.inputs), *operation.control_inputs]
        if any(each in late for each in before):
            late.add(operation)
        elif operation in needed and any(each in needed for each in before):
            first.add(operation)
    within, _ = _needed(list(first), needed, frozenset(backward))
    rest = needed - within
    waiting = {each for each in rest if not any(t.op in rest for t in each.inputs)}
    read = {t.op for each in first for t in each.inputs}
    return sorted(first - read, key=lambda each: each.name), waiting


def _switched(tensor: tf.Tensor, switch: tf.Tensor) -> list[tf.Tensor]:
    """Returns what stands for `tensor` where `switch` is False, and where it is True.

    What computes from the other of the two is not run. A variable's value and a setting
    are the same in both: they are in memory anyway, and there they stay what they are
    for the graph's optimizer, which might otherwise choose kernels that round in another
    way.
    """
    if _is_setting(tensor) or _is_weight(tensor):
        return [tensor, tensor]
    with _of_one_derivative(tensor.graph):
        return list(tf.raw_ops.Switch(data=tensor, pred=switch))


def _merged(recomputed: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
    with _of_one_derivative(kept.graph):
        return tf.raw_ops.Merge(inputs=[kept, recomputed]).output


def _of_one_derivative(graph: tf.Graph):
    """Context whose switches are no part of a second derivative."""
    return graph.gradient_override_map({"Switch": _TWICE, "Merge": _TWICE})


@tf.RegisterGradient(_TWICE)
def _refuse_second_derivative(operation: tf.Operation, *gradients):
    raise ValueError(
        "The gradient of a layer that may be recomputed must be taken once. Received: a "
        f"second derivative, through {operation.name}. Use recompute(layer, always=True)."
    )


def _is_setting(tensor: tf.Tensor) -> bool:
    """Returns whether `tensor` is a shape, an axis or a factor."""
    return tensor.op.type == "Const" and (
        tensor.dtype.is_integer or tensor.shape.rank == 0
    )


def _is_weight(tensor: tf.Tensor) -> bool:
    return tensor.op.type == "ReadVariableOp" or tensor.dtype == tf.resource


def _is_of_forward(operation: tf.Operation, backward: frozenset) -> bool:
    """Returns whether an operation of the backward pass is a shape of the forward."""
    is_shape = operation.type in _SMALL and operation.inputs
    return bool(is_shape) and not any(t.op in backward for t in operation.inputs)


def _gated(
    tensor: tf.Tensor, arrived: dict[str, tf.Tensor], layer: _Layer
) -> tf.Tensor:
    """Returns a kept tensor for copies, which get it when `arrived` is there."""
    if _is_setting(tensor) or _is_weight(tensor):
        return tensor
    kept = tensor if layer.switch is None else _switched(tensor, layer.switch)[1]
    if tensor.name in arrived:
        return kept
    waiting = [each.op for each in arrived.values()]
    if tensor.dtype != tf.bool or tensor.op not in layer.drawn:
        with tf.control_dependencies(waiting):
            return tf.identity(kept)
    bits, shape = _pack(kept), tf.shape(kept)
    with tf.control_dependencies(waiting):
        bits = tf.identity(bits)
    mask = _unpack(bits, shape)
    mask.set_shape(tensor.shape)
    return mask


def _pack(mask: tf.Tensor) -> tf.Tensor:
    """Returns the bits of a bool Tensor of any shape, uint8 [ceil(size / 8), 1]."""
    flat = tf.reshape(mask, [-1])
    flat = tf.pad(tf.cast(flat, tf.uint8), [[0, -tf.size(flat) % 8]])
    # Eight bytes of 0 or 1 as one number: the product has them in its highest byte.
    words = tf.bitcast(tf.reshape(flat, [-1, 8]), tf.int64) * 0x0102040810204080
    return tf.bitcast(words, tf.uint8)[:, 7:]


def _unpack(bits: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """Returns the mask of the given shape of which `_pack` made `bits`."""
    places = tf.constant([1, 2, 4, 8, 16, 32, 64, 128], tf.uint8)
    flat = tf.reshape(tf.not_equal(tf.bitwise.bitwise_and(bits, places), 0), [-1])
    return tf.reshape(flat[: tf.reduce_prod(shape)], shape)
