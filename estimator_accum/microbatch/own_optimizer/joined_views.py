"""Rows of views that are joined along the examples, where something combines them.

    z = network(tf.concat([view, other], 0))      blocks, one of each view
    z @ tf.transpose(z)                           combines the examples

A micro-batch's blocks are no slice of the batch's, but each block's rows are. So the
blocks get an axis of their own, and are joined again from the rows of the batch:

    rows = tf.reshape(z, [2, -1, 5])
    tf.reshape(rows, [-1, 5]) @ tf.transpose(...)
"""

import tensorflow as tf

from estimator_accum.graph.copies import replace
from estimator_accum.graph.internals import context_of
from estimator_accum.microbatch.own_optimizer.head import Border, View
from estimator_accum.microbatch.own_optimizer.patches import PASSES_ON
from estimator_accum.rows.rules.blocks import blocks_of

_OF_EXAMPLES = ("rows", "entries")


def take_views_apart(view: View, border: Border) -> dict[str, tf.Tensor]:
    """Takes blocks apart, and joins them again for all that combines their rows.

    Args:
        view: The graph.
        border: The operations that would be copied onto the whole batch.

    Returns:
        The joined tensors by the names of those that were taken apart.
    """
    tensors = {
        tensor.name: tensor
        for operation in border.operations
        if not _keeps_examples(view, operation)
        for tensor in operation.inputs
        if _has_blocks(view, tensor)
    }
    return {name: _join_again(view, tensor) for name, tensor in tensors.items()}


def _has_blocks(view: View, tensor: tf.Tensor) -> bool:
    state = view.state(tensor)
    is_block = state.kind == "entries" and not state.is_place and blocks_of(state.of)
    return bool(is_block) and context_of(tensor.op) is None and not view.is_pure(tensor)


def _keeps_examples(view: View, operation: tf.Operation) -> bool:
    kinds = {view.state(output).kind for output in operation.outputs}
    return not kinds.isdisjoint(_OF_EXAMPLES)


def _join_again(view: View, tensor: tf.Tensor) -> tf.Tensor:
    number, _ = blocks_of(view.state(tensor).of)
    readers = [
        operation
        for operation in tensor.consumers()
        if not _keeps_examples(view, operation)
    ]
    with tensor.graph.as_default(), tf.control_dependencies(None):
        tail = tensor.shape[1:]
        tail = tail if tail.is_fully_defined() else tf.shape(tensor)[1:]
        blocks = tf.reshape(tensor, tf.concat([[number, -1], tail], 0))
        rows = tf.identity(blocks, "rows")
        joined = tf.reshape(rows, tf.concat([[-1], tail], 0))
        joined.set_shape(tensor.shape)
    for operation in (blocks.op, rows.op, joined.op):
        setattr(operation, PASSES_ON, True)
    replace(tensor, joined, readers)
    return joined
