"""The loss of a batch, whose declared reduction is checked."""

from collections.abc import Iterator

import tensorflow as tf

from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.own_optimizer.head import (
    Copies,
    View,
    check_guards,
    of_batch,
)
from estimator_accum.rows.added_examples import factors_by_numbers
from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.equal_weights import Assumption, warn_of_unequal_weights
from estimator_accum.rows.heads import find_head
from estimator_accum.rows.loss_sums import may_be_sum, refuse_sum, terms_of


def loss_of_batch(batch: WholeBatch, loss: tf.Tensor) -> tuple[tf.Tensor, dict]:
    """Returns the loss of the whole batch, after its last micro-batch, and `refusals`.

    Args:
        batch: The batch; the operations that collect rows for the loss are added.
        loss: A tensor of the micro-batch.
    """
    if loss.op not in of_batch(batch):
        return loss, {}
    with tf.control_dependencies(None):
        copies, view = Copies(batch, is_early=False), View(batch, [loss])
        (value,) = copies.make(view, [loss])
    value.set_shape(loss.shape)
    return value, check_guards(batch, [view])


def check_declared(batch: WholeBatch, loss: tf.Tensor) -> None:
    """Raises ValueError if the loss is a sum over examples, declared as a mean.

    A loss that the mean over micro-batches does not fit is warned of.

    Args:
        batch: The batch, of which the reduction is declared.
        loss: The loss of the micro-batch.
    """
    operations = of_batch(batch)
    if batch.reduction == "sum" or loss.op not in operations:
        return
    is_possible = may_be_sum(loss, operations.__contains__)
    if batch.has_own_weight and not is_possible:
        return
    analysis = View(batch, [loss]).analysis
    if is_possible:
        terms = terms_of(analysis, loss)
        if any(terms) or factors_by_numbers(find_head(analysis, loss)):
            is_whole = all(terms) or not any(terms)
            refuse_sum(loss, is_whole, "declare reduction='sum': weighted sums add up")
    if not batch.has_own_weight:
        share = "each micro-batch counts by its examples"
        warn_of_unequal_weights(loss, _views(batch, loss, analysis), share)


def _views(batch: WholeBatch, loss: tf.Tensor, analysis: Analysis) -> Iterator[tuple]:
    """Yields ways to look at a loss, for `warn_of_unequal_weights`."""
    yield loss, analysis, None
    parts = {True: [], False: []}
    for part in batch.parts:
        parts[part.has_rows].append(part.sliced)
    yield loss, Assumption(loss, parts[True], parts[False], None), None
