"""Roll back of the values that operations write.

Operations of every micro-batch may write variables, such as batch normalization's
averages, or tables. They must be as before, if memory runs out in mid-batch and it is
retried.
"""

from collections.abc import Collection, Iterable

import tensorflow as tf

from estimator_accum.graph.internals import dtype_of_handle
from estimator_accum.graph.names import CALLERS, MUTABLE_TABLES, WRITERS_OF_TABLES
from estimator_accum.graph.walks import ancestors
from estimator_accum.graph.writers import writers_of
from estimator_accum.microbatch.staging import Slot, task_of


def snapshot(
    operations: list[tf.Operation], without: Collection[tf.Operation], task: str = ""
) -> tuple[list[tf.Operation], list[tf.Operation]]:
    """Returns operations that copy the values that others write, and restore them.

    The values are those of variables, and of tables that may be written.

    Args:
        operations: Operations that may write variables.
        without: Operations of variables that need no copy.
        task: Device of this task; empty outside clusters.

    Raises:
        ValueError: If another task holds such a variable: a retry would restore it over
            the writes of other workers.
    """
    take, restore, needed = [], [], ancestors(operations)
    tables, variables = _tables_of(needed), written_by(needed, without)
    for place in (*tables, *variables):
        if task and task_of(place.device) not in ("", task):
            raise ValueError(
                "A variable that every micro-batch writes must be of the task that "
                "trains, or a retry would undo the writes of other workers. Received: "
                f"{place.name} on {task_of(place.device)}. Use a fixed number of "
                "micro-batches and a train op of estimator_accum."
            )
    for table in tables:
        dtypes = [tf.as_dtype(table.get_attr(f"{k}_dtype")) for k in ("key", "value")]
        (handle,) = table.outputs
        with tf.control_dependencies(None), tf.device(table.device):
            slots = [Slot("snapshot", dtype, tf.TensorShape(None)) for dtype in dtypes]
            parts = tf.raw_ops.LookupTableExportV2(
                table_handle=handle, Tkeys=dtypes[0], Tvalues=dtypes[1]
            )
            # A dense table exports and imports its own memory.
            take += [
                slot.write(tf.raw_ops.DeepCopy(x=part))
                for slot, part in zip(slots, parts, strict=True)
            ]
            keys, values = (tf.raw_ops.DeepCopy(x=slot.read()) for slot in slots)
            back = tf.raw_ops.LookupTableImportV2(
                table_handle=handle, keys=keys, values=values
            )
        restore.append(back)
    for variable in variables:
        handle = variable.outputs[0]
        dtype = dtype_of_handle(handle) or tf.as_dtype(variable.get_attr("dtype"))
        with tf.control_dependencies(None), tf.device(variable.device):
            shape = tf.TensorShape(None)  # of a variable that a function captured
            if variable.type != "Placeholder":
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


def _tables_of(operations: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Returns the tables that `operations` use, if one may write, sorted by name."""
    operations = list(operations)
    may_write = any(
        op.type in CALLERS or WRITERS_OF_TABLES.search(op.type) for op in operations
    )
    tables = [op for op in operations if may_write and op.type in MUTABLE_TABLES]
    return sorted(tables, key=lambda op: op.name)
