"""Copies of batch normalization by moments that are fed, as if they were constants.

    rows        (x - mean) / sqrt(variance + epsilon)
    gradients   none through mean and variance

So an example's rows are its own, beside any others, and gradients are sums.
"""

import tensorflow as tf

from estimator_accum.core.interception import without_interception
from estimator_accum.graph.copies import replace
from estimator_accum.graph.internals import gradient_scope_of
from estimator_accum.rows.declaration import MOMENTS_ATTRIBUTE


def tensors_of_moments(operations) -> list[tf.Tensor]:
    """Returns the results of operations that compute moments, and their gradients."""
    computing = [op for op in operations if hasattr(op, MOMENTS_ATTRIBUTE)]
    scopes = [gradient_scope_of(operation) for operation in computing]
    derived = [
        operation
        for operation in operations
        if any(scope in f"/{operation.name}" for scope in scopes)
    ]
    return [output for op in (*computing, *derived) for output in op.outputs]


def feed_moments(tensors: list[tf.Tensor], copies: dict) -> list[tf.Tensor]:
    """Returns copies of moments; where they are fed, copies of rows are computed by them.

    Args:
        tensors: Results of `tensors_of_moments`.
        copies: Their copies and others, by reference, to which changes are made.
    """
    fed, others = [], {}  # by the name of the tensor that they replace
    for operation in {tensor.op: None for tensor in tensors}:
        moments = getattr(operation, MOMENTS_ATTRIBUTE, None)
        if moments is None:
            continue
        scope = gradient_scope_of(operation)
        derived = [copies[t.ref()] for t in tensors if scope in f"/{t.op.name}"]
        copy = copies[operation.outputs[0].ref()]
        if moments.is_corrected:
            moments, changes = _feed_fused(copy.op, derived)
            fed += moments
            others |= changes
        else:
            fed.append(_feed(copy))
            others |= {t.name: _put(tf.zeros_like, t, scope) for t in derived}
    for key, copy in copies.items():
        copies[key] = others.get(copy.name, copy)
    return fed


def _feed(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor that may be fed, in the place of another one."""
    return _put(lambda t: tf.compat.v1.placeholder_with_default(t, t.shape), tensor)


def _put(make, tensor: tf.Tensor, scope: str | None = None) -> tf.Tensor:
    """Puts make(tensor) between a tensor and its readers outside of a scope."""
    readers = tensor.consumers()
    other = make(tensor)
    outside = [r for r in readers if scope is None or scope not in f"/{r.name}"]
    replace(tensor, other, outside)
    return other


def _feed_fused(
    operation: tf.Operation, derived: list[tf.Tensor]
) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
    """Has a fused operation normalize by its moments where they are fed.

    Args:
        operation: The operation.
        derived: Results of its gradient.

    Returns:
        (The moments; replacements of tensors by name.)
    """
    values, scale, offset = sources = operation.inputs[:3]
    fed = [_feed(moment) for moment in operation.outputs[1:3]]
    is_first = operation.get_attr("data_format").startswith(b"NC")
    shape = [1] * values.shape.rank
    shape[1 if is_first else -1] = -1
    with without_interception(), tf.GradientTape(persistent=True) as tape:
        tape.watch(sources)
        mean, *parts = (tf.reshape(t, shape) for t in (*fed, offset, scale))
        # Before the factor, not after it as TensorFlow does, which rounds more.
        centred = tf.cast(values, scale.dtype) - mean
        epsilon = operation.get_attr("epsilon")
        zeros = tf.zeros_like(mean)
        result = tf.nn.batch_normalization(centred, zeros, *parts, epsilon)
        result = tf.cast(result, values.dtype)
    others = {operation.outputs[0].name: result}
    gradients = {tensor.op: None for tensor in derived}
    for gradient in filter(lambda op: op.type.startswith("FusedBatch"), gradients):
        names = [output.name for output in gradient.outputs]
        with without_interception():
            parts = tape.gradient(result, sources, gradient.inputs[0])
        others |= dict(zip(names, parts, strict=False))
    graph = operation.graph
    for name, other in others.items():
        replace(graph.get_tensor_by_name(name), other)
    return fed, others
