"""Policies for gradients that are NaN or infinite: `on_nonfinite`.

    "raise"             the micro-step fails, before anything is accumulated
    "skip_micro_batch"  the micro-batch is left out, and its window continues
    "skip_window"       the window ends without an update

The window after a skipped one always starts clean.
"""

import re
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.gradients import Gradient, half_squared_norms, values_of
from estimator_accum.graph.branches import either, run_either
from estimator_accum.graph.devices import of_strings

_MOST_NAMES = 3  # variables that an error names
_HEALTH = 2  # mode with two numbers: the tensor's id, and 1 for NaN or infinity


class CheckedValues(NamedTuple):
    """Values that a policy checks.

    Attributes:
        names: Names of the gradients' variables.
        micro_step: The micro-step's number, for errors; None if unknown.
        gradients: Gradients, or sums of them.
        scalars: The weight and, if it is known, the loss.
    """

    names: list[str]
    micro_step: tf.Tensor | None
    gradients: list[Gradient]
    scalars: list[tf.Tensor]


class Policy(NamedTuple):
    """Treatment of NaN and infinity; by default the optimizer's, which lowers its scale.

    Attributes:
        checks_micro_batches: Whether every micro-step checks its sums before it writes
            them, not only the boundary.
        may_skip: Whether a micro-batch is left out, or a window ends without an update.
        raises: Whether the micro-step fails, and names the variables.
    """

    checks_micro_batches: bool = False
    may_skip: bool = False
    raises: bool = False

    def check_micro_batch(self, values: CheckedValues, has_weight: tf.Tensor | None):
        """Returns (whether the micro-batch counts, None for always; operations before).

        Args:
            values: The new sums, and the micro-batch's scalars.
            has_weight: Whether the weight is not 0; None if that is known.
        """
        if not self.checks_micro_batches:  # NaN and infinity stay in the window's sum
            return None, [values_of(value) for value in values.gradients]
        dtype = values.scalars[0].dtype
        scalars = [tf.cast(scalar, dtype) for scalar in values.scalars]
        halves = half_squared_norms(values.gradients, dtype, has_unique_rows=True)
        halves = tf.concat([halves, tf.stack(scalars)], 0)
        if has_weight is not None:
            halves = tf.where(has_weight, halves, tf.zeros_like(halves))
        values = values._replace(scalars=scalars)
        if self.raises:
            return None, [_raise_unless_finite(values, halves)]
        return _all_finite(values, halves), []

    def check_window(
        self, values: CheckedValues, halves: tf.Tensor, are_sums_checked: bool
    ):
        """Returns (whether the window is applied, operations before).

        Args:
            values: The window's sums or mean, and its scalars.
            halves: `half_squared_norms` of the gradients.
            are_sums_checked: Whether `check_micro_batch` has seen these sums.
        """
        places = range(len(values.gradients))
        if are_sums_checked and self.checks_micro_batches:
            # The micro-steps have checked the slices of a sparse sum, not its rows.
            is_sparse = [isinstance(g, tf.IndexedSlices) for g in values.gradients]
            places = [i for i in places if is_sparse[i]]
        halves = tf.gather(halves, tf.constant(list(places), tf.int32))
        halves = tf.concat([halves, tf.stack(values.scalars)], 0)
        unchecked = values._replace(
            names=[values.names[i] for i in places],
            gradients=[values.gradients[i] for i in places],
        )
        if self.raises:
            raised = _raise_unless_finite(unchecked, halves)
            return tf.constant(True), [raised]
        is_good = _all_finite(unchecked, halves)
        if self.may_skip:  # at weight 0 every micro-batch was skipped
            is_good = tf.logical_and(is_good, values.scalars[0] > 0)
        return is_good, []


POLICIES = {  # by `on_nonfinite`; None leaves NaN and infinity to the optimizer
    None: Policy(),
    "raise": Policy(checks_micro_batches=True, raises=True),
    "skip_micro_batch": Policy(checks_micro_batches=True, may_skip=True),
    "skip_window": Policy(may_skip=True),
}


def _all_finite(values: CheckedValues, halves: tf.Tensor) -> tf.Tensor:
    """Returns whether all values are finite, a scalar bool.

    Args:
        values: The values.
        halves: `half_squared_norms` of the gradients, then the scalars. They are almost
            always finite, and then the values are not read again.
    """
    tensors = [*values.gradients, *values.scalars]

    def read_all():  # 1e20 is finite, its square is not
        finite = [tf.reduce_all(tf.math.is_finite(values_of(t))) for t in tensors]
        return [tf.reduce_all(tf.stack(finite))]

    is_finite = tf.reduce_all(tf.math.is_finite(halves))
    return either(is_finite, lambda: [tf.constant(True)], read_all)[0]


def _raise_unless_finite(
    values: CheckedValues, halves: tf.Tensor
) -> tf.Operation | None:
    """Returns an operation that fails if a value is not finite, and names it.

    Args:
        values: The values.
        halves: As for `_all_finite`.
    """
    tensors = [*values.gradients, *values.scalars]
    names = [*values.names, "the weight", "the loss"][: len(tensors)]

    def read_and_assert():
        # One operation per value: IsFinite and All with its axes would be four, and
        # the session would keep them all. XLA does not have this operation, but it does
        # not have assertions either.
        summaries = [
            tf.raw_ops.DebugNumericSummaryV2(
                input=values_of(tensor),
                output_dtype=tf.float32,
                tensor_debug_mode=_HEALTH,
            )
            for tensor in tensors
        ]
        is_bad = tf.ensure_shape(tf.stack(summaries), [len(names), 2])[:, 1]
        finite = tf.equal(is_bad, 0.0)
        is_good = tf.reduce_all(finite)
        with of_strings():
            message = _message(finite, names, values.micro_step)
            return [tf.raw_ops.Assert(condition=is_good, data=[message])]

    is_finite = tf.reduce_all(tf.math.is_finite(halves))
    return run_either(is_finite, list, read_and_assert)


def _message(finite: tf.Tensor, names: list[str], micro_step) -> tf.Tensor:
    culprits = tf.boolean_mask(tf.constant(names), tf.logical_not(finite))
    more = tf.size(culprits) - _MOST_NAMES
    and_more = tf.strings.join([" and ", tf.strings.as_string(more), " more"])
    when = []
    if micro_step is not None:
        when = [" at micro-step ", tf.strings.as_string(micro_step)]
    return tf.strings.join(
        [
            "Gradients must be finite. Received: NaN or infinity",
            *when,
            " in ",
            tf.strings.reduce_join(culprits[:_MOST_NAMES], separator=", "),
            tf.where(more > 0, and_more, ""),
            ". Pass on_nonfinite='skip_micro_batch' or 'skip_window' to leave it out.",
        ]
    )


def what_was_not_finite(error: Exception) -> str | None:
    """Returns the values named in an error of `on_nonfinite="raise"`, else None.

    For example "NaN or infinity at micro-step 12 in dense/kernel".
    """
    match = re.search(r"Gradients must be finite\. Received: (.*?)\. Pass ", str(error))
    return match and match[1]
