"""Clocks: when a window closes.

    EveryRun      every run of the train op is a window
    EveryKRuns    K runs of the train op are one, counted by a variable
    WholeBatch    a batch of `microbatch_model_fn` is one: a hook runs its micro-batches
                  one after the other, then the train op; placeholders give the position

A clock counts. It knows neither a window's sums nor the options. `WholeBatch` is in
estimator_accum/microbatch/batch.py.
"""

import contextlib
from collections.abc import Callable

import tensorflow as tf

from estimator_accum.core.current_batch import current_batch
from estimator_accum.core.options import AccumulationSteps, Options
from estimator_accum.graph.branches import run_either
from estimator_accum.graph.devices import of_strings
from estimator_accum.graph.variables import add_to, set_to


class Clock:
    """Defaults of all clocks."""

    keeps_sums = True  # a window may have several micro-batches
    has_counter = False  # a variable counts micro-steps

    def steps(self, update_step: tf.Variable) -> tf.Tensor:
        """Returns K of the open window, an int64 scalar [micro-steps per update]."""
        raise NotImplementedError

    def opens_window(self, counter: tf.Variable | None) -> tf.Tensor:
        """Returns whether this micro-step is the window's first, a scalar bool."""
        raise NotImplementedError

    def once_per_window(self, is_first: tf.Tensor, make: Callable) -> list:
        """Runs the operations of `make()` with a window's first micro-step.

        Returns:
            Operations after which they have run.
        """
        return [run_either(is_first, make, list)]

    def hand_over(self, counted: tf.Tensor, loss, accumulators: list) -> tf.Tensor:
        """Returns the tensors that the boundary waits for, after a micro-batch was added.

        Args:
            counted: 1 if the window counts the micro-batch, else 0.
            loss: The micro-batch's loss; None if unknown.
            accumulators: All accumulators of the window.
        """
        del loss, accumulators
        return counted

    def at_the_boundary(self):
        """Returns the context for the operations that follow the micro-batch."""
        return contextlib.nullcontext()

    def count(self, counter, counted: list[tf.Tensor], steps: tf.Tensor):
        """Returns (whether the window closes, number of micro-steps in it now)."""
        del counter, counted
        return tf.constant(True), steps

    def branch(self, counter, is_boundary: tf.Tensor, update: Callable, skip: Callable):
        """Returns `update()` at the boundary, else `skip()`."""
        del counter, is_boundary, skip
        return update()


class EveryRun(Clock):
    """Every micro-batch is a window."""

    keeps_sums = False

    def steps(self, update_step: tf.Variable) -> tf.Tensor:
        """Returns K, which is 1 [micro-steps per update]."""
        del update_step
        return tf.constant(1, tf.int64)


class EveryKRuns(Clock):
    """K micro-steps make a window.

    Args:
        steps: K, or a callable of `update_step`.
    """

    has_counter = True

    def __init__(self, steps: AccumulationSteps):
        self._steps = steps

    def steps(self, update_step: tf.Variable) -> tf.Tensor:
        """Returns K of the open window [micro-steps per update]."""
        if callable(self._steps):
            return _scheduled(self._steps(update_step))
        return tf.constant(self._steps, tf.int64)

    def opens_window(self, counter: tf.Variable | None) -> tf.Tensor:
        """Returns whether the counter is 0."""
        return tf.equal(counter.read_value(), 0)

    def count(self, counter, counted: list[tf.Tensor], steps: tf.Tensor):
        """Increases the counter after every replica has added its micro-batch."""
        with tf.control_dependencies(counted):
            done = add_to(counter, counted[0])
        return done >= steps, done

    def branch(self, counter, is_boundary: tf.Tensor, update: Callable, skip: Callable):
        """Updates in a separate branch, and resets the counter there."""

        def update_and_begin_anew():
            result = update()
            with tf.control_dependencies(tf.nest.flatten(result)):
                reset = set_to(counter, 0)
            with tf.control_dependencies([reset]):
                return tf.nest.map_structure(tf.identity, result)

        return tf.cond(is_boundary, update_and_begin_anew, skip)


def _scheduled(steps) -> tf.Tensor:
    """Returns the K that a callable returned.

    Raises:
        ValueError: If it is anything but an integer scalar.
    """
    if steps is not None:
        steps = tf.convert_to_tensor(steps)
    if steps is None or not steps.dtype.is_integer or steps.shape.rank not in (0, None):
        received = None
        if steps is not None:
            received = f"{steps.dtype.name} of shape {steps.shape}"
        raise ValueError(
            "`gradient_accumulation_steps` must return an integer scalar. Received: "
            f"{received}. Cast it to tf.int64."
        )
    # A schedule below 1 is a mistake: each window would close after one micro-step.
    with of_strings():
        at_least_one = tf.debugging.assert_positive(
            steps, message="`gradient_accumulation_steps` must return an integer >= 1"
        )
    with tf.control_dependencies([at_least_one]):
        return tf.cast(tf.identity(steps), tf.int64)


def clock_of(options: Options) -> Clock:
    """Returns the clock of a train op that is made here."""
    batch = current_batch()
    if batch is not None:
        return batch
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    # Each of several replicas skips its own micro-batches: that takes accumulators.
    skips = replicas > 1 and options.on_nonfinite == "skip_micro_batch"
    if options.gradient_accumulation_steps == 1 and not skips:
        return EveryRun()
    return EveryKRuns(options.gradient_accumulation_steps)
