"""The terms that one replica adds to its sums in one micro-step."""

import itertools
from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.arguments import check_weight
from estimator_accum.core.change import Change
from estimator_accum.core.clock import Clock
from estimator_accum.core.current_batch import current_batch, current_parts
from estimator_accum.core.gradients import Gradient, half_squared_norms
from estimator_accum.core.options import Options
from estimator_accum.core.replica_divisor import replica_divisor_of
from estimator_accum.rows.places import has_one_slice_a_row


class MicroBatch(NamedTuple):
    """Terms that one replica adds to its sums in one micro-step.

    Attributes:
        gradients: One for each trained variable.
        variables: The trained variables.
        loss: Scalar mean over the micro-batch; None if unknown.
        scale: Scalar by which the gradients must still be multiplied; None means 1.
        sums: Scalars to sum, by name: "weight", the weighted "loss" if the window's is
            known, and others; "scale" if the factor of loss and gradients is not
            "weight".
        replica_divisor: Number by which the gradients were divided, so that their sum
            over replicas is a mean; 1 if they are added to sums, which are in units of
            no cluster: another number of replicas may resume a checkpoint's.
        change: Code between the mean and the optimizer; None if there is none.
        device: Device of the task that computes the gradients; empty outside clusters.
        are_slices: Whether the norm of each gradient is that of its slices, which the
            sums of a window lose.
    """

    gradients: list[Gradient]
    variables: list[tf.Variable]
    loss: tf.Tensor | None
    scale: tf.Tensor | None
    sums: dict[str, tf.Tensor]
    replica_divisor: float = 1
    change: Change | None = None
    device: str = ""
    are_slices: list[bool] = ()


def makes_mean(clock: Clock) -> bool:
    """Returns whether a window may be more than one micro-batch of one replica."""
    return clock.keeps_sums or tf.distribute.get_strategy().num_replicas_in_sync > 1


def weigh(weight: tf.Tensor | None, reduction: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a micro-batch's weight, and the factor of its loss and gradients.

    The weight is the caller's, or 1; of a micro-batch of a whole batch, `WholeBatch.weigh`
    decides. Keras passes its own (`keras/_window.py`), and a model_fn with an optimizer
    of its own needs none: the gradient of the whole batch's loss is in its gradients.

    Args:
        weight: Scalar, as the caller gave it; None if not given.
        reduction: "mean" or "sum".
    """
    if weight is not None:
        weight = check_weight(weight)
    batch = current_batch()
    if batch is not None:
        return batch.weigh(weight, reduction)
    weight = tf.constant(1.0) if weight is None else weight
    return weight, weight


def micro_batch_of(
    options: Options,
    clock: Clock,
    gradients: list[Gradient],
    variables: list[tf.Variable],
    loss: tf.Tensor | None,
    weight: tf.Tensor,
    scale: tf.Tensor,
    is_weighted: bool,
    change: Change | None = None,
    multiplier: int = 1,
) -> MicroBatch:
    """Returns the summands of a replica's sums.

    Args:
        options: The caller's options.
        clock: When the window closes.
        gradients: The replica's gradients.
        variables: Their variables.
        loss: Scalar mean over the micro-batch; None if unknown.
        weight: Scalar, the micro-batch's weight.
        scale: Scalar by which loss and gradients are multiplied: `weight`, or 1 if the
            micro-batch is the whole window and so its own mean.
        is_weighted: Whether `gradients` are already those of scale * loss.
        change: Code between these gradients and the optimizer; None if there is none.
        multiplier: Number by which the loss of `gradients` was multiplied.
    """
    replica_divisor = replica_divisor_of(gradients) / multiplier
    is_wide = any(gradient.dtype == tf.float64 for gradient in gradients)
    dtype = tf.float64 if is_wide else tf.float32  # norms need float32 or wider
    sums = {"weight": tf.cast(weight, dtype)}
    factor = sums["weight"] if scale is weight else tf.cast(scale, dtype)
    if scale is not weight:
        sums["scale"] = factor
    if loss is not None:
        sums["loss"] = factor * tf.cast(loss, dtype)
    if options.noise_scale:
        sums |= _squares(gradients, sums["weight"], is_weighted, replica_divisor)
    square = tf.constant(1.0, dtype) if is_weighted else tf.square(factor)
    scale = None if is_weighted else scale
    if clock.keeps_sums and replica_divisor != 1:
        undivided = tf.constant(replica_divisor, dtype)
        square *= tf.square(undivided)
        scale = undivided if scale is None else factor * undivided
        replica_divisor = 1
    are_slices = _are_slices(options, clock, gradients)
    if options.sparse_norm == "slices":
        sparse = list(itertools.compress(gradients, are_slices))
        sums["slices"] = tf.reduce_sum(_of_slices(sparse, square))
    if change is not None and change.with_norm:
        halves = tf.unstack(_of_slices(change.with_norm, square))
        sums |= {f"slices_{i}": half for i, half in enumerate(halves)}
    return MicroBatch(
        gradients=gradients,
        variables=variables,
        loss=loss,
        scale=scale,
        sums=sums,
        replica_divisor=replica_divisor,
        change=change,
        are_slices=are_slices,
    )


def _are_slices(
    options: Options, clock: Clock, gradients: list[Gradient]
) -> list[bool]:
    """Returns whether a window loses the norm of each gradient, that of its slices."""
    if options.sparse_norm != "slices" or not makes_mean(clock):
        return [False] * len(gradients)
    are_slices, parts = [], current_parts()
    for gradient in gradients:
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        is_single = has_one_slice_a_row(gradient, parts) if is_sparse else True
        if is_single is None:
            raise ValueError(
                "`sparse_norm='slices'` must not be used for an embedding that is looked "
                "up in several ways, or by places of no example. Received: "
                f"{gradient.values.name}. Leave `sparse_norm` out."
            )
        are_slices.append(not is_single)
    return are_slices


def _squares(
    gradients: list[Gradient],
    weight: tf.Tensor,
    is_weighted: bool,
    replica_divisor: float,
) -> dict[str, tf.Tensor]:
    """Returns the sums of the noise scale: w * |g|^2, and a count."""
    halves = tf.reduce_sum(half_squared_norms(gradients, weight.dtype))
    squares = 2.0 * halves * tf.constant(replica_divisor**2, weight.dtype)
    weigh = tf.math.divide_no_nan if is_weighted else tf.multiply
    # A micro-batch of weight 0, where all is masked, is not a sample of the noise.
    count = tf.cast(weight > 0, weight.dtype)
    return {"squares": weigh(squares, weight), "count": count}


def _of_slices(gradients: list[tf.IndexedSlices], square: tf.Tensor) -> tf.Tensor:
    """Returns `square` * half the squared norm of each one's slices, [gradients].

    Sums in rows lose these norms.
    """
    if not gradients:
        return tf.zeros([0], square.dtype)
    return square * half_squared_norms(gradients, square.dtype, has_unique_rows=True)
