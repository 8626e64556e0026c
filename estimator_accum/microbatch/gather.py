"""Gathers rows of all replicas, of which each may have another number of examples.

    one process          the replicas' rows, concatenated
    several processes    first each replica's number of rows, then the rows, in pieces of
                         one capacity: a collective must have the same shape at every run

R = number of replicas, C = capacity of a piece.
"""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.reduction import sum_over_replicas
from estimator_accum.graph.branches import run_either
from estimator_accum.graph.internals import is_in_cluster

# Types that TensorFlow's collectives gather.
_DTYPES = (tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.int32, tf.int64)


class Exchange(NamedTuple):
    """Operations by which replicas of several processes get each other's rows.

    A collective must have the same shape at every run. So batches are exchanged in
    pieces of one capacity: number of rows of each replica, where shorter ones are padded.

    Attributes:
        counted: int64 [replicas, 2], each replica's number and its rows, to fetch.
        counts: Placeholder for the fetched values.
        begin: Placeholder, the first row of the piece.
        capacity: Placeholder, the capacity [rows].
        operations: Operations that exchange a piece.
        has_failed: Placeholder, 1.0 if this process ran out of memory afterwards.
        failures: Sum of `has_failed` over all replicas.
    """

    counted: tf.Tensor
    counts: tf.Tensor
    begin: tf.Tensor
    capacity: tf.Tensor
    operations: list[tf.Operation]
    has_failed: tf.Tensor
    failures: tf.Tensor


def make_exchange(rows: tf.Tensor) -> Exchange | None:
    """Returns an exchange of a batch's rows; None if one process has all replicas.

    Call it in replica context, and without control dependencies.

    Args:
        rows: Scalar int64, the number of this replica's examples.
    """
    replica = tf.distribute.get_replica_context()
    if not is_in_cluster(replica.strategy):
        return None
    counted = replica.all_gather(
        tf.stack([_number(), rows])[tf.newaxis], axis=0
    )  # [R, 2]
    has_failed = tf.compat.v1.placeholder(tf.float32, [], "has_failed")
    return Exchange(
        counted=counted,
        counts=tf.compat.v1.placeholder(tf.int64, [None, 2], "counts"),
        begin=tf.compat.v1.placeholder(tf.int64, [], "begin"),
        capacity=tf.compat.v1.placeholder(tf.int64, [], "capacity"),
        operations=[],
        has_failed=has_failed,
        failures=sum_over_replicas([has_failed])[0],
    )


def gather(works, tensors: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns the rows of all replicas, and the range of this replica's.

    Args:
        works: The batch's `Works`; between processes its exchange runs before.
        tensors: Tensors [rows, ...], all with the same number of rows.

    Raises:
        TypeError: If processes cannot exchange a tensor.
    """
    if works.exchange is not None:
        *everything, owners = _exchanged(works, tensors)
    else:  # not by collectives: see are_cpus_of_one_process
        owner = tf.fill(tf.shape(tensors[0])[:1], _number())
        replica = tf.distribute.get_replica_context()
        gathered = replica.merge_call(_concatenate, args=([*tensors, owner],))
        *everything, owners = map(tf.identity, gathered)
    return everything, tf.equal(owners, _number())


def _number() -> tf.Tensor:
    """Returns the replica's number, int64."""
    replica = tf.distribute.get_replica_context()
    return tf.cast(replica.replica_id_in_sync_group, tf.int64)


def _concatenate(strategy, tensors: list) -> list[tf.Tensor]:
    """Concatenates the rows of all replicas, in cross-replica context."""
    return [tf.concat(strategy.experimental_local_results(t), 0) for t in tensors]


def _exchanged(works, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the rows of all processes, then the number of the replica of each row."""
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            allowed = ", ".join(dtype.name for dtype in _DTYPES)
            raise TypeError(
                f"`outputs` that processes exchange must be one of {allowed}. "
                f"Received: {tensor.name} of dtype {tensor.dtype.name}. Cast it."
            )
    replica, exchange = tf.distribute.get_replica_context(), works.exchange
    numbers, rows = tf.unstack(exchange.counts, axis=1)  # [R]
    places = exchange.begin + tf.range(exchange.capacity)  # [C]
    is_row = tf.reshape(places < rows[:, tf.newaxis], [-1])  # [R * C]
    pieces = [
        tf.boolean_mask(
            replica.all_gather(tf.stop_gradient(_piece(tensor, exchange)), axis=0),
            is_row,
        )
        for tensor in tensors
    ]
    pieces.append(tf.boolean_mask(tf.repeat(numbers, exchange.capacity), is_row))
    return [_joined(works, piece) for piece in pieces]


def _piece(tensor: tf.Tensor, exchange: Exchange) -> tf.Tensor:
    """Returns rows of this replica, padded to [C, ...]."""
    piece = tensor[exchange.begin : exchange.begin + exchange.capacity]
    missing = exchange.capacity - tf.shape(piece, out_type=tf.int64)[0]
    rest = [[0, 0]] * (piece.shape.rank - 1)
    return tf.pad(piece, [[0, missing], *rest])


def _joined(works, piece: tf.Tensor) -> tf.Tensor:
    """Stores pieces one behind the other; returns all of them, in a later run."""
    exchange = works.exchange
    shape = tf.TensorShape([None]).concatenate(piece.shape[1:])
    with tf.device("/cpu:0"):
        slot = works.slot("gathered", piece.dtype, shape)
        exchange.operations.append(
            run_either(
                tf.equal(exchange.begin, 0),
                lambda: [slot.write(tf.identity(piece))],
                lambda: [slot.write(tf.concat([slot.read(), piece], 0))],
            )
        )
        everything = slot.read()
    everything.set_shape(shape)
    return everything
