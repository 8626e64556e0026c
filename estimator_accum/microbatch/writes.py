"""Roll back of the variables that operations write.

Operations of every micro-batch may write variables, such as batch normalization's
averages. They must be as before, if memory runs out in mid-batch and it is retried.
"""

from collections.abc import Collection, Iterable

import tensorflow as tf

from estimator_accum.graph.walks import ancestors
from estimator_accum.graph.writers import writers_of
from estimator_accum.microbatch.staging import Slot, task_of


def snapshot(
    operations: list[tf.Operation], without: Collection[tf.Operation], task: str = ""
) -> tuple[list[tf.Operation], list[tf.Operation]]:
    """Returns operations that copy the variables that others write, and restore them.

    Args:
        operations: Operations that may write variables.
        without: Operations of variables that need no copy.
        task: Device of this task; empty outside clusters.

    Raises:
        ValueError: If another task holds such a variable: a retry would restore it over
            the writes of other workers.
    """
    take, restore = [], []
    for variable in written_by(ancestors(operations), without):
        if task and task_of(variable.device) not in ("", task):
            raise ValueError(
                "A variable that every micro-batch writes must be of the task that "
                "trains, or a retry would undo the writes of other workers. Received: "
                f"{variable.name} on {task_of(variable.device)}. Use a fixed number of "
                "micro-batches and a train op of estimator_accum."
            )
        dtype, handle = tf.as_dtype(variable.get_attr("dtype")), variable.outputs[0]
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


def written_by(
    operations: Iterable[tf.Operation], without: Collection[tf.Operation] = ()
) -> list[tf.Operation]:
    """Returns the variables that `operations` may write, sorted by name."""
    return sorted(writers_of(operations, without), key=lambda op: op.name)
