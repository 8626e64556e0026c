"""`recompute`, which keeps a layer's inputs in place of its activations."""

import re
from collections.abc import Callable

import tensorflow as tf

from estimator_accum.core.current_batch import current_batch
from estimator_accum.graph.internals import context_of
from estimator_accum.graph.names import CONTROL_FLOW_V1, FED
from estimator_accum.graph.writers import is_reference
from estimator_accum.recomputing.backward import (
    ATTRIBUTE,
    GRADIENT,
    SMALL,
    Layer,
    is_trainable,
    needed_inside,
)

_DRAWS = re.compile(r"Random|Truncated|Parameterized|Multinomial|Stateful")


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
        elif context_of(graph) is not None:
            place = "a branch or loop of control flow v1"
    if place is None:
        return graph
    raise ValueError(
        "A recomputed layer must be called in a graph, outside of branches and loops. "
        f"Received: {place}. Call it in the model_fn itself; the branch or loop may be "
        "inside the layer."
    )


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
    inside = {op for op in created if _can_run_again(op)} - drawn
    needed, sources = needed_inside([tensor.op for tensor in outputs], inside)
    for operation in needed:
        if operation.type in CONTROL_FLOW_V1:
            raise ValueError(
                "A recomputed layer must not contain control flow of TensorFlow 1. "
                f"Received: {operation.name} of type {operation.type}. Call "
                "tf.compat.v1.enable_control_flow_v2() at the program's start."
            )
    sources += [tensor for tensor in outputs if tensor.op not in inside]
    _check_reads(sources, created)
    kept = list({t.name: t for t in sources if is_trainable(t)}.values())
    graph = tf.compat.v1.get_default_graph()
    # Until the switch is known, everything that it may drop is in memory.
    decided = [] if switch is None else [switch.op]
    overridden = graph.gradient_override_map({"IdentityN": GRADIENT})
    with overridden, tf.control_dependencies(decided):
        detached = tf.identity_n([*outputs, *kept])
    setattr(detached[0].op, ATTRIBUTE, Layer(outputs, kept, inside, drawn, switch))
    return detached[: len(outputs)]


def _check_reads(sources: list[tf.Tensor], created: list[tf.Operation]) -> None:
    """Raises ValueError if a value that is kept changes before the backward pass."""
    variables = tf.compat.v1.global_variables() + tf.compat.v1.local_variables()
    writers = set(created) - {variable.initializer for variable in variables}
    for tensor in sources:
        if tensor.op.type != "Identity" or not is_reference(tensor.op.inputs[0]):
            continue
        variable = tensor.op.inputs[0]
        for user in variable.consumers():
            is_write = any(is_reference(output) for output in user.outputs)
            if is_write and user in writers:
                raise ValueError(
                    "A recomputed layer must not write a reference variable that it "
                    f"reads. Received: {variable.op.name}, written by {user.name}. "
                    "Make it with use_resource=True."
                )


def _can_run_again(operation: tf.Operation) -> bool:
    """Returns whether an operation is run again, instead of its result being kept.

    It depends on its inputs alone, changes nothing, and its result may be large. An
    operation on a reference variable has state, which TensorFlow does not say.
    """
    if operation.op_def.is_stateful or operation.type in SMALL | FED:
        return False
    tensors = (*operation.inputs, *operation.outputs)
    return not any(is_reference(tensor) for tensor in tensors)


def _drawn(created: list[tf.Operation]) -> set[tf.Operation]:
    """Returns the operations that compute from random numbers and scalars alone.

    Of dropout the mask is then kept, and not the numbers that were compared.
    """
    random_ops = set()
    for operation in created:
        if operation.op_def.is_stateful:
            if _DRAWS.match(operation.type):
                random_ops.add(operation)
            continue
        is_cast_mask = operation.type == "Cast" and operation.inputs[0].dtype == tf.bool
        are_drawn = [tensor.op in random_ops for tensor in operation.inputs]
        if any(are_drawn) and not is_cast_mask:
            pairs = zip(operation.inputs, are_drawn, strict=True)
            if all(is_drawn or tensor.shape.rank == 0 for tensor, is_drawn in pairs):
                random_ops.add(operation)
    return random_ops
