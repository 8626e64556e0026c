"""Schedules that an input pipeline or Python counts, with every micro-step."""

import logging
import re

import tensorflow as tf

from estimator_accum.checks.global_step import deciding as deciding_with_shapes
from estimator_accum.graph.functions import all_nodes
from estimator_accum.graph.names import PYTHON, SHAPES, TAKING_A_BATCH
from estimator_accum.graph.outermost import has_mark, mark_graph
from estimator_accum.graph.walks import ancestors, data_ancestors
from estimator_accum.graph.writers import writing

_WARNED = "_estimator_accum_warned_of_other_clocks"  # a graph's attribute
_NOT_COUNTED = re.compile(
    "Batch|Interleave|Record|Text|FixedLength|Generator|Random|Shuffle|Sample|PyFunc"
    "|EagerPyFunc|Stateful(?!Partitioned)|Stateless(Random|Truncated)|Rng"
)
_logger = logging.getLogger("tensorflow.estimator_accum")


def warn_of_other_clocks(
    loss: tf.Tensor | None,
    gradients: list[tf.Tensor],
    optimizer_ops: list[tf.Operation],
) -> None:
    """Warns, once for a graph, of a schedule that moves with every micro-step.

    A schedule of the loss is an iterator over single numbers beside one over batches,
    whose data set counts in a fixed order. One of the gradients alone may be in Python.

    Args:
        loss: The loss of a micro-batch; None if it is not known.
        gradients: Its gradients, of a sparse one the values.
        optimizer_ops: Operations of the optimizer's update.
    """
    needed = data_ancestors(writing(optimizer_ops), _deciding)
    clocks = [op for op in needed if _moves(op)]
    if not clocks:
        behind = data_ancestors([gradient.op for gradient in gradients], _deciding)
        clocks = _counting_iterators(behind)
        in_python = [op for op in behind if op.type in PYTHON and _moves(op)]
        if in_python and loss is not None:
            of_loss = data_ancestors([loss.op], _deciding)
            clocks += [op for op in in_python if op not in of_loss]
    graph = tf.compat.v1.get_default_graph()
    if clocks and not has_mark(graph, _WARNED):
        mark_graph(graph, _WARNED)
        _logger.warning(
            "%s takes its next value with every micro-step, and decides the %s: a "
            "schedule moves K times too fast. Compute it from "
            "get_or_create_update_step(), or use microbatch_model_fn.",
            clocks[0].name,
            "update" if clocks[0] in needed else "gradients",
        )


def _deciding(operation: tf.Operation) -> list[tf.Tensor]:
    """Returns the inputs whose values decide an operation's results."""
    return [] if operation.type in SHAPES else deciding_with_shapes(operation)


def _moves(operation: tf.Operation) -> bool:
    if operation.type in PYTHON:
        return all(tf.get_static_value(t) is not None for t in operation.inputs)
    return TAKING_A_BATCH.match(operation.type) is not None


def _counting_iterators(needed) -> list[tf.Operation]:
    taking = [op for op in needed if op.type == "IteratorGetNext"]
    numbers = [op for op in taking if all(t.shape.rank == 0 for t in op.outputs)]
    if not numbers or len(numbers) == len(taking):
        return []
    return [op for op in numbers if _is_counted(op.inputs[0].op)]


def _is_counted(iterator: tf.Operation) -> bool:
    """Returns whether an iterator's data set counts, in a fixed order."""
    makers = [op for op in iterator.outputs[0].consumers() if op.type == "MakeIterator"]
    kinds = {node.op for node in all_nodes([iterator, *ancestors(makers)])}
    return "RangeDataset" in kinds and not any(map(_NOT_COUNTED.search, kinds))
