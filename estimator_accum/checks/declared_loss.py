"""Check of a loss against the reduction that its train op declares."""

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from estimator_accum.checks.batch_lists import is_list_of_batch, list_from_tables
from estimator_accum.graph.copies import define, insert
from estimator_accum.graph.data_sets import batch_size_of
from estimator_accum.graph.functions import captured_among, library_of_functions
from estimator_accum.graph.names import BATCHES, FED
from estimator_accum.graph.walks import data_ancestors, origin_of, walk
from estimator_accum.rows.added_examples import factors_by_numbers
from estimator_accum.rows.analysis import Analysis
from estimator_accum.rows.equal_weights import Assumption, warn_of_unequal_weights
from estimator_accum.rows.heads import find_head
from estimator_accum.rows.loss_sums import (
    LINEAR,
    SCALING,
    SHOWN,
    Sum,
    may_be_sum,
    refuse_sum,
    terms_of,
)

# Operations whose results are sums or means of elements of their first input.
_OF_FIRST = {"GatherV2", "Mean", "StridedSlice", "Sum", "Transpose"}
# Operations that may add up more than examples.
_ADDING = {"Einsum", "L2Loss", "MatMul", "Mean", "Sum", *LINEAR, *SCALING, *SHOWN}
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
    if reduction == "mean" and may_be_sum(loss, _has_batch):
        are_sums = _are_sums(loss)
        if any(are_sums):
            refuse_sum(loss, all(are_sums), "divide the loss by tf.reduce_sum(weights)")


def check_equal_weights(
    steps: int | Callable,
    loss: tf.Tensor | None,
    reduction: str,
    weight: Any,
    remedy: str = "",
) -> None:
    """Warns of a loss that the mean over micro-batches does not fit.

    Args:
        steps: K, or a callable that returns it [micro-steps per update].
        loss: The loss of a micro-batch; None if it is not known.
        reduction: "mean" or "sum", as declared.
        weight: The caller's weight of a micro-batch; None if not given.
        remedy: As for `warn_of_unequal_weights`.
    """
    is_weighted = reduction == "sum" or weight is not None
    if loss is None or steps == 1 or is_weighted:
        return
    needed = _needed(loss)
    captured = captured_among(needed)
    fed = [op for op in needed if op.type in {*BATCHES, *FED} and op not in captured]
    outputs = [tensor for operation in fed for tensor in operation.outputs]
    parts, lists = _parts_among(outputs), [*filter(is_list_of_batch, needed)]
    if parts or lists:
        views = _views(loss, needed, outputs, parts, lists)
        share = "all micro-batches count alike"
        warn_of_unequal_weights(loss, views, share, remedy)


def _views(
    loss: tf.Tensor, needed: Iterable, outputs: list, parts: list, lists: list
) -> Iterator[tuple]:
    """Yields ways to look at a loss, for `warn_of_unequal_weights`.

    Args:
        loss: The loss.
        needed: The operations that it is computed from.
        outputs: Results of the input pipeline, or fed.
        parts: Those of `outputs` that may have a row for each example.
        lists: Operations whose results are the batch's sparse and ragged tensors.
    """
    lengths = [t.shape.as_list()[0] for t in parts if t.shape.rank]
    size = None
    if lengths and None not in lengths:
        size = max(lengths, key=lengths.count)
    rows = [t for t in parts if t.shape.rank and t.shape.as_list()[0] == size]
    view = _view_of_any_size(loss, needed, outputs, rows, parts, lists)
    if view is not None:
        yield *view, None
    if size is None or size > 1:  # by which nothing is told from other axes
        yield loss, Assumption(loss, rows, parts, size), size


def _parts_among(outputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the parts of a batch, without the numbers that are fed beside it.

    Fed parts are known by the number of rows alone, which they share: any number, or
    else the commonest one.
    """
    fed = [t for t in outputs if t.op.type in FED and t.shape.rank != 0]
    sizes = [t.shape.as_list()[0] if t.shape.rank else None for t in fed]
    size = None
    if fed and None not in sizes:
        size = max(sizes, key=sizes.count)
    pairs = zip(fed, sizes, strict=True)
    numbers = {tensor.ref() for tensor, its_size in pairs if its_size != size}
    return [t for t in outputs if t.shape.rank != 0 and t.ref() not in numbers]


def _is_divided_by(loss: tf.Tensor, steps: int) -> bool:
    """Returns whether the last thing that is done to a loss is to divide it by K."""
    operation = origin_of(loss, ("Cast", "Identity")).op
    if operation.type not in SCALING:
        return False
    values = [tf.get_static_value(tensor) for tensor in operation.inputs]
    if operation.type != "Mul":
        return values[1] is not None and values[1] == steps
    return any(value is not None and abs(value * steps - 1) < 1e-6 for value in values)


def _has_batch(operation: tf.Operation) -> bool:
    return any(other.type in BATCHES for other in data_ancestors([operation]))


def _are_sums(loss: tf.Tensor) -> list[bool]:
    """Returns whether each term of a loss is a sum over the examples of a batch."""
    needed = _needed(loss)
    lists = [*filter(is_list_of_batch, needed)]
    sources = {op for op in needed if op.type in BATCHES}
    sources |= {operation.inputs[0].op for operation in lists}
    sizes = {batch_size_of(source) for source in sources}
    if len(sizes) != 1 or not sizes.isdisjoint({None, 1}):
        return []  # the sum over one example is the mean
    (size,) = sizes
    outputs = [output for source in sources for output in source.outputs]
    rows = [t for t in outputs if t.shape.rank and t.shape.as_list()[0] is None]
    rows = rows or [t for t in outputs if t.shape.rank and t.shape.as_list()[0] == size]
    if not (rows or lists):
        return []
    view = _view_of_any_size(loss, needed, outputs, rows, outputs, lists)
    if view is None:
        return []
    with view[0].graph.as_default():
        return _are_sums_of(*view, size)


def _needed(loss: tf.Tensor) -> dict:
    """Returns the operations from a batch to a loss, as `data_ancestors` does."""
    return data_ancestors(
        [loss.op],
        lambda op: () if op.type in BATCHES or is_list_of_batch(op) else op.inputs,
    )


def _are_sums_of(loss: tf.Tensor, analysis: Analysis, size: int) -> list[bool]:
    """Returns whether each term of a loss is a sum over the examples of rows.

    Args:
        loss: The loss.
        analysis: The states of the tensors that it is computed from.
        size: Number of examples in a batch; 0 if it is not constant.
    """
    terms = terms_of(analysis, loss)
    if any(terms):
        return [
            term is not None and _is_sum(analysis, term, size, len(terms))
            for term in terms
        ]
    head = find_head(analysis, loss)
    factors = factors_by_numbers(head)
    if not factors:
        return [False]
    # A sum may be divided by the examples and weighted too, inside or outside of it.
    for end in [loss, *(rows.tensor for rows in head.rows)]:
        factors += itertools.chain(*map(_scales, _linear_part(analysis, end)))
    # Numbers show no axis that is added up, so any whole number may divide.
    return [not any(_may_make_mean(factor, size, {0}) for factor in factors)]


def _is_sum(analysis: Analysis, term: Sum, size: int, terms: int) -> bool:
    """Returns whether a term that adds up examples provably is no mean over them."""
    factor = None if None in term.factors else math.prod(term.factors)
    parts = list(_linear_part(analysis, term.tensor))
    factors = [factor, *term.factors, *itertools.chain(*map(_scales, parts))]
    elements = _numbers_added_up(analysis, parts, terms)
    return not (
        _is_zero(term.tensor)
        or _may_be_of_an_epoch(factor, size)
        or any(_may_make_mean(factor, size, elements) for factor in factors)
    )


def _numbers_added_up(
    analysis: Analysis, parts: list[tf.Operation], terms: int
) -> set[int]:
    """Returns the numbers by which a mean over more than examples may be divided.

    Args:
        analysis: The states of tensors.
        parts: The operations that scale, add up or move numbers before a sum.
        terms: Number of terms of the loss, which may be averaged as well.
    """
    lengths = {1}
    for operation in parts:
        kinds = [analysis.state(tensor).kind for tensor in operation.inputs]
        if operation.type in _ADDING:
            lengths |= {_elements(analysis, tensor) for tensor in operation.inputs}
        if operation.type in LINEAR:
            terms += max(0, sum(kind != "fixed" for kind in kinds) - 1)
    return {
        number * first * second
        for number in range(1, terms + 1)
        for first, second in itertools.combinations_with_replacement(lengths, 2)
    }


def _view_of_any_size(
    loss: tf.Tensor,
    needed: Iterable,
    outputs: list,
    rows: list,
    parts: list,
    lists: list,
) -> tuple[tf.Tensor, Analysis] | None:
    """Returns a loss, or a copy whose batch has no static size, and its analysis.

    Tables stand for the batch's sparse and ragged tensors.

    Args:
        loss: The loss.
        needed: The operations that it is computed from.
        outputs: Results of some of them, which are fed in the copy.
        rows: Those of `outputs` that have a row for each example.
        parts: Those that the batch decides; `rows` may be among them.
        lists: Operations for which `is_list_of_batch` holds.

    Returns:
        None if an operation needs one size.
    """
    if not lists and not any(tensor.shape.as_list()[0] for tensor in rows):
        analysis = Analysis(rows, parts)
        analysis.analyze([loss])
        return loss, analysis
    operations = [op for op in needed if op.graph is loss.graph]
    # A captured variable is not known in the copy's graph.
    read = [op.outputs[0] for op in operations if op.type == "ReadVariableOp"]
    fed = {*(tensor.op for tensor in [*outputs, *read]), *lists}
    definition, _ = define([op for op in operations if op not in fed])
    definition.library.function.extend(library_of_functions(loss.graph).values())
    are_rows = {tensor.ref() for tensor in rows}
    errors = ValueError, TypeError, tf.errors.OpError
    with tf.Graph().as_default(), contextlib.suppress(*errors):
        copies, inputs, tables = {}, {}, []
        for tensor in [*outputs, *read]:
            is_row = tensor.ref() in are_rows
            shape = [None, *tensor.shape[1:]] if is_row else tensor.shape
            copies[tensor.ref()] = tf.compat.v1.placeholder(tensor.dtype, shape)
            inputs[tensor.name] = copies[tensor.ref()]
        for operation in lists:
            results, its_tables = list_from_tables(operation)
            tables += its_tables
            names = [output.name for output in operation.outputs]
            inputs |= dict(zip(names, results, strict=True))
        (copy,) = insert(definition, inputs, [loss], "")
        twins = [[copies[t.ref()] for t in some] for some in (rows, parts)]
        analysis = Analysis(twins[0] + tables, twins[1])
        analysis.analyze([copy])
        return copy, analysis
    return None


def _linear_part(analysis: Analysis, tensor: tf.Tensor) -> Iterable[tf.Operation]:
    """Returns the operations that scale, add up or move numbers before a tensor."""

    def before(operation: tf.Operation) -> list[tf.Operation]:
        inputs = list(operation.inputs)
        if operation.type in SCALING:
            inputs = [t for t in inputs if tf.get_static_value(t) is None]
        elif operation.type in {*_OF_FIRST, *SHOWN}:
            inputs = inputs[:1]
        elif operation.type in LINEAR:
            terms = [t for t in inputs if analysis.state(t).kind != "fixed"]
            inputs = terms or inputs  # beside terms of examples, a penalty
        elif operation.type not in {"Einsum", "MatMul"}:
            return []
        return [tensor.op for tensor in inputs]

    return walk([tensor.op], before)


def _is_zero(tensor: tf.Tensor) -> bool:
    """Returns whether a term is multiplied by a constant 0."""

    of_first = {*_OF_FIRST, *SHOWN, "Cast", "Neg", "Reshape"}

    def before(operation: tf.Operation) -> list[tf.Operation]:
        inputs = list(operation.inputs)[: 1 if operation.type in of_first else None]
        return [t.op for t in inputs if operation.type in {*of_first, *SCALING}]

    scaling = [op for op in walk([tensor.op], before) if op.type in SCALING]
    values = (tf.get_static_value(factor) for op in scaling for factor in op.inputs)
    return any(value is not None and not value.any() for value in values)


def _scales(operation: tf.Operation) -> Iterator[float | None]:
    """Yields the constant by which an operation scales; None for one not known."""
    if operation.type == "IdentityN":  # tf.custom_gradient may scale gradients
        yield None
    for tensor in operation.inputs if operation.type in SCALING else ():
        value = tf.get_static_value(tensor)
        if value is None or not value.any() or not (value == value.flat[0]).all():
            continue  # 0 is the weight of another term
        by = float(value.flat[0])
        yield by if operation.type == "Mul" else 1.0 / by


def _elements(analysis: Analysis, tensor: tf.Tensor) -> int:
    """Returns the numbers that a tensor has for an example; 0 if that is not constant."""
    _, axis, span, *_ = state = analysis.state(tensor)
    if state.kind != "rows":
        return 1
    if tensor.shape.rank is None:
        return 0
    shape = tensor.shape.as_list()
    lengths = [*shape[:axis], *shape[axis + 1 :]]
    return 0 if span.symbols or None in lengths else math.prod([span.factor, *lengths])


def _may_make_mean(factor: float | None, size: int, elements: Iterable[int]) -> bool:
    """Returns whether a sum times `factor` may be a mean, or half of one.

    Args:
        factor: The factor; None if it is not constant.
        size: Number of examples in a batch; 0 if it is not constant.
        elements: Numbers for each example that may be added up; 0 if not constant.
    """
    if not factor or not 1e-30 < abs(factor) < 1e30:
        return True
    parts = 1.0 / abs(factor)
    number = round(parts / max(size, 1))
    if number >= 1 and abs(parts / max(size, 1) / number - 1) < 1e-5:
        if size == 0:
            return number > 2  # half of a sum, as L2Loss, is no mean
        return any(2 * count % number == 0 for count in elements)
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
    return is_whole and abs(factor) > 1 and abs(factor - round(factor, 2)) > 1e-6
