"""Facts of the analysis that every micro-batch checks."""

from collections.abc import Iterable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.graph.internals import original_of


class OwnRows(NamedTuple):
    """Rows that are looked up by number belong to their own examples.

    Attributes:
        places: The numbers.
        axis: Their axis of examples.
        table: The tensor in which they are looked up; its first axis has the examples.
    """

    places: tf.Tensor
    axis: int
    table: tf.Tensor

    @property
    def lookups(self) -> list[tf.Operation]:
        """The operations that look up values of other examples where it does not hold."""
        return [
            user
            for user in self.places.consumers()
            if any(t is self.table for t in user.inputs) and original_of(user) is None
        ]

    def holds(self, examples: tf.Tensor, is_whole: tf.Tensor) -> tf.Tensor:
        """Returns whether it holds, a scalar bool.

        Args:
            examples: Their number in the micro-batch, a scalar.
            is_whole: Whether these are all of the batch, a scalar.
        """
        distance = tf.shape(self.table, tf.int64)[0] // examples
        span = tf.shape(self.places, tf.int64)[self.axis] // examples
        shape = [1] * self.axis + [-1] + [1] * (self.places.shape.rank - self.axis - 1)
        numbers = tf.reshape(tf.range(examples * span) // span, shape)
        are_own = tf.equal(tf.cast(self.places, tf.int64) // distance, numbers)
        return tf.logical_or(is_whole, tf.reduce_all(are_own))

    @property
    def sentence(self) -> str:
        """The refusal where it does not hold."""
        return (
            "Each example may only look up values of its own. Received: "
            f"{self.places.name}, which reads values of other examples. Train or "
            "evaluate without micro-batches."
        )


class EqualEntries(NamedTuple):
    """Two sparse or ragged tensors have as many entries of each example.

    Attributes:
        one: Indices of a sparse tensor, or row splits of a ragged one.
        other: Those of the other one.
    """

    one: tf.Tensor
    other: tf.Tensor

    def holds(self, examples: tf.Tensor, is_whole: tf.Tensor) -> tf.Tensor:
        """Returns whether it holds; in the whole batch the number of all is enough."""
        del examples
        numbers = [part[:, 0] if part.shape.rank == 2 else part for part in self]
        one, other = (tf.cast(part, tf.int64) for part in numbers)
        are_alike = tf.raw_ops.Equal(x=one, y=other, incompatible_shape_error=False)
        has_length = tf.equal(tf.size(one), tf.size(other))
        are_alike = tf.logical_and(has_length, tf.reduce_all(are_alike))
        totals = [
            tf.size(part, tf.int64) if indices.shape.rank == 2 else part[-1]
            for indices, part in zip(self, (one, other), strict=True)
        ]
        are_as_many = tf.logical_and(is_whole, tf.equal(*totals))
        return tf.logical_or(are_alike, are_as_many)

    @property
    def sentence(self) -> str:
        """The refusal where it does not hold."""
        return (
            "Sparse or ragged tensors that are combined must have as many entries of each "
            f"example. Received: {self.one.name} and {self.other.name}, which have "
            "others. Give each entry of one tensor an entry of the other, such as each "
            "word one weight other than 0."
        )


class LastEntry(NamedTuple):
    """The last row of a batch has an entry, as TensorFlow needs to know of it.

    Attributes:
        numbers: Numbers of the rows of all entries, sorted.
        rows: Number of rows in the micro-batch, a scalar.
        is_last: Whether the micro-batch is the last one of its batch, a scalar.
    """

    numbers: tf.Tensor
    rows: tf.Tensor
    is_last: tf.Tensor

    def holds(self, examples: tf.Tensor, is_whole: tf.Tensor) -> tf.Tensor:
        """Returns whether it holds, a scalar bool."""
        del examples, is_whole
        numbers = tf.cast(self.numbers, tf.int64)
        has_entry = tf.reduce_any(tf.equal(numbers, self.rows - 1))
        return tf.logical_or(has_entry, tf.logical_not(self.is_last))

    @property
    def sentence(self) -> str:
        """The refusal where it does not hold."""
        return (
            "The last example of a batch must have an entry in a sparse tensor that is "
            "reduced without a number of rows: TensorFlow computes no row for it. "
            f"Received: {self.numbers.name}. Call tf.nn.safe_embedding_lookup_sparse in "
            "place of tf.nn.embedding_lookup_sparse, or reduce with num_segments."
        )


def distinct(guards: Iterable) -> list:
    """Returns each fact once, though several were taken down for the same tensors."""
    facts = {}
    for guard in guards:
        parts = [part.ref() for part in guard if isinstance(part, tf.Tensor)]
        facts.setdefault((type(guard), *parts), guard)
    return [*facts.values()]
