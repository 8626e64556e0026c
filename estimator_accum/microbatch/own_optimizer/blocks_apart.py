"""Blocks of examples, taken apart where examples are combined.

    loss = mean(network(concat([a, b], 0)))
         = mean(concat(split(network(concat([a, b], 0)), 2), 0))

The rows of a block belong to the examples in their order, those of several blocks do not.
So the head gets each block by itself, and the network is computed by micro-batches.
"""

import tensorflow as tf

from estimator_accum.graph.internals import context_of, set_input
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.microbatch.own_optimizer.head import View
from estimator_accum.microbatch.own_optimizer.patches import PASSES_ON
from estimator_accum.rows.rules.blocks import blocks_in


def take_blocks_apart(view: View, tops: list[tf.Tensor]) -> bool:
    """Has operations that combine examples read blocks that were apart.

    Args:
        view: The graph.
        tops: Tensors that are computed from the batch.

    Returns:
        Whether there are any.
    """
    needed, joined = data_ancestors([top.op for top in tops]), {}
    readers = [op for op in needed if op in view.of_batch and _combines(view, op)]
    for operation in readers:
        if context_of(operation) is not None:
            continue
        for i, tensor in enumerate(operation.inputs):
            blocks = blocks_in(view.state(tensor))
            if blocks is None or context_of(tensor.op) is not None:
                continue
            if tensor.ref() not in joined:
                joined[tensor.ref()] = _joined(tensor, blocks[0])
            set_input(operation, i, joined[tensor.ref()])
    return bool(joined)


def _combines(view: View, operation: tf.Operation) -> bool:
    """Returns whether an operation combines examples, or computes a size for one."""
    kinds = {view.state(tensor).kind for tensor in operation.outputs}
    if "mixed" in kinds or not kinds or not kinds <= {"counts", "sizes"}:
        return "mixed" in kinds
    users = [user for tensor in operation.outputs for user in tensor.consumers()]
    return any(_combines(view, user) for user in users if user in view.of_batch)


def _joined(tensor: tf.Tensor, number: int) -> tf.Tensor:
    with tf.control_dependencies(None):
        parts = tf.split(tensor, number)
        rows = [tf.identity(part) for part in parts]
        result = tf.concat(rows, 0)
    for operation in (parts[0].op, result.op, *(part.op for part in rows)):
        setattr(operation, PASSES_ON, True)  # also for gradients of a tape
    return result
