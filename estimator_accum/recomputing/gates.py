"""Gates that hold a kept tensor back until the layer's gradient is there."""

import tensorflow as tf

_TWICE = "EstimatorAccumRecomputeTwice"


def gated(
    tensor: tf.Tensor,
    arrived: dict[str, tf.Tensor],
    drawn: set,
    switch: tf.Tensor | None,
) -> tf.Tensor:
    """Returns a kept tensor for copies, which get it when `arrived` is there."""
    if _is_setting(tensor) or _is_weight(tensor):
        return tensor
    kept = tensor if switch is None else switched(tensor, switch)[1]
    if tensor.name in arrived:
        return kept
    waiting = [tensor.op for tensor in arrived.values()]
    if tensor.dtype != tf.bool or tensor.op not in drawn:
        with tf.control_dependencies(waiting):
            return tf.identity(kept)
    bits, shape = _pack(kept), tf.shape(kept)
    with tf.control_dependencies(waiting):
        bits = tf.identity(bits)
    mask = _unpack(bits, shape)
    mask.set_shape(tensor.shape)
    return mask


def switched(tensor: tf.Tensor, switch: tf.Tensor) -> list[tf.Tensor]:
    """Returns a tensor for the graph where `switch` is False, and one where it is True.

    Operations that read the other of the two do not run. A variable's value and a setting
    are the same in both: they are in memory anyway, and there they stay what they are
    for the graph's optimizer, which might otherwise choose kernels that round in another
    way.
    """
    if _is_setting(tensor) or _is_weight(tensor):
        return [tensor, tensor]
    with _of_one_derivative(tensor.graph):
        return list(tf.raw_ops.Switch(data=tensor, pred=switch))


def merged(recomputed: tf.Tensor, kept: tf.Tensor) -> tf.Tensor:
    """Returns the one of two results that is computed in a run."""
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
