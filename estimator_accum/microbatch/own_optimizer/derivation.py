"""Gradients of one call of tf.gradients over a whole batch, from its micro-batches.

    head             d loss / d rows, once, on the rows of the whole batch
    micro-batches    (d rows_i / d variable) * (its rows of d loss / d rows)
    variables that the head reads itself: their gradients, once

Nothing is assumed of the loss.
"""

from typing import NamedTuple

import tensorflow as tf

from estimator_accum.core.gradients import Gradient
from estimator_accum.graph.copies import change_input
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.collecting import (
    WHOLE_BATCH_LOSS,
    keep_rows,
    running_sum,
)
from estimator_accum.microbatch.own_optimizer.batch_norm import check_moments
from estimator_accum.microbatch.own_optimizer.head import (
    Copies,
    View,
    axis_of_rows,
)
from estimator_accum.microbatch.own_optimizer.joined_views import take_views_apart
from estimator_accum.microbatch.own_optimizer.patches import (
    PASSES_ON,
    Request,
    put_behind,
    source_of,
)
from estimator_accum.microbatch.work import Turn
from estimator_accum.rows.own_gradients import (
    check_own_gradients,
    results_with_own_gradients,
)


class Derivation(NamedTuple):
    """Gradients of one call of tf.gradients, before anything is added up.

    Attributes:
        view: The analysis of the graph before there were gradients.
        rows: Tensors whose rows the head gets.
        arriving: For each of them, the gradient that arrives at its micro-batch's rows.
        gradients: For each x, the micro-batch's gradient that flows from there, or None.
        direct: For each x, the gradient of the head itself, of the whole batch, or None.
        is_simple: Whether nothing else arrives, such as from a whole_batch_loss.
    """

    view: View
    rows: list[tf.Tensor]
    arriving: list[tf.Tensor]
    gradients: list[Gradient | None]
    direct: list[Gradient | None]
    is_simple: bool


def derive(
    batch: WholeBatch, copies: Copies, request: Request, view: View
) -> Derivation:
    """Returns the gradients of losses with respect to variables.

    `view` is the analysis of the graph up to `request.tops`.

    1. Bounds of loops become those of the whole batch: it changes which tensors have
       rows, so it comes before any look at them.
    2. An Identity is put behind each tensor with rows that the head reads, since
       gradients can only be stopped at operations. Then the graph is another one.
    3. The head's gradient is derived in the graph of one micro-batch, where tf.gradients
       and tapes know the operations. It stops at the rows.
    4. The head and its gradient are copied onto the rows of the whole batch, in one go:
       a loop of TensorFlow 1 hands values to its gradient.
    5. Each micro-batch takes its rows of the head's gradient, in a later run.
    6. From there the gradient flows back to variables, through one micro-batch; only
       now there is a backward pass in which a tf.custom_gradient can be looked for.
    """
    view = _with_whole_bounds(batch, copies, request.tops, view)
    request, view = _with_identities(batch, copies, request, view)
    check_moments(view)
    losses = copies.take_losses(view, request.tops)
    rows, gradients, direct = _of_head(copies, request, view, losses)
    arriving = _arriving(batch, view, rows, gradients)
    gradients = [None] * len(request.xs)
    if rows:
        gradients = _of_rows(request, view, rows, arriving)
    return Derivation(view, rows, arriving, gradients, direct, not losses)


def _with_whole_bounds(
    batch: WholeBatch, copies: Copies, tops: list[tf.Tensor], view: View
) -> View:
    """Returns the analysis of the graph, in which loops get the whole batch's bounds.

    A loop that runs up to the longest example of the batch must do so in every
    micro-batch: such numbers are computed from the whole batch there.
    """
    bounds = [
        (operation, i)
        for operation, i in view.analysis.bounds
        if view.is_pure(operation.inputs[i])
    ]
    if not bounds:
        return view
    for operation, i in bounds:
        (whole,) = copies.make(view, [operation.inputs[i]])
        change_input(operation, i, whole)
    return View(batch, tops)


def _with_identities(
    batch: WholeBatch, copies: Copies, request: Request, view: View
) -> tuple[Request, View]:
    """Puts an Identity behind each tensor with rows that the head reads.

    Before, views that are joined along the examples are taken apart.
    """
    copies.take_losses(view, request.tops)  # the border has them
    border = copies.border(view, request.tops)
    if joined := take_views_apart(view, border):
        request = request._replace(ys=[joined.get(y.name, y) for y in request.ys])
        view = View(batch, request.tops)
        border = copies.border(view, request.tops)
    rows = [
        tensor
        for tensor in border.frontier
        if _is_trainable(tensor) and not hasattr(tensor.op, PASSES_ON)
    ]
    if not rows:
        return request, view
    identities = put_behind(rows, border.operations)
    ys = [identities.get(y.name, y) for y in request.ys]
    view.take_identities(identities.values())
    return request._replace(ys=ys), view


def _of_head(
    copies: Copies, request: Request, view: View, losses: list[tf.Tensor]
) -> tuple[list[tf.Tensor], list[tf.Tensor], list[Gradient | None]]:
    """Derives the head and copies it onto the whole batch.

    Returns:
        (Tensors with rows that get a gradient, their gradients, gradients of variables
        that the head reads itself; both of the whole batch.)
    """
    border = copies.border(view, request.tops)
    frontier = [*filter(_is_trainable, border.frontier), *losses]
    graph = tf.compat.v1.get_default_graph()
    before = set(graph.get_operations())
    ys, xs = request.ys, [*frontier, *request.xs]
    gradients = request.compute(ys, xs, request.grad_ys, frontier)
    pairs = [
        (tensor, tf.convert_to_tensor(gradient))
        for tensor, gradient in zip(frontier, gradients[: len(frontier)], strict=True)
        if gradient is not None
    ]
    direct = gradients[len(frontier) :]
    parts = tf.nest.flatten(direct, expand_composites=True)
    rows = [tensor for tensor, _ in pairs]
    targets = [gradient for _, gradient in pairs]
    targets += [part for part in parts if part is not None]
    if border.draws():  # once: what is reported of the loss draws the same numbers
        copies.draws = True
        targets += [tensor for tensor in rows if not _is_loss_of_all(tensor)]
    derived = frozenset(graph.get_operations()) - before
    values = iter(copies.make(view, targets, derived))
    gradients = [next(values) for _ in rows]
    parts = [part if part is None else next(values) for part in parts]
    return rows, gradients, tf.nest.pack_sequence_as(direct, parts, True)


def _of_rows(
    request: Request, view: View, rows: list[tf.Tensor], arriving: list[tf.Tensor]
) -> list[Gradient | None]:
    """Returns the micro-batch's gradients that flow from its rows.

    The gradients of results that have a gradient of their own are asked for as well:
    they have rows, whatever operations are between.
    """
    operations = [source_of(x) for x in request.xs]
    sources = [output for operation in operations for output in operation.outputs]
    results = results_with_own_gradients(view.analysis, rows, sources)
    gradients = request.compute(rows, [*request.xs, *results], arriving, [])
    number = len(request.xs)
    pairs = zip([*rows, *results], [*arriving, *gradients[number:]], strict=True)
    remedy = "train without micro-batches"
    check_own_gradients(view.analysis, list(pairs), gradients[:number], remedy)
    return gradients[:number]


def _arriving(
    batch: WholeBatch, view: View, rows: list[tf.Tensor], gradients: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the micro-batch's rows of the gradient that arrives at the batch's rows.

    Args:
        batch: The batch.
        view: The graph.
        rows: Tensors with rows or entries, or results of whole_batch_loss.
        gradients: Their gradients, of the whole batch.
    """
    axes = [
        None if _is_loss_of_all(tensor) else axis_of_rows(view, tensor)
        for tensor in rows
    ]
    spans = _spans_of_entries(batch, view, rows)
    turn = batch.works.first_turn()
    arriving = keep_rows(batch, turn, "arriving", gradients, axes, spans)
    for i, tensor in enumerate(rows):
        if _is_loss_of_all(tensor):
            arriving[i] = getattr(tensor.op, WHOLE_BATCH_LOSS).part(arriving[i])
        else:
            arriving[i].set_shape(tensor.shape)
    return arriving


def _spans_of_entries(batch: WholeBatch, view: View, rows: list[tf.Tensor]) -> dict:
    """Returns (begin, end) of the micro-batch's entries, by the places of their tensors."""
    lists, spans = {}, {}
    for i, tensor in enumerate(rows):
        if not _is_loss_of_all(tensor) and axis_of_rows(view, tensor) is None:
            first = view.analysis.first_of_list(tensor)
            if first.ref() not in lists:
                with tf.device("/cpu:0"):
                    number = tf.shape(first, out_type=tf.int64)[0]
                    before, _ = running_sum(batch, Turn.LAST, "entries", number)
                lists[first.ref()] = before, before + number
            spans[i] = lists[first.ref()]
    return spans


def _is_trainable(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def _is_loss_of_all(tensor: tf.Tensor) -> bool:
    """Returns whether `tensor` is the result of whole_batch_loss."""
    return hasattr(tensor.op, WHOLE_BATCH_LOSS) and tensor is tensor.op.outputs[0]
