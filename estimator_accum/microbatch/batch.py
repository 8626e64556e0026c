"""A window that is one batch, of which the graph sees one micro-batch at a time."""

import copy
from collections.abc import Callable, Iterable

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
from estimator_accum.core.current_batch import made_inside
from estimator_accum.core.slice_list import SliceList, clear
from estimator_accum.graph.outermost import in_graph
from estimator_accum.graph.variables import read
from estimator_accum.microbatch.staging import stage
from estimator_accum.microbatch.work import Works
from estimator_accum.rows.sizes import Size
from estimator_accum.rows.states import State


class WholeBatch(Clock):
    """One replica's batch; the graph sees one micro-batch of it at a time.

    Args:
        data: "features" and "labels" from input_fn, in any structure.
        reduction: "mean" or "sum", how the loss reduces its examples.
        is_auto: Whether a batch that runs out of memory is split finer and retried.
        is_trained: Whether train ops run, which they do not in an evaluation.
        batch_norm: "batch" or "micro_batch", whose statistics batch normalization uses.

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
        rows_of_others: (the micro-batch's rows of a value of no example, their state).
        should_recompute: Scalar bool placeholder, whether layers are recomputed; None
            if the model has none, or always recomputes.
        reduction, weight: As given for the first train op; before, `weight` is None.
        has_own_weight: Whether the caller gave this weight.
        losses: Losses of the train ops of this library, as far as they are known.
        is_auto: As given, in training.
        batch_norm: As given.
        works: The work that runs beside the train op.
    """

    def __init__(
        self,
        data: dict,
        reduction: str,
        is_auto: bool = False,
        is_trained: bool = True,
        batch_norm: str = "batch",
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
        self.rows_of_others = []
        self.reduction, self.weight, self.has_own_weight = reduction, None, False
        self.should_recompute, self._repeats, self.losses = None, None, []
        self.is_auto, self._is_trained = is_auto and is_trained, is_trained
        self.batch_norm = batch_norm
        self.works = Works(self.rows)

    def again(self) -> "WholeBatch":
        """Returns the same batch, with other work, once it is staged."""
        other, (shapes, _) = copy.copy(self), self.stage
        other.stage, other.works = (shapes, []), Works(self.rows)
        return other

    def take_rows(self, value: tf.Tensor, axis: int, span: int) -> tf.Tensor:
        """Returns the micro-batch's rows of a value of the whole batch, not of its data.

        Args:
            value: A value that no example decides.
            axis: Its axis with rows of the examples.
            span: Number of rows for each example.
        """
        with tf.control_dependencies(None):
            begin, end = self.begin * span, (self.begin + self.size) * span
            rows = value[(*[slice(None)] * axis, slice(begin, end))]
        shape = value.shape.as_list()
        rows.set_shape([*shape[:axis], None, *shape[axis + 1 :]])
        self.rows_of_others.append((rows, State("rows", axis, Size(span))))
        return rows

    def divisor(self, number: tf.Tensor) -> tf.Tensor:
        """Returns a number of examples, 1 in place of 0, to divide by.

        It is 0 on a replica without examples. Only steps compute values from none.
        """
        is_step = number.graph.building_function
        return tf.maximum(number, 1) if is_step else number

    @property
    def has_train_op(self) -> bool:
        """Returns whether a train op of this library trains on this batch."""
        return self.weight is not None

    def as_current(self):
        """Returns a context in which this batch is the window of train ops."""
        return made_inside(self)

    def feeds(self, begin: int, size: int, rows: int, number: int, recompute: bool):
        """Returns the feeds of one micro-batch, by the names of tensors.

        Args:
            begin: Its first example.
            size: Its number of examples.
            rows: Number of examples in the batch.
            number: Number of micro-batches in the batch.
            recompute: Whether layers that can be are recomputed.
        """
        feeds = {
            self.begin.name: begin,
            self.size.name: size,
            self.rows.name: rows,
            self.num_micro_batches.name: number,
        }
        if self.should_recompute is not None:
            feeds[self.should_recompute.name] = recompute
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
        if self.works.total.twice and (
            weight is not None or reduction != self.reduction
        ):
            raise ValueError(
                "The loss of a whole batch must not be weighted by micro-batch. "
                f"Received: {'a `weight`' if weight is not None else repr(reduction)} "
                "for a train op beside whole_batch_loss. Leave `weight` out, and pass "
                "`reduction` to microbatch_model_fn."
            )
        has_own = weight is not None
        weight = weight if has_own else self.default_weight(reduction)
        if self.weight is None:
            self.weight, self.reduction = weight, reduction
            self.has_own_weight = has_own
        # One micro-batch of one replica may be the whole batch, and so its own mean.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        has_more = replicas > 1 or reduction == "sum"
        return weight, weight if has_more else self.scale(weight)

    def repeats(self, global_step: tf.Tensor) -> tf.Tensor:
        """Returns the batches before this one, in a row, at the same global_step.

        They are 0 if every batch moves it, as an Estimator's train op does.
        """
        if self._repeats is None:
            with tf.control_dependencies(None), tf.device("/cpu:0"):
                slot = self.works.slot("repeats", tf.int64, [2])
                last, repeats = tf.unstack(slot.read())
                repeats = tf.where(tf.equal(last, global_step), repeats + 1, 0)
                begun = slot.write(tf.stack([global_step, repeats]))
                initialize = slot.write(tf.constant([-1, 0], tf.int64))
                self._repeats = slot.read()[1]
            self.works.add(before=[begun], initialize=[initialize])
        return self._repeats

    def recompute_switch(self) -> tf.Tensor | None:
        """Returns whether layers are recomputed, a scalar; None means always."""
        if self.is_auto and self.should_recompute is None:
            with tf.control_dependencies(None):
                self.should_recompute = tf.compat.v1.placeholder(
                    tf.bool, [], "micro_batch/should_recompute"
                )
        return self.should_recompute

    @property
    def keeps_sums(self) -> bool:
        """Returns whether train ops run: one that is made in an evaluation never does."""
        return self._is_trained

    def at_the_boundary(self):
        """Returns a context without the caller's dependencies on the micro-batch."""
        return tf.control_dependencies(None)

    def opens_window(self, counter: tf.Variable | None) -> tf.Tensor:
        """Returns whether this is the batch's first micro-batch."""
        del counter
        return tf.identity(self.is_first)

    def once_per_window(self, is_first: tf.Tensor, make: Callable) -> list:
        """Runs the operations of `make()` before the batch, once for all its passes."""
        del is_first
        self.works.add(before=make())
        return []

    def hand_over(self, counted: tf.Tensor, loss, accumulators: list) -> tf.Tensor:
        """Adds the operations that the hook runs before the train op."""
        self.losses += [] if loss is None else [loss]
        with tf.control_dependencies(None):
            if self._is_trained:
                self.add_sums([counted.op], accumulators)
                self.works.add(roll_back=_clear(accumulators))
            return tf.constant(1, tf.int64)

    def add_sums(
        self, commits: Iterable[tf.Operation], accumulators: list[Accumulator]
    ) -> None:
        """Adds the work of accumulators.

        Args:
            commits: Operations that add each micro-batch.
            accumulators: The accumulators.
        """
        variables = variables_of(accumulators)
        # Dense ones are written by the first micro-batch, and until then take no memory.
        sparse = variables_of([a for a in accumulators if a.touched is not None])
        if tf.compat.v1.executing_eagerly_outside_functions():  # they are initialized
            sparse = []
        self.works.add(
            release=release_sums(accumulators),
            micro_ops=list(commits),
            empty=assign_zeros(accumulators),
            initialize=[variable.initializer for variable in sparse],
            handles=[in_graph(variable.handle) for variable in variables],
        )


def _clear(accumulators: list[Accumulator]) -> list[tf.Operation]:
    """Empties this replica's sparse accumulators; the dense ones are overwritten."""
    cleared = []
    for accumulator in accumulators:
        if isinstance(accumulator, SliceList):
            cleared.extend(clear(accumulator))
        elif accumulator.touched is not None:
            rows = touched_rows(read(accumulator.touched))
            shape = tf.concat([tf.shape(rows), tf.shape(accumulator.total)[1:]], 0)
            values = tf.zeros(shape, accumulator.total.dtype)
            total = tf.IndexedSlices(values, rows)
            cleared.extend(clear_rows(accumulator, total))
    return cleared
