"""Where the batch is the window: what the core asks of `microbatch_model_fn`.

Step-wise, a window is K runs of the train op, and variables remember how far it is.
Inside `microbatch_model_fn` a window is one batch, whose micro-batches a hook runs one
after the other before it runs the train op, and feeds say how far it is.
"""

import contextlib
import threading

import tensorflow as tf

_current = threading.local()  # replicas build their graphs in threads of their own


class BatchWindow:
    """One replica's batch, of which the graph sees one micro-batch at a time.

    Attributes:
        begin, size, rows: Scalar int64 placeholders [examples]: the micro-batch is
            `size` examples from `begin` on, of a batch of `rows`.
        num_micro_batches: Scalar int64 placeholder, of the batch.
        is_first: Scalar bool, whether this is the batch's first micro-batch.
        is_whole: Scalar bool, whether the batch is one micro-batch.
        reduction: "mean" or "sum", of the losses.
        weight: Scalar, what the micro-batch counts for in the loss; known when the first
            train op is made.
        micro_ops: What runs with every micro-batch.
        discard_ops: What forgets the micro-batches so far, before they are run again.
        empty_ops: What runs instead of micro-batches in a replica without examples.
        initialize_ops: What begins a session: nothing here is in a collection.
        handles: Of what the micro-batches may write and need not restore.
    """

    def __init__(self, reduction: str):
        self.reduction = reduction
        with tf.name_scope("micro_batch"):
            self.begin, self.size, self.rows, self.num_micro_batches = (
                tf.compat.v1.placeholder(tf.int64, [], name)
                for name in ("begin", "size", "rows", "num_micro_batches")
            )
            self.is_first = tf.equal(self.begin, 0)
            self.is_whole = tf.equal(self.size, self.rows)
        self.weight = None
        self.micro_ops = []
        self.discard_ops = []
        self.empty_ops = []
        self.initialize_ops = []
        self.handles = []

    @contextlib.contextmanager
    def as_current(self):
        """Makes this the window of the train ops that are made inside."""
        _current.batch = self
        try:
            yield
        finally:
            _current.batch = None

    def take_over(self, reduction: str) -> tuple:
        """Returns the train op's (K, reduction), whatever it was asked for."""
        if self.reduction == "sum":
            reduction = "sum"
        return (lambda update_step: self.num_micro_batches), reduction

    def default_weight(self, reduction: str) -> tf.Tensor:
        """Returns what the micro-batch counts for where nobody says: its examples."""
        if reduction == "sum":
            return tf.constant(1.0)
        return tf.cast(self.size, tf.float32)

    def scale(self, weight: tf.Tensor) -> tf.Tensor:
        """Returns the factor of losses and gradients: exactly 1 for a whole batch."""
        return tf.where(self.is_whole, tf.ones_like(weight), weight)


def current_batch() -> BatchWindow | None:
    """Returns the batch that is the window here; None where micro-steps are."""
    return getattr(_current, "batch", None)
