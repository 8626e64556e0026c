"""Share of a model's activations that is computed on the whole batch."""

import logging

import tensorflow as tf

from estimator_accum.graph.names import READERS_OF_VALUE, is_any_draw
from estimator_accum.graph.walks import data_ancestors, data_descendants
from estimator_accum.microbatch.own_optimizer.head import Border, View
from estimator_accum.rows.sizes import Size
from estimator_accum.rows.states import Mixed

_EXAMPLES, _UNKNOWN = 32, 16  # numbers for sizes that are not known yet
_MUCH = 0.5  # of the activations
SHARE = "micro-batches: %.1f%% of the activations are computed on the whole batch"
_logger = logging.getLogger("tensorflow.estimator_accum")


def report_activations(view: View, losses: list[tf.Tensor]) -> None:
    """Logs the share of the model that is computed on the whole batch; warns if it is much.

    Args:
        view: The graph.
        losses: The losses.
    """
    head = Border(view, losses).operations
    needed = data_ancestors([tensor.op for tensor in losses])
    network = _computed_from_variables(set(needed)) & view.of_batch
    whole = sum(_elements(view, op) for op in network & head.keys())
    total = sum(_elements(view, op) for op in network)
    _logger.debug(SHARE, 100 * whole / max(total, 1))
    if whole <= _MUCH * total or not whole:
        return
    origins = [origin for origin in view.analysis.origins if origin.operation in head]
    if not origins:
        return
    operation, reason = origins[0]
    _logger.warning(
        "micro-batches: %d%% of the activations are computed on the whole batch, "
        "so splitting saves little memory: see %s of type %s (%s)",
        round(100 * whole / total),
        operation.name,
        operation.type,
        reason,
    )


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
    reads = {op for op in operations if op.type in READERS_OF_VALUE | {"VariableV2"}}
    values = [output for operation in reads for output in operation.outputs]
    return reads | data_descendants(values, operations.__contains__)


def _elements(view: View, operation: tf.Operation) -> int:
    """Returns the approximate number of an operation's results."""
    total = 0
    for output in operation.outputs:
        if output.dtype.is_floating and output.shape.rank is not None:
            try:
                total += _number(view.analysis.dims(output))
            except Mixed:
                dims = output.shape.as_list()
                total += _number(
                    [Size(power=1) if n is None else Size(n) for n in dims]
                )
    return total


def _number(dims: list[Size]) -> int:
    number = 1
    for size in dims:
        number *= size.factor * _EXAMPLES**size.power * _UNKNOWN ** len(size.symbols)
    return number
