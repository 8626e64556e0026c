"""The kind of window that is one batch, of which the graph sees one micro-batch.

WholeBatch      is made, then `register` gets what there is to run besides the train op
ReplicaBatch    is what `finish` returns: all that a runner feeds, fetches and runs
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from estimator_accum.core.accumulators import (
    Accumulator,
    assign_zeros,
    clear_rows,
    release_sums,
    touched_rows,
    variables_of,
)
from estimator_accum.core.clock import Clock
from estimator_accum.core.current_batch import set_current_batch
from estimator_accum.graph.variables import read
from estimator_accum.microbatch.gather import Exchange, make_exchange
from estimator_accum.microbatch.staging import Slot, stage
from estimator_accum.microbatch.writes import snapshot


@dataclasses.dataclass(frozen=True)
class Pass:
    """Operations of one run through a batch's micro-batches; `register` fills the lists.

    Attributes:
        each: Operations that run with every micro-batch.
        empty: Operations that run in their place on a replica without examples.
        once: Operations that run once, after the last micro-batch of every replica
            that has examples.
        done: Bool placeholders, fed with True from `once` on. They stay unfed only if
            one micro-batch is the whole batch; the last pass then does this one's work.
        is_joint: Whether `once` reads other replicas' results; it then runs on
            replicas without examples too, and no other pass can do its work.
        exchange: Exchange of rows among processes before `once`; None within a process.
    """

    each: list[tf.Operation] = dataclasses.field(default_factory=list)
    empty: list[tf.Operation] = dataclasses.field(default_factory=list)
    once: list[tf.Operation] = dataclasses.field(default_factory=list)
    done: list[tf.Tensor] = dataclasses.field(default_factory=list)
    is_joint: bool = False
    exchange: Exchange | None = None


class ReplicaBatch(NamedTuple):
    """One replica's part of the graph, complete.

    Attributes:
        batch: Its batch, to which nothing is added any more.
        snapshot: Operations that copy the variables that micro-batches write.
        roll_back: Operations that undo the micro-batches so far, before a retry.
        release: Operations that free the memory of the last batch's sums.
        initialize: Operations that run once in a new session, because the variables
            here are in no collection.
        passes: The passes, in their order.
        reported: Tensors of the micro-batch with whose values for the batch the train
            op is fed, and what computes these after the last pass. If one micro-batch
            is the batch, its own are fetched with it.
        refusals: Operations that fail if a batch cannot be cut, and the sentences.
        spot_check: Check before the first update; None if there is nothing to check.
    """

    batch: "WholeBatch"
    snapshot: tuple[tf.Operation, ...]
    roll_back: tuple[tf.Operation, ...]
    release: tuple[tf.Operation, ...]
    initialize: tuple[tf.Operation, ...]
    passes: tuple[Pass, ...]
    reported: dict[tf.Tensor, tf.Tensor]
    refusals: dict[tf.Operation, str]
    spot_check: Any


class WholeBatch(Clock):
    """One replica's batch; the graph sees one micro-batch of it at a time.

    Args:
        data: "features" and "labels" from input_fn, in any structure.
        reduction: "mean" or "sum", how the loss reduces its examples.
        is_auto: Whether a batch that runs out of memory is cut finer and retried.
        is_trained: Whether train ops run, which they do not in an evaluation.

    Attributes:
        begin, size, rows: Scalar int64 placeholders [examples]: the micro-batch is the
            half-open range [begin, begin + size) of a batch of `rows` examples.
        num_micro_batches: Scalar int64 placeholder, the number of micro-batches in the
            batch.
        is_first: Scalar bool, whether this is the batch's first micro-batch.
        is_whole: Scalar bool, whether the batch is one micro-batch.
        names: Names of the features and labels, such as `features['x']`.
        stage: Fetches that take the next batch: the shape of each feature and label,
            and the operations that store them.
        sliced: The current micro-batch, in the structure of `data`.
        parts: The components of `data`, sliced and whole.
        should_recompute: Scalar bool placeholder, whether layers are recomputed; None
            if the model has none, or always recomputes.
        reduction, weight: As given for the first train op; before, `weight` is None.
        last_pass: The pass with gradients.
        computed_twice: Outputs of whole_batch_loss, which an earlier pass computes too.
        slots: Handles of the slots that micro-batches write.
        constants: Names of features that may belong to no example, and must not then be
            as many as the examples of a batch that is cut.
    """

    def __init__(
        self,
        data: dict,
        reduction: str,
        is_auto: bool = False,
        is_trained: bool = True,
    ):
        with tf.name_scope("micro_batch"):
            self.begin, self.size, self.rows, self.num_micro_batches = (
                tf.compat.v1.placeholder(tf.int64, [], name)
                for name in ("begin", "size", "rows", "num_micro_batches")
            )
            self.is_first = tf.equal(self.begin, 0)
            self.is_whole = tf.equal(self.num_micro_batches, 1)
        with tf.device("/cpu:0"):
            staged = stage(data, self.begin, self.size)
        self.names, self.stage, self.parts, self.sliced = staged
        self.reduction, self.weight = reduction, None
        self.should_recompute = None
        self._is_auto, self._is_trained = is_auto and is_trained, is_trained
        self.last_pass, self._first_passes = Pass(), {}  # by whether they are joint
        self.micro_ops = self.last_pass.each
        self._initialize, self._roll_back, self.handles = [], [], []
        self._release, self.slots, self.constants = [], [], []
        self.computed_twice, self._reported, self._refusals = [], {}, {}
        self._is_finished = False

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
        """The passes through the batch in their order; the last one is `last_pass`."""
        return [*self.earlier_passes, self.last_pass]

    @property
    def earlier_passes(self) -> list[Pass]:
        """The passes before the last one, of which the second may need the first."""
        found = map(self._first_passes.get, (True, False))
        return [each for each in found if each is not None]

    def first_pass(self, is_joint: bool = False) -> Pass:
        """Returns the pass that collects rows; all that is collected shares it.

        Args:
            is_joint: Whether rows of all replicas are collected.
        """
        if is_joint not in self._first_passes:
            exchange = make_exchange(self.rows) if is_joint else None
            self._first_passes[is_joint] = Pass(is_joint=is_joint, exchange=exchange)
        return self._first_passes[is_joint]

    def slot(self, name: str, dtype: tf.DType, shape=()) -> Slot:
        """Returns a new slot, which micro-batches may write and no retry restores."""
        slot = Slot(name, dtype, tf.TensorShape(shape))
        self.register(handles=[slot.handle])
        self.slots.append(slot.handle)
        return slot

    def register(
        self,
        of: Pass | None = None,
        *,
        each: Iterable[tf.Operation] = (),
        empty: Iterable[tf.Operation] = (),
        once: Iterable[tf.Operation] = (),
        done: Iterable[tf.Tensor] = (),
        initialize: Iterable[tf.Operation] = (),
        roll_back: Iterable[tf.Operation] = (),
        handles: Iterable[tf.Tensor] = (),
        twice: Iterable[tf.Tensor] = (),
        reported: Mapping[tf.Tensor, tf.Tensor] | None = None,
        refusals: Mapping[tf.Operation, str] | None = None,
    ) -> None:
        """Adds operations to run besides the train op.

        Args:
            of: The pass of `each`, `empty`, `once` and `done`; None is the last one.
            each: Operations that run with every micro-batch.
            empty: Operations that run in their place on a replica without examples.
            once: Operations that run once, after the micro-batches.
            done: Placeholders that are fed from `once` on.
            initialize: Operations that run once in a new session.
            roll_back: Operations that undo the micro-batches so far, before a retry.
            handles: Handles of variables that micro-batches may write and that a retry
                does not restore.
            twice: Outputs of whole_batch_loss.
            reported: Tensors of the micro-batch and their values for the batch.
            refusals: Operations that fail if a batch cannot be cut, and the sentences.

        Raises:
            ValueError: If the batch is finished.
        """
        if self._is_finished:
            raise ValueError(
                "What runs with every batch must be made in the model_fn. Received: a "
                "gradient of whole_batch_loss, first taken after the model_fn has "
                "returned. Take it in the model_fn."
            )
        of = of or self.last_pass
        of.each.extend(each)
        of.empty.extend(empty)
        of.once.extend(once)
        of.done.extend(done)
        self._initialize.extend(initialize)
        self._roll_back.extend(roll_back)
        self.handles.extend(handles)
        self.computed_twice.extend(twice)
        self._reported.update(reported or {})
        self._refusals.update(refusals or {})

    def register_sums(
        self, each: Iterable[tf.Operation], accumulators: list[Accumulator]
    ) -> None:
        """Adds operations that add each micro-batch to accumulators."""
        variables = variables_of(accumulators)
        # Dense ones are written by the first micro-batch, and until then take no memory.
        sparse = variables_of(
            [each for each in accumulators if each.touched is not None]
        )
        self._release += release_sums(accumulators)
        self.register(
            each=each,
            empty=assign_zeros(accumulators),
            initialize=[variable.initializer for variable in sparse],
            handles=[variable.handle for variable in variables],
        )

    def finish(
        self, fetched: Iterable[tf.Tensor] = (), spot_check=None
    ) -> ReplicaBatch:
        """Returns all passes of the batch; nothing may be registered any more.

        Args:
            fetched: Tensors that may be fetched with each micro-batch.
            spot_check: Check before the first update; None if there is nothing to check.
        """
        self._is_finished = True
        take, restore = [], []
        if self._is_auto or not self._is_trained or spot_check is not None:
            operations = [*self.micro_ops, *(tensor.op for tensor in fetched)]
            take, restore = snapshot(operations, self.handles)
        return ReplicaBatch(
            batch=self,
            snapshot=tuple(take),
            roll_back=(*restore, *self._roll_back, *self._release),
            release=tuple(self._release),
            initialize=tuple(self._initialize),
            passes=tuple(self.passes),
            reported=self._reported,
            refusals=self._refusals,
            spot_check=spot_check,
        )

    def feeds(self, begin: int, size: int, rows: int, number: int, recompute: bool):
        """Returns the feeds of one micro-batch.

        Args:
            begin: Its first example.
            size: Its number of examples.
            rows: Number of examples in the batch.
            number: Number of micro-batches in the batch.
            recompute: Whether layers that can be are recomputed.
        """
        feeds = {
            self.begin: begin,
            self.size: size,
            self.rows: rows,
            self.num_micro_batches: number,
        }
        if self.should_recompute is not None:
            feeds[self.should_recompute] = recompute
        return feeds

    def default_weight(self, reduction: str) -> tf.Tensor:
        """Returns the default weight: the micro-batch's examples; 1 for a sum."""
        if reduction == "sum":
            return tf.constant(1.0)
        return tf.cast(self.size, tf.float32)

    def scale(self, weight: tf.Tensor) -> tf.Tensor:
        """Returns a micro-batch's factor in the sum; exactly 1 for a whole batch."""
        return tf.where(self.is_whole, tf.ones_like(weight), weight)

    # The batch as a clock, and what a micro-batch weighs:

    def steps(self, update_step: tf.Variable) -> tf.Tensor:
        """Returns K, here the number of micro-batches in the batch."""
        del update_step
        return tf.identity(self.num_micro_batches)

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

    def recompute_switch(self) -> tf.Tensor | None:
        """Returns whether layers are recomputed, a scalar; None means always."""
        if self._is_auto and self.should_recompute is None:
            with tf.control_dependencies(None):
                self.should_recompute = tf.compat.v1.placeholder(
                    tf.bool, [], "micro_batch/should_recompute"
                )
        return self.should_recompute

    @property
    def keeps_sums(self) -> bool:
        """Whether train ops run: one that is made in an evaluation never does."""
        return self._is_trained

    def at_the_boundary(self):
        """Returns a context without the caller's dependencies on the micro-batch."""
        return tf.control_dependencies(None)

    def opens_window(self, counter: tf.Variable | None) -> tf.Tensor:
        """Returns whether this is the batch's first micro-batch."""
        del counter
        return tf.identity(self.is_first)

    def hand_over(self, counted: tf.Tensor, accumulators: list) -> tf.Tensor:
        """Registers the operations that the hook runs before the train op."""
        with tf.control_dependencies(None):
            if self._is_trained:
                self.register_sums([counted.op], accumulators)
                self.register(roll_back=_clear(accumulators))
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
