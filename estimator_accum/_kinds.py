"""Three kinds of window: when each one closes, and where its operations go.

    Plain         one run of the train op; its micro-batch is the whole window
    MicroSteps    K runs of the train op, counted by a variable
    WholeBatch    one batch of `microbatch_model_fn`: a hook runs its micro-batches one
                  after the other, then the train op; placeholders give the position

The rule (estimator_accum/_micro_step.py) is the same for all three.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from estimator_accum._gradients import scaled
from estimator_accum._graph import add_to, nan, set_to
from estimator_accum._micro_step import MicroBatch, Terms, accumulate, mean_loss
from estimator_accum._window import AccumulationSteps, accumulation_steps_tensor

_current = threading.local()  # replicas build their graphs in threads of their own


class Added(NamedTuple):
    """The result of adding one micro-batch to a window.

    Attributes:
        gradients: Gradients and scalars of a window without accumulators; else None.
        counted: int64 scalar, 1 if the window counts the micro-batch, else 0.
        mean_loss: Mean loss of this replica's micro-batches in the window so far.
    """

    gradients: list | None
    counted: tf.Tensor
    mean_loss: tf.Tensor


class Kind:
    """Defaults of all kinds."""

    keeps_sums = True  # in accumulators
    has_counter = False  # a variable that counts micro-steps
    spans_runs = False  # a window is several runs of the train op
    needs_weight = True  # to compute the mean

    def weigh(self, weight: tf.Tensor | None, reduction: str):
        """Returns (a micro-batch's weight, factor of its loss and gradients).

        Args:
            weight: Scalar, as the caller gave it; None if not given.
            reduction: "mean" or "sum".
        """
        del reduction
        weight = tf.constant(1.0) if weight is None else weight
        return weight, weight

    def is_mean(self) -> tf.Tensor | None:
        """Returns whether the window's sum is already its mean; None means False."""
        return None

    def recompute_switch(self) -> tf.Tensor | None:
        """Returns whether layers are recomputed, a scalar; None means always."""
        return None

    def at_the_boundary(self):
        """Returns the context for the operations that follow the micro-batch."""
        return contextlib.nullcontext()

    def count(self, counter, counted: list[tf.Tensor], steps: tf.Tensor):
        """Returns (whether the window closes, number of micro-steps in it now)."""
        del counter, counted
        return tf.constant(True), steps

    def close(self, counter, is_boundary, update: Callable, otherwise: Callable):
        """Returns `update()` at the boundary, else `otherwise()`."""
        del counter, is_boundary, otherwise
        return update()


class Plain(Kind):
    """Every micro-batch is a window.

    Args:
        num_replicas: Number of replicas that train in sync.
    """

    keeps_sums = False

    def __init__(self, num_replicas: int):
        self.needs_weight = num_replicas > 1

    def steps(self, update_step: tf.Variable) -> tf.Tensor:
        """Returns K, which is 1 [micro-steps per update]."""
        del update_step
        return tf.constant(1, tf.int64)

    def add(self, terms: Terms, counter, micro_batch: MicroBatch, update_ops) -> Added:
        """Passes on the micro-batch without accumulating it."""
        del counter
        gradients, scale = micro_batch.gradients, micro_batch.scale
        if scale is not None and self.needs_weight:
            gradients = [scaled(gradient, scale) for gradient in gradients]
        loss = micro_batch.loss
        if loss is None:
            loss = nan(micro_batch.scalars[0].dtype)
        with tf.control_dependencies(update_ops):
            counted = tf.identity(tf.constant(1, tf.int64))
        return Added([*gradients, *micro_batch.scalars], counted, loss)


class MicroSteps(Kind):
    """K micro-steps make a window.

    Args:
        steps: K, or a callable of `update_step`.
    """

    has_counter = True

    def __init__(self, steps: AccumulationSteps):
        self._steps = steps
        self.spans_runs = callable(steps) or steps != 1

    def steps(self, update_step: tf.Variable) -> tf.Tensor:
        """Returns K of the open window [micro-steps per update]."""
        return accumulation_steps_tensor(self._steps, update_step)

    def add(self, terms: Terms, counter, micro_batch: MicroBatch, update_ops) -> Added:
        """Accumulates the micro-batch."""
        counted = accumulate(
            terms, micro_batch, lambda: tf.equal(counter.read_value(), 0)
        )
        with tf.control_dependencies([counted]):
            mean = mean_loss(terms)
        with tf.control_dependencies(update_ops):
            return Added(None, tf.identity(counted), mean)

    def count(self, counter, counted: list[tf.Tensor], steps: tf.Tensor):
        """Increases the counter after every replica has added its micro-batch."""
        with tf.control_dependencies(counted):
            done = add_to(counter, counted[0])
        return done >= steps, done

    def close(self, counter, is_boundary, update: Callable, otherwise: Callable):
        """Updates in a separate branch, and resets the counter there."""

        def update_and_begin_anew():
            result = update()
            with tf.control_dependencies(tf.nest.flatten(result)):
                reset = set_to(counter, 0)
            with tf.control_dependencies([reset]):
                return tf.nest.map_structure(tf.identity, result)

        return tf.cond(is_boundary, update_and_begin_anew, otherwise)


def current_batch() -> Kind | None:
    """Returns the batch that is the window; None outside `microbatch_model_fn`."""
    return getattr(_current, "batch", None)


def set_current_batch(batch: Kind | None) -> None:
    """Makes a batch the window of the train ops that this thread makes."""
    _current.batch = batch


@contextlib.contextmanager
def own_gradients():
    """Leaves gradients as they are in `microbatch_model_fn`, for sums of our own."""
    before = are_gradients_own()
    _current.are_gradients_own = True
    try:
        yield
    finally:
        _current.are_gradients_own = before


def are_gradients_own() -> bool:
    """Returns whether this thread computes gradients that no one else sums."""
    return getattr(_current, "are_gradients_own", False)
