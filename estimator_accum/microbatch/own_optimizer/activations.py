"""Share of a model's activations that is computed on the whole batch."""

import logging
from collections.abc import Callable, Iterable

import tensorflow as tf

from estimator_accum.graph.functions import graphs_called
from estimator_accum.graph.names import (
    CALLS,
    PYTHON,
    READERS_OF_VALUE,
    is_any_draw,
)
from estimator_accum.graph.walks import data_ancestors, data_descendants
from estimator_accum.microbatch.own_optimizer.batch_norm import is_normalization
from estimator_accum.microbatch.own_optimizer.head import Border, View
from estimator_accum.reports._display import write_line
from estimator_accum.rows.sizes import Size
from estimator_accum.rows.states import NO_RULE, Mixed

_EXAMPLES, _UNKNOWN = 32, 16  # numbers for sizes that are not known yet
_SOME, _SAID, _MUCH = 0.01, 0.1, 0.5  # of the activations
_SHOWN = 3  # causes
_REMEDY = (
    ". If each row of %s is computed from its own example alone, put "
    "estimator_accum.per_example(...) around it; see docs/errors.md, "
    "Micro-batches save no memory"
)
_NORMALIZED = (
    '. batch_norm="micro_batch" splits %s: each micro-batch is normalized by its own '
    "statistics"
)
SHARE = "micro-batches: %.1f%% of the activations are computed on the whole batch"
_logger = logging.getLogger("tensorflow.estimator_accum")


def report_activations(view: View, losses: list[tf.Tensor]) -> None:
    """Logs the share of the model that is computed on the whole batch, and the causes.

    From a tenth on it is said where nothing is logged, too; above half it is a warning.

    Args:
        view: The graph.
        losses: The losses.
    """
    head = Border(view, losses).operations
    needed = data_ancestors([tensor.op for tensor in losses])
    network = _computed_from_variables(set(needed)) & view.of_batch
    whole = _elements(network & head.keys(), view.analysis.dims)
    total = _elements(network, view.analysis.dims)
    _logger.debug(SHARE, 100 * whole / max(total, 1))
    if whole < _SOME * total or not whole:
        return
    origins = [origin for origin in view.analysis.origins if origin.operation in head]
    # Not first the numbers of labels, say, that a loss makes of a shape.
    origins.sort(key=lambda origin: not _is_of_network(origin.operation, network))
    causes = [
        f"{operation.name} of type {operation.type} ({reason})"
        for operation, reason in origins
    ]
    if not causes:
        return
    shown = [origin for origin in origins[:_SHOWN] if _may_be_declared(*origin)]
    remedy = _REMEDY % shown[0].operation.name if shown else ""
    if view.batch.batch_norm == "batch":
        normalizing = [
            operation.name
            for operation, _ in origins[:_SHOWN]
            if is_normalization(operation, view.of_batch)
        ]
        remedy = (_NORMALIZED % normalizing[0] if normalizing else "") + remedy
    share = round(100 * whole / total)
    if whole > _MUCH * total:
        _logger.warning(
            "micro-batches: %d%% of the activations are computed on the whole batch, "
            "so splitting saves little memory: see %s%s",
            *(share, _listed(causes), remedy),
        )
        return
    line = (
        f"micro-batches: {share}% of the activations are computed on the whole batch: "
        f"see {_listed(causes)}{remedy}"
    )
    if whole < _SAID * total:
        _logger.info("%s", line)
    else:
        write_line(line, _logger)


def _is_of_network(operation: tf.Operation, network: set[tf.Operation]) -> bool:
    has_values = any(output.dtype.is_floating for output in operation.outputs)
    return has_values and operation in network


def _may_be_declared(operation: tf.Operation, reason: str) -> bool:
    """Returns whether rows may be of their own examples, which only the user knows."""
    return reason == NO_RULE or operation.type in PYTHON


def _listed(causes: list[str]) -> str:
    rest = len(causes) - _SHOWN
    others = f" and {rest} {'others' if rest > 1 else 'other'}" if rest > 0 else ""
    return ", ".join(causes[:_SHOWN]) + others


def report_unsplit(losses: list[tf.Tensor]) -> None:
    """Warns of a gradient that random numbers decide, and no example.

    Args:
        losses: Losses that are computed from no example.
    """
    needed = data_ancestors([tensor.op for tensor in losses])
    if any(is_any_draw(operation) for operation in needed):
        _logger.warning(
            "micro-batches: the gradient of %s is computed unsplit: it depends on random "
            "numbers, but on no example. Draw them with tf.shape(x)[0] rows, outside of "
            "functions, to split it",
            losses[0].name,
        )


def _computed_from_variables(operations: set[tf.Operation]) -> set[tf.Operation]:
    kinds = READERS_OF_VALUE | {"VariableV2"}
    reads = {op for op in operations if op.type in kinds or _reads_within(op)}
    values = [output for operation in reads for output in operation.outputs]
    return reads | data_descendants(values, operations.__contains__)


def _reads_within(operation: tf.Operation) -> bool:
    """Returns whether an operation calls a function that may read variables."""
    is_call = operation.type in CALLS
    return is_call and any(tensor.dtype == tf.resource for tensor in operation.inputs)


def _elements(operations: Iterable[tf.Operation], dims_of: Callable) -> int:
    """Returns the approximate number of the results of operations.

    Args:
        operations: The operations.
        dims_of: Returns the sizes of a tensor, or raises Mixed.
    """
    total = 0
    for operation in operations:
        if operation.type in CALLS:
            (function,) = graphs_called(operation)
            total += _elements(function.get_operations(), _sizes)
            continue
        for output in operation.outputs:
            if output.dtype.is_floating and output.shape.rank is not None:
                try:
                    total += _number(dims_of(output))
                except Mixed:
                    total += _number(_sizes(output))
    return total


def _sizes(tensor: tf.Tensor) -> list[Size]:
    return [Size(power=1) if n is None else Size(n) for n in tensor.shape.as_list()]


def _number(dims: list[Size]) -> int:
    number = 1
    for size in dims:
        number *= size.factor * _EXAMPLES**size.power * _UNKNOWN ** len(size.symbols)
    return number
