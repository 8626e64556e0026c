"""Values of the whole batch, with which the train op is fed."""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum.graph.branches import is_in_loop
from estimator_accum.graph.internals import context_of
from estimator_accum.graph.names import is_draw
from estimator_accum.graph.walks import ancestors
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.collecting import WHOLE_BATCH_LOSS, keep
from estimator_accum.microbatch.own_optimizer.division import BatchPlan
from estimator_accum.microbatch.own_optimizer.head import Border, Copies, View


class Values(NamedTuple):
    """Values of the whole batch.

    Attributes:
        pairs: (tensor of a micro-batch, its value for the batch).
        collected: Tensors whose rows micro-batches collect for them, and the axis.
        view: The analysis of the graph without these.
    """

    pairs: list[tuple[tf.Tensor, tf.Tensor]]
    collected: list[tuple[tf.Tensor, int]]
    view: View


def whole_batch_values(
    batch: WholeBatch,
    plan: BatchPlan,
    losses: list[tf.Tensor],
    early: Copies,
    earlier: list[tf.Tensor] = (),
    seen: View | None = None,
) -> Values:
    """Returns the values that the train op is fed with, and that summaries may show.

    Args:
        batch: The batch.
        plan: The part that runs once per batch.
        losses: Losses of a micro-batch.
        early: Copies that run after the first pass, for gradients.
        earlier: Tensors that are fed with values of the whole batch.
        seen: The analysis of a part of the graph; None if there is none.
    """
    draws = draws_of_passes(batch, *plan.fed, *losses)
    targets = [*plan.fed, *losses, *(draw.outputs[0] for draw in draws)]
    view = View(batch, targets) if seen is None else seen.of_now(targets)
    # If the first pass runs the network anyway, the values are computed after it.
    is_twice = bool(early.collected) or early.draws
    copies = early if is_twice else Copies(batch, is_early=False)
    copies.take(earlier)
    copies.take_losses(view, losses)
    shown = _scalars(copies.border(view, losses), losses, view)
    tensors = list({t.ref(): t for t in [*plan.fed, *shown]}.values())
    with tf.control_dependencies(None):
        copies.take_moments(view, tensors)
        values = copies.make(view, tensors)
        if is_twice:
            values = keep(batch, batch.works.first_turn(), "reported", values)
    pairs = list(zip(tensors, values, strict=True))
    return Values(pairs, copies.collected, view)


def draws_of_passes(batch: WholeBatch, *tensors: tf.Tensor) -> list[tf.Operation]:
    """Returns the operations that draw random numbers with every micro-batch."""
    operations = [*batch.works.total.micro_ops, *(tensor.op for tensor in tensors)]
    draws = filter(is_draw, ancestors(operations))
    return [operation for operation in draws if not is_in_loop(operation)]


def _scalars(border: Border, losses: list[tf.Tensor], view: View) -> list[tf.Tensor]:
    """Returns the scalars between rows and losses, which summaries may show."""
    tensors = [output for op in border.operations for output in op.outputs]
    return [
        tensor
        for tensor in [*losses, *tensors]
        if tensor.dtype.is_floating
        and context_of(tensor.op) is None
        and (tensor.shape.rank == 0 or any(tensor is loss for loss in losses))
        and (view.state(tensor).kind != "fixed" or hasattr(tensor.op, WHOLE_BATCH_LOSS))
    ]
