"""Checks for NaN and infinity.

`on_nonfinite` is the policy for gradients that are NaN or infinite:

    "raise"             the micro-step fails, before anything is accumulated
    "skip_micro_batch"  the micro-batch is left out, and its window continues
    "skip_window"       the window ends without an update

The window after a skipped one always starts clean.
"""

import re

import tensorflow as tf

from estimator_accum.core.gradients import Gradient, half_squared_norms, values_of
from estimator_accum.graph.branches import either, run_either

_MOST_NAMES = 3  # variables that an error names
_HEALTH = 2  # mode with two numbers: the tensor's id, and 1 for NaN or infinity


def check_micro_batch(
    policy: str | None,
    names: list[str],
    micro_step: tf.Tensor | None,
    sums: list[Gradient],
    scalars: list[tf.Tensor],
    has_weight: tf.Tensor | None,
):
    """Returns (whether it counts, None for always; operations to run before).

    Args:
        policy: `on_nonfinite`; None leaves NaN and infinity to the optimizer.
        names: Names of the gradients' variables.
        micro_step: The micro-step's number, for errors; None if unknown.
        sums: The new sums of the gradients, or gradients.
        scalars: The micro-batch's weight and, if it is known, loss.
        has_weight: Whether the weight is not 0; None if that is known.
    """
    if not _checks_micro_batches(policy):  # NaN and infinity stay in the window's sum
        return None, [values_of(value) for value in sums]
    dtype = scalars[0].dtype
    scalars = [tf.cast(scalar, dtype) for scalar in scalars]
    halves = half_squared_norms(sums, dtype, has_unique_rows=True)
    halves = tf.concat([halves, tf.stack(scalars)], 0)
    if has_weight is not None:
        halves = tf.where(has_weight, halves, tf.zeros_like(halves))
    values = [*sums, *scalars]
    if policy == "skip_micro_batch":
        return _all_finite(values, halves), []
    return None, [_raise_unless_finite(values, halves, names, micro_step)]


def check_window(
    policy: str | None,
    names: list[str],
    micro_step: tf.Tensor | None,
    sums: list[Gradient],
    halves: tf.Tensor,
    scalars: list[tf.Tensor],
    are_sums_checked: bool,
):
    """Returns (whether the window is applied, operations to run before).

    Args:
        policy: `on_nonfinite`; None leaves NaN and infinity to the optimizer.
        names: Names of the gradients' variables.
        micro_step: The micro-step's number, for errors; None if unknown.
        sums: Sums of gradients, or gradients.
        halves: Their `half_squared_norms`.
        scalars: The window's weight and, if it is known, loss.
        are_sums_checked: Whether `check_micro_batch` has seen these sums.
    """
    unknown = list(range(len(sums)))
    if are_sums_checked and _checks_micro_batches(policy):
        # The micro-steps have checked the slices of a sparse sum, not its rows.
        unknown = [i for i in unknown if isinstance(sums[i], tf.IndexedSlices)]
    halves = tf.gather(halves, tf.constant(unknown, tf.int32))
    halves = tf.concat([halves, tf.stack(scalars)], 0)
    values = [*(sums[i] for i in unknown), *scalars]
    if policy == "raise":
        names = [names[i] for i in unknown]
        raised = _raise_unless_finite(values, halves, names, micro_step)
        return tf.constant(True), [raised]
    is_good = _all_finite(values, halves)
    if policy is not None:  # at weight 0 every micro-batch was skipped
        is_good = tf.logical_and(is_good, scalars[0] > 0)
    return is_good, []


def _checks_micro_batches(policy: str | None) -> bool:
    """Returns whether every micro-step checks its sums, not only the boundary."""
    return policy in ("raise", "skip_micro_batch")


def _all_finite(values: list[Gradient], halves: tf.Tensor) -> tf.Tensor:
    """Returns whether all values are finite, a scalar bool.

    Args:
        values: Tensors or `IndexedSlices`.
        halves: Their `half_squared_norms`, of scalars the values. These are almost
            always finite, and then the values are not read again.
    """

    def read_all():  # 1e20 is finite, its square is not
        finite = [tf.reduce_all(tf.math.is_finite(values_of(v))) for v in values]
        return [tf.reduce_all(tf.stack(finite))]

    is_finite = tf.reduce_all(tf.math.is_finite(halves))
    return either(is_finite, lambda: [tf.constant(True)], read_all)[0]


def _raise_unless_finite(
    values: list[Gradient],
    halves: tf.Tensor,
    names: list[str],
    micro_step: tf.Tensor | None,
) -> tf.Operation | None:
    """Returns an operation that fails if a value is not finite, and names it.

    Args:
        values: Gradients, the weight and, if it is known, the loss.
        halves: As for `_all_finite`.
        names: Names of the gradients' variables.
        micro_step: The micro-step's number, for the error; None if unknown.
    """
    names = [*names, "the weight", "the loss"][: len(values)]

    def read_and_assert():
        # One operation per value: IsFinite and All with its axes would be four, and
        # the session would keep them all. XLA does not have this operation, but it does
        # not have assertions either.
        summaries = [
            tf.raw_ops.DebugNumericSummaryV2(
                input=values_of(value),
                output_dtype=tf.float32,
                tensor_debug_mode=_HEALTH,
            )
            for value in values
        ]
        is_bad = tf.ensure_shape(tf.stack(summaries), [len(names), 2])[:, 1]
        finite = tf.equal(is_bad, 0.0)
        message = _message(finite, names, micro_step)
        return [tf.raw_ops.Assert(condition=tf.reduce_all(finite), data=[message])]

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
    found = re.search(r"Gradients must be finite\. Received: (.*?)\. Pass ", str(error))
    return found and found[1]
