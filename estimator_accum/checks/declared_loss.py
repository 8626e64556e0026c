"""Check of a loss against the reduction that its train op declares."""

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

from estimator_accum.graph.copies import define, insert
from estimator_accum.graph.data_sets import MAPPED_ELEMENTS, SAME_ELEMENTS, data_set_of
from estimator_accum.graph.functions import library_of_functions, producer_of
from estimator_accum.graph.names import BATCH_QUEUES, BATCHES
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.rows.added_examples import factors_by_numbers, find_head
from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.loss_sums import (
    LINEAR,
    SCALING,
    SHOWN,
    factors_of_sums,
    may_be_sum,
    refuse_sum,
)

_BATCHING = re.compile("(Padded|Parallel|MapAnd)?BatchDataset(V2)?")
# Operations whose results are sums or means of elements of their first input.
_OF_FIRST = {"GatherV2", "Mean", "StridedSlice", "Sum", "Transpose"}
_logger = logging.getLogger("tensorflow.estimator_accum")


def check_declared_loss(
    steps: int | Callable, reduction: str, loss: tf.Tensor | None
) -> None:
    """Raises ValueError if micro-batches' losses are sums over examples, not means.

    The proof needs a batch of a data set or queue. Without a proof the declaration stays.
    A loss that is divided by K is warned of, if K > 2: half of a loss is a usual loss.

    Args:
        steps: K, or a callable that returns it [micro-steps per update].
        reduction: "mean" or "sum", as declared.
        loss: The loss of a micro-batch; None if it is not known.
    """
    if loss is None or steps == 1:
        return
    if not callable(steps) and steps > 2 and _is_divided_by(loss, steps):
        _logger.warning(
            "%s divides the loss by %d, as many as gradient_accumulation_steps. A "
            "window's gradient is a mean already: leave the division out, if it is meant "
            "for the accumulation.",
            loss.op.name,
            steps,
        )
    if reduction == "mean" and may_be_sum(loss, _has_batch) and _is_sum(loss):
        refuse_sum(loss, "divide the loss by tf.reduce_sum(weights)")


def _is_divided_by(loss: tf.Tensor, steps: int) -> bool:
    """Returns whether the last thing that is done to a loss is to divide it by K."""
    operation = loss.op
    while operation.type in ("Cast", "Identity"):
        operation = operation.inputs[0].op
    if operation.type not in SCALING:
        return False
    values = [tf.get_static_value(tensor) for tensor in operation.inputs]
    if operation.type != "Mul":
        return values[1] is not None and values[1] == steps
    return any(value is not None and abs(value * steps - 1) < 1e-6 for value in values)


def _has_batch(operation: tf.Operation) -> bool:
    return any(other.type in BATCHES for other in data_ancestors([operation]))


def _is_sum(loss: tf.Tensor) -> bool:
    needed = data_ancestors(
        [loss.op], lambda op: () if op.type in BATCHES else op.inputs
    )
    sources = [op for op in needed if op.type in BATCHES]
    sizes = {_batch_size(source) for source in sources}
    if len(sizes) != 1 or None in sizes:
        return False
    (size,) = sizes
    outputs = [output for source in sources for output in source.outputs]
    rows = [t for t in outputs if t.shape.rank and t.shape[0] is None]
    if rows:
        return _is_sum_of(loss, rows, outputs, size)
    rows = [t for t in outputs if t.shape.rank and t.shape[0] == size]
    return bool(rows) and _is_sum_of_any_size(loss, needed, outputs, rows, size)


def _is_sum_of(loss: tf.Tensor, rows: list, outputs: list, size: int) -> bool:
    """Returns whether a loss is a sum over the examples of `rows`.

    Args:
        loss: The loss.
        rows: Outputs of the input pipeline that have a row for each example.
        outputs: All outputs.
        size: Number of examples in a batch; 0 if it is not constant.
    """
    analysis = Analysis(rows, [output for output in outputs if output not in rows])
    analysis.analyze([loss])
    factors, ends = factors_of_sums(analysis, loss), [loss]
    if any(_may_be_of_an_epoch(factor, size) for factor in factors):
        return False
    head = None if factors else find_head(analysis, loss)
    if head is not None:
        ends += [rows.tensor for rows in head.rows]
        factors = factors_by_numbers(head)
    if not factors or any(_may_make_mean(factor, size) for factor in factors):
        return False
    # A sum may be divided by the examples and weighted too, inside or outside of it.
    scales = itertools.chain(*(_scales(analysis, end) for end in ends))
    return not any(_may_make_mean(scale, size) for scale in scales)


def _is_sum_of_any_size(
    loss: tf.Tensor, needed: Iterable, outputs: list, rows: list, size: int
) -> bool:
    """Returns `_is_sum_of` for a copy of the loss whose batch has no static size."""
    definition, _ = define([op for op in needed if op.type not in BATCHES])
    definition.library.CopyFrom(loss.graph.as_graph_def().library)
    with tf.Graph().as_default():
        copies = {}
        for output in outputs:
            shape = [None, *output.shape[1:]] if output in rows else output.shape
            copies[output.name] = tf.compat.v1.placeholder(output.dtype, shape)
        (copy,) = insert(definition, copies, [loss], "loss")
        of_rows = [copies[tensor.name] for tensor in rows]
        return _is_sum_of(copy, of_rows, list(copies.values()), size)


def _scales(analysis: Analysis, loss: tf.Tensor) -> Iterator[float | None]:
    """Yields the constants that scale a loss, or its terms of examples.

    Yields None for one that is not known.
    """
    waiting = [loss]
    while waiting:
        operation = waiting.pop().op
        inputs = list(operation.inputs)
        if operation.type in SCALING:
            values = [tf.get_static_value(tensor) for tensor in inputs]
            for tensor, value in zip(inputs, values, strict=True):
                if value is None:
                    waiting.append(tensor)
                elif value.size and value.flat[0] and (value == value.flat[0]).all():
                    by = float(value.flat[0])
                    yield by if operation.type == "Mul" else 1.0 / by
        elif operation.type == "IdentityN":  # tf.custom_gradient may scale gradients
            yield None
        elif operation.type in {*_OF_FIRST, *SHOWN}:
            waiting.append(inputs[0])
        elif operation.type in {"Einsum", "MatMul"}:
            waiting += inputs
        elif operation.type in LINEAR:
            terms = [t for t in inputs if analysis.state(t).kind != "fixed"]
            waiting += terms or inputs  # beside terms of examples, a penalty


def _may_make_mean(factor: float | None, size: int) -> bool:
    """Returns whether a sum times `factor` may be a mean over examples, or their parts.

    Args:
        factor: The factor; None if it is not constant.
        size: Number of examples in a batch; 0 if it is not constant.
    """
    if factor is None:
        return True
    parts = 1.0 / abs(factor)
    if size == 0 and parts in (1, 2):  # 2 of half of a sum, as of L2Loss
        return False
    number = round(parts / max(size, 1))
    if number >= 1 and abs(parts / max(size, 1) / number - 1) < 1e-5:
        return True
    # 0.3 / 32 has a weight of 0.3, and 0.01 is a weight itself.
    by_size = parts / size if size else parts
    return _is_like_a_weight(by_size) and not _is_like_a_weight(parts)


def _is_like_a_weight(number: float) -> bool:
    """Returns whether somebody may write a number, or 1 by it, with two digits."""
    return any(abs(float(f"{x:.2g}") / x - 1) < 1e-5 for x in (number, 1.0 / number))


def _may_be_of_an_epoch(factor: float | None, size: int) -> bool:
    """Returns whether a factor may be a number of examples by those of a batch.

    A bound of a likelihood has 60,000 / 32 times the sum of a batch, say, and other terms.

    Args:
        factor: The factor; None if it is not constant.
        size: Number of examples in a batch; 0 if it is not constant.
    """
    if factor is None or abs(factor) > 10:
        return True
    examples = abs(factor) * size
    is_whole = size > 0 and abs(examples - round(examples)) < 1e-5 * examples
    return is_whole and abs(factor - round(factor, 2)) > 1e-6


def _batch_size(source: tf.Operation) -> int | None:
    """Returns the examples in a batch; 0 if that varies, None without known batches."""
    if source.type in BATCH_QUEUES:
        return int(tf.get_static_value(source.inputs[1]) or 0)
    data_set = data_set_of(source.inputs[0].op, library_of_functions())
    if data_set is None:
        return None
    node, is_mapped = data_set.find(data_set.name), False
    while node is not None and (
        SAME_ELEMENTS.match(node.op) or MAPPED_ELEMENTS.match(node.op)
    ):
        is_mapped |= MAPPED_ELEMENTS.match(node.op) is not None
        node = data_set.find(producer_of(node.input[0]))
    if node is None or not _BATCHING.fullmatch(node.op):
        return None
    inputs = [producer_of(name) for name in node.input if not name.startswith("^")]
    # Behind what a function of `map_and_batch` captures, or behind the data set.
    size = inputs[-3] if node.op.startswith("MapAnd") else inputs[1]
    number = data_set.number(size)
    # The function of a map may return another number of rows.
    return 0 if number is None or is_mapped else int(number)
