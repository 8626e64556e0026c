"""Adam for tables of which few rows have ever had a gradient: word embeddings.

A row whose gradient and moments are 0 keeps all three, and does not move. The others are
gathered, updated by Adam's own kernel, and written back. That is bit for bit the update
of the whole table, which would be seven passes over it.

V = rows of the table, A = active rows, G = rows with a gradient now.
"""

import tensorflow as tf

_MOST = 4  # above V / 4 active rows, passes over the whole table are faster


def apply_adam(
    name: str,
    handles: list[tf.Tensor],
    grad: tf.Tensor,
    indices: tf.Tensor,
    scalars: dict[str, tf.Tensor],
) -> tf.Operation:
    """Updates the active rows, or the whole table if many are active.

    Args:
        name: The table's name and number of rows, which no other table of the session
            has.
        handles: Resources of the table and of its slots m and v.
        grad: Gradients of some rows [G, ...].
        indices: These rows, int64 [G], each once.
        scalars: Further arguments of `tf.raw_ops.ResourceApplyAdam`.
    """
    with tf.control_dependencies(share_when_read(handles[1:])):
        m, v = (read(handle, grad.dtype) for handle in handles[1:])
    is_active, noted = _find(name, m, v, indices)
    rows, shape = tf.where(is_active)[:, 0], tf.shape(m, tf.int64)

    def update(resources, places: tf.Tensor, shape: tf.Tensor, after: list):
        dense = tf.scatter_nd(places[:, tf.newaxis], grad, shape)
        with tf.control_dependencies(after):
            return tf.raw_ops.ResourceApplyAdam(
                **dict(zip(("var", "m", "v"), resources)), grad=dense, **scalars
            )

    def update_active() -> tf.Operation:
        copies = [_local(f"{name}/active_{i}", grad.dtype) for i in range(len(handles))]
        gathered = [
            tf.raw_ops.AssignVariableOp(
                resource=copy,
                value=tf.raw_ops.ResourceGather(
                    resource=handle, indices=rows, dtype=grad.dtype
                ),
            )
            for copy, handle in zip(copies, handles)
        ]
        places = tf.gather(tf.cumsum(tf.cast(is_active, tf.int64)) - 1, indices)
        active_shape = tf.concat([tf.shape(rows, tf.int64), shape[1:]], 0)
        with tf.control_dependencies([update(copies, places, active_shape, gathered)]):
            written = [
                tf.raw_ops.ResourceScatterUpdate(
                    resource=handle, indices=rows, updates=read(copy, grad.dtype)
                )
                for copy, handle in zip(copies, handles)
            ]
        return tf.group(*written)

    def update_all() -> tf.Operation:
        return update(handles, indices, shape, share_when_read(handles[:1]))

    is_few = _MOST * tf.size(rows, tf.int64) < shape[0]
    with tf.control_dependencies([noted]):
        return tf.group(tf.cond(is_few, update_active, update_all))


def share_when_read(handles: list[tf.Tensor]) -> list[tf.Operation]:
    """Returns operations that let whole variables be read and updated in place.

    After rows of a variable are gathered or written, TensorFlow copies all of it each
    time that it is read or updated as a whole.
    """
    return [tf.raw_ops.DisableCopyOnRead(resource=handle) for handle in handles]


def _find(name: str, m: tf.Tensor, v: tf.Tensor, indices: tf.Tensor):
    """Returns (whether each row is active, bool [V]; the operation that notes it).

    A session notes which rows have been active. Its first update, and one that finds
    moments in other rows, since a checkpoint was restored, looks at all moments.
    """
    note = _local(f"{name}/active_rows", tf.bool)
    m, v = (tf.reshape(slot, [tf.shape(slot)[0], -1]) for slot in (m, v))
    is_noted = tf.raw_ops.VarIsInitializedOp(resource=note)
    noted = tf.cond(
        is_noted,
        lambda: read(note, tf.bool),
        lambda: tf.zeros(tf.shape(m)[:1], tf.bool),
    )
    is_complete = is_noted & tf.reduce_all(noted | tf.equal(m[:, 0], 0))
    before = tf.cond(
        is_complete,
        lambda: noted,
        lambda: tf.reduce_any(tf.not_equal(m, 0) | tf.not_equal(v, 0), 1),
    )
    now = tf.ones_like(indices, tf.bool)
    is_active = tf.tensor_scatter_nd_update(before, indices[:, tf.newaxis], now)
    return is_active, tf.raw_ops.AssignVariableOp(resource=note, value=is_active)


def read(handle: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the value of a resource."""
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def _local(name: str, dtype: tf.DType) -> tf.Tensor:
    """Returns a variable of the session that no collection and no checkpoint has."""
    return tf.raw_ops.VarHandleOp(dtype=dtype, shape=None, shared_name=name)
