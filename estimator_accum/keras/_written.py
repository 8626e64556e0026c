"""Variables that a step writes, found in its graph by their handles.

Such as the counters, averages and temperatures of a loss, whoever owns them.
"""

from collections.abc import Collection, Iterable

import tensorflow as tf

from estimator_accum.graph.internals import captures_of, dtype_of_handle
from estimator_accum.graph.writers import written_handles

Values = list[tuple[tf.Tensor, tf.Tensor]]


def written_outside(
    graph: tf.Graph, without: Collection[tf.Operation] = ()
) -> list[tf.Tensor]:
    """Returns the handles, from outside of a graph, that its operations write.

    Args:
        graph: Graph of a function.
        without: Operations whose writes do not count.
    """
    outer = {inner.ref(): handle for handle, inner in captures_of(graph)}
    written = {
        id(outer[handle.ref()]): outer[handle.ref()]
        for operation, handle in written_handles(graph)
        if handle.ref() in outer and operation not in without
    }
    return list(written.values())


def values_of(handles: Iterable[tf.Tensor]) -> Values:
    """Returns (handle, its variable's value) pairs.

    Raises:
        ValueError: If a handle is that of a table, which has no value to hold.
    """
    values = []
    for handle in handles:
        dtype = dtype_of_handle(handle)
        if dtype is None:
            raise ValueError(
                "A cut batch must write variables alone, whose values can be held. "
                f"Received: a step that writes a table, {handle!r}. Use a tf.Variable, "
                "or write the table in a callback."
            )
        values.append((handle, tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)))
    return values


def assign(values: Values) -> None:
    """Gives variables their values."""
    for handle, value in values:
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)
