"""Builds the train op of a model_fn that computes its gradients and updates by itself.

    model_fn(micro-batch) -> train op, cut into (each micro-batch, once per batch)

In the second part everything is what it is without micro-batches: the gradients
(estimator_accum/microbatch/_intercept.py) and, by feeding, the losses.
"""

import logging
from collections.abc import Callable

import tensorflow as tf

from estimator_accum._graph import ancestors
from estimator_accum.microbatch._batch import WholeBatch
from estimator_accum.microbatch._cut import (
    Cut,
    check_each,
    cut_train_op,
    known_losses,
    repeated_writes,
    update_last,
)
from estimator_accum.microbatch._intercept import Interception, intercepting
from estimator_accum.microbatch._loss import Losses, computed_from
from estimator_accum.microbatch._repeatable import (
    check_not_written,
    make_repeatable,
)

_CUTS_ATTRIBUTE = "_estimator_accum_cuts"
_logger = logging.getLogger("tensorflow.estimator_accum")


def build_unedited(batch: WholeBatch, build: Callable, reduction: str):
    """Returns an EstimatorSpec whose train op needs no micro-batch.

    Args:
        batch: The batch; the operations of its micro-batches are added to it.
        build: Calls the model_fn on a micro-batch.
        reduction: "mean", "sum", or "auto" to find it in the graph.

    Raises:
        ValueError: If no gradient with respect to a variable is computed, or what the
            model_fn does with a micro-batch cannot be done with several.
    """
    reductions = Losses(batch, reduction)
    interception = Interception(batch, reductions)
    with batch.as_current(), intercepting(interception):
        spec = build()
        make_repeatable(batch.computed_twice)
    train_op = getattr(spec.train_op, "op", spec.train_op)
    if batch.weight is not None:
        raise ValueError(
            "A model_fn whose gradients are intercepted must not accumulate by itself. "
            f"Received: {train_op.name}, a train op of this library. Leave out "
            "intercept_gradients=True, or run the script by itself."
        )
    if not interception.sums:
        raise ValueError(
            "A model_fn must train by gradients with respect to variables. Received: "
            f"{getattr(train_op, 'name', None)} as the train op, and no call of "
            "tf.gradients or an optimizer. Train without micro-batches."
        )
    if not interception.sums.keys() & ancestors([train_op]):
        raise ValueError(
            "The train op must use the gradients: nothing else has a micro-batch, such "
            f"as operations that a hook runs. Received: {train_op.name}, which needs "
            "none of them. Put all updates into the train op, or train without "
            "micro-batches."
        )
    interception.finish()
    losses = [spec.loss, *interception.losses]
    losses += tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.LOSSES)
    batch.fed = _fed(losses, reductions, batch)
    fed = [tensor for tensor, _ in batch.fed]
    of_batch = computed_from(batch, fed)
    each = cut_train_op(train_op, of_batch, fed)
    operations = [*each, *batch.micro_ops]
    check_each(operations, of_batch, interception.sums, batch.handles)
    check_not_written(batch.computed_twice, operations)
    root = None if train_op in each else train_op
    _update_last(Cut(root, list(interception.sums), fed))
    _report(operations, of_batch, batch)
    batch.micro_ops += each
    with tf.control_dependencies(None):
        once = [] if root is None else [root]
        train_op = tf.group(*once, *interception.clear, name="train_batch")
    return spec._replace(train_op=train_op)


def _fed(
    losses: list[tf.Tensor], reductions: Losses, batch: WholeBatch
) -> list[tuple[tf.Tensor, bool]]:
    """Returns `WholeBatch.fed`: the losses whose reductions are known, and their terms.

    Args:
        losses: Tensors, of which those are losses that are scalars of a micro-batch.
        reductions: Finds their reductions.
        batch: The batch.
    """
    fed, version = {}, None
    graph = tf.compat.v1.get_default_graph()
    for loss in losses:
        if graph.version != version:  # divisors may have been changed
            of_batch, version = computed_from(batch), graph.version
        if loss.shape.rank != 0 or loss.op not in of_batch:
            continue
        reduction = reductions.of(loss, of_batch)
        if reduction.unknown is not None:
            continue
        for tensor in known_losses([loss], of_batch):
            fed.setdefault(tensor.name, (tensor, reduction.is_sum))
    return list(fed.values())


def _update_last(cut: Cut) -> None:
    """Calls `update_last` when this is the last replica."""
    graph = tf.compat.v1.get_default_graph()
    cuts = getattr(graph, _CUTS_ATTRIBUTE, [])
    cuts.append(cut)
    setattr(graph, _CUTS_ATTRIBUTE, cuts)

    def finish(strategy):
        del strategy
        update_last(cuts)
        cuts.clear()

    tf.distribute.get_replica_context().merge_call(finish)


def _report(
    operations: list[tf.Operation], of_batch: set[tf.Operation], batch: WholeBatch
) -> None:
    """Logs what is not, or may not be, as with the whole batch at once."""
    normalized = _batch_normalizations(operations)
    if normalized:
        _logger.warning(
            "micro-batches: batch normalization sees one micro-batch at a time, as in %s "
            "(%d in all): more micro-batches are smaller ones, and its moving averages "
            "take each of them in",
            normalized[0],
            len(normalized),
        )
    repeated = repeated_writes(operations, of_batch, batch.handles)
    if repeated:
        _logger.warning(
            "micro-batches: written once per micro-batch, not per batch: %s",
            ", ".join(repeated),
        )
    summaries = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SUMMARIES)
    last = [each.op.name for each in summaries if each.op in of_batch]
    if last:
        _logger.info(
            "micro-batches: summaries of the last micro-batch, not of the batch: %s",
            ", ".join(last),
        )


def _batch_normalizations(operations: list[tf.Operation]) -> list[str]:
    """Returns names of operations that compute statistics over examples."""
    found = []
    for operation in ancestors(operations):
        if operation.type.startswith("FusedBatchNorm") and "Grad" not in operation.type:
            # Keras's layer normalization calls it with one example of all.
            is_one = operation.inputs[0].shape[:1] == [1]
            if operation.get_attr("is_training") and not is_one:
                found.append(operation.name)
        elif operation.type == "SquaredDifference" and "moments" in operation.name:
            users = operation.outputs[0].consumers()
            axes = [tf.get_static_value(u.inputs[1]) for u in users if u.type == "Mean"]
            if any(axis is not None and 0 in axis for axis in axes):
                found.append(operation.name)
    return found
