"""The kind of window that is one batch, of which the graph sees one micro-batch."""

import contextlib
import dataclasses
from typing import NamedTuple

import tensorflow as tf

from estimator_accum._accumulators import (
    Accumulator,
    assign_zeros,
    clear_rows,
    touched_rows,
    variables_of,
)
from estimator_accum._clock import Clock, set_current_batch
from estimator_accum._graph import read


class Exchange(NamedTuple):
    """Operations by which replicas of several processes get each other's rows.

    A collective must have the same shape at every run. So batches are exchanged in
    pieces of one capacity: number of rows of each replica, where shorter ones are padded.

    Attributes:
        counted: int64 [replicas, 2], each replica's number and its rows, to fetch.
        counts: Placeholder for what was fetched.
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


class Part(NamedTuple):
    """One component of a part of the batch.

    Attributes:
        sliced: The micro-batch's.
        whole: The batch's, in a run after it is staged.
        has_rows: Whether it has one row for each example; else the examples of a sparse
            or ragged tensor have any number of entries.
    """

    sliced: tf.Tensor
    whole: tf.Tensor
    has_rows: bool


@dataclasses.dataclass
class Pass:
    """Operations of one run through a batch's micro-batches.

    Attributes:
        each: Operations that run with every micro-batch.
        empty: Operations that run in their place on a replica without examples.
        fetches: Tensors to fetch with every micro-batch.
        after: Operations that run once, after the last micro-batch of every replica
            that has examples.
        done: Feeds from `after` on. If they are not fed, the next pass does the work of
            this one by itself, which it can with the whole batch as one micro-batch.
        is_joint: Whether `after` reads other replicas' results; it then runs on
            replicas without examples too, and the next pass cannot do its work.
        exchange: Exchange of rows among processes before `after`; None within a process.
    """

    each: list[tf.Operation] = dataclasses.field(default_factory=list)
    empty: list[tf.Operation] = dataclasses.field(default_factory=list)
    fetches: list[tf.Tensor] = dataclasses.field(default_factory=list)
    after: list[tf.Operation] = dataclasses.field(default_factory=list)
    done: dict[tf.Tensor, bool] = dataclasses.field(default_factory=dict)
    is_joint: bool = False
    exchange: Exchange | None = None


class WholeBatch(Clock):
    """One replica's batch; the graph sees one micro-batch of it at a time.

    Attributes:
        begin, size, rows: Scalar int64 placeholders [examples]: the micro-batch is the
            half-open range [begin, begin + size) of a batch of `rows` examples.
        num_micro_batches: Scalar int64 placeholder, the number of micro-batches in the
            batch.
        is_first: Scalar bool, whether this is the batch's first micro-batch.
        is_whole: Scalar bool, whether this micro-batch is the whole batch.
        reduction: "mean" or "sum", how the loss reduces its examples.
        should_recompute: Scalar bool placeholder, whether layers are recomputed; None
            if the model has none, or always recomputes.
        weight: Scalar, the micro-batch's weight in the loss; set when the first train
            op is made.
        earlier_passes: Passes before the one of `micro_ops`, in their order.
        computed_twice: Tensors that an earlier pass computes too.
        last_pass: The pass of `micro_ops`, `empty_ops` and `fetches`.
        micro_ops: Operations that run with every micro-batch.
        fetches: Tensors that are fetched with every micro-batch.
        reported: Tensors of the micro-batch with whose values for the batch the train
            op is fed, and what computes these after the last pass. If one micro-batch
            is the batch, its own are fetched with it.
        parts: The batch's parts: what is sliced, and what is whole.
        discard_ops: Operations that drop the micro-batches so far, before a retry.
        empty_ops: Operations that run instead of micro-batches on a replica without
            examples.
        initialize_ops: Operations that run once in a new session, because the variables
            here are in no collection.
        handles: Handles of variables that micro-batches may write and that a retry does
            not restore.
        own: Operations that compute for the whole batch, made for what a micro-batch has.
        keys: Check before the first update; None if there is nothing to check.
    """

    def __init__(self, reduction: str, is_auto: bool = False):
        self.reduction = reduction
        self._is_auto = is_auto
        self.should_recompute = None
        with tf.name_scope("micro_batch"):
            self.begin, self.size, self.rows, self.num_micro_batches = (
                tf.compat.v1.placeholder(tf.int64, [], name)
                for name in ("begin", "size", "rows", "num_micro_batches")
            )
            self.is_first = tf.equal(self.begin, 0)
            self.is_whole = tf.equal(self.size, self.rows)
        self.weight = None
        self.earlier_passes = []
        self.computed_twice = []
        self.last_pass = Pass()
        self.micro_ops = self.last_pass.each
        self.empty_ops = self.last_pass.empty
        self.fetches = self.last_pass.fetches
        self.reported = {}
        self.parts = []
        self.own = set()
        self.keys = None
        self._share = None
        self.discard_ops = []
        self.initialize_ops = []
        self.handles = []

    @contextlib.contextmanager
    def as_current(self):
        """Makes this batch the window of the train ops that are made inside."""
        set_current_batch(self)
        try:
            yield
        finally:
            set_current_batch(None)

    @property
    def passes(self) -> list[Pass]:
        """The passes through the batch; the last one is that of `micro_ops`."""
        return [*self.earlier_passes, self.last_pass]

    def share(self) -> tf.Tensor:
        """Returns the micro-batch's share of the batch's examples, a float64 scalar."""
        if self._share is None:
            with tf.control_dependencies(None):
                rows = tf.cast(self.rows, tf.float64)
                self._share = tf.cast(self.size, tf.float64) / rows
        return self._share

    def steps(self, update_step: tf.Variable) -> tf.Tensor:
        """Returns K, here the number of micro-batches in the batch."""
        del update_step
        return tf.identity(self.num_micro_batches)

    def default_weight(self, reduction: str) -> tf.Tensor:
        """Returns the default weight: the micro-batch's examples; 1 for a sum."""
        if reduction == "sum":
            return tf.constant(1.0)
        return tf.cast(self.size, tf.float32)

    def weigh(self, weight: tf.Tensor | None, reduction: str):
        """Returns (weight, weight); for a whole batch on one replica, (weight, 1).

        Raises:
            ValueError: If a whole_batch_loss, which is the batch's already, would be
                weighted in another way.
        """
        if self.computed_twice and (weight is not None or reduction != self.reduction):
            raise ValueError(
                "The loss of a whole batch must not be weighted by micro-batch. "
                f"Received: {'a `weight`' if weight is not None else repr(reduction)} "
                "for a train op beside whole_batch_loss. Leave `weight` out, and pass "
                "`reduction` to microbatch_model_fn."
            )
        if weight is None:
            weight = self.default_weight(reduction)
        if self.weight is None:
            self.weight, self.reduction = weight, reduction
        # One micro-batch of one replica may be the whole batch, and so its own mean.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        has_more = replicas > 1 or reduction == "sum"
        return weight, weight if has_more else self.scale(weight)

    def scale(self, weight: tf.Tensor) -> tf.Tensor:
        """Returns a micro-batch's factor in the sum; exactly 1 for a whole batch."""
        return tf.where(self.is_whole, tf.ones_like(weight), weight)

    def recompute_switch(self) -> tf.Tensor | None:
        """Returns whether layers are recomputed, a scalar; None means always."""
        if self._is_auto and self.should_recompute is None:
            with tf.control_dependencies(None):
                self.should_recompute = tf.compat.v1.placeholder(
                    tf.bool, [], "micro_batch/should_recompute"
                )
        return self.should_recompute

    def at_the_boundary(self):
        """Returns a context without the caller's dependencies on the micro-batch."""
        return tf.control_dependencies(None)

    def opens_window(self, counter: tf.Variable | None) -> tf.Tensor:
        """Returns whether this is the batch's first micro-batch."""
        del counter
        return tf.identity(self.is_first)

    def hand_over(self, counted: tf.Tensor, accumulators: list) -> tf.Tensor:
        """Registers the operations that the hook runs before the train op."""
        self.micro_ops.append(counted.op)
        with tf.control_dependencies(None):
            for variable in variables_of(accumulators):
                self.initialize_ops.append(variable.initializer)
                self.handles.append(variable.handle)
            self.discard_ops += _clear(accumulators)
            self.empty_ops += assign_zeros(accumulators)
            return tf.constant(1, tf.int64)


def _clear(accumulators: list[Accumulator]) -> list[tf.Operation]:
    """Empties this replica's sparse accumulators; the dense ones are overwritten."""
    cleared = []
    for accumulator in accumulators:
        if accumulator.touched is not None:
            rows = touched_rows(read(accumulator.touched))
            shape = tf.concat([tf.shape(rows), tf.shape(accumulator.total)[1:]], 0)
            values = tf.zeros(shape, accumulator.total.dtype)
            cleared.extend(clear_rows(accumulator, rows, values))
    return cleared
