"""Variables that every micro-step writes, where a batch would write them once.

trained     by an optimizer that accumulates nothing
averaged    from trained variables, such as a moving average of the weights
counted     without the batch, and read by the loss or the optimizer: a clock
"""

import functools
import logging
import re
from collections.abc import Iterator

import tensorflow as tf

from estimator_accum.checks.global_step import deciding_inside
from estimator_accum.checks.repeated_writes import changes_once
from estimator_accum.graph.names import moves_generator
from estimator_accum.graph.outermost import has_mark, mark_graph
from estimator_accum.graph.variables import find_global_step
from estimator_accum.graph.walks import data_ancestors
from estimator_accum.graph.writers import MicroStepWriters, needed_by_updates, varying

_WARNED = "_estimator_accum_warned_of_writes"  # a graph's attribute
_APPLIES = re.compile("(Resource)?(Sparse)?Apply")
_logger = logging.getLogger("tensorflow.estimator_accum")


def warn_of_micro_step_writes(
    graph: tf.Graph, writers: MicroStepWriters, windows: list
) -> None:
    """Warns, once for a graph, of a variable that is written K times per update.

    Args:
        graph: The graph.
        writers: Its writers of every micro-step.
        windows: Its `Window`s.
    """
    if has_mark(graph, _WARNED):
        return
    for variable, writer in _repeated_writes(graph, writers, windows):
        mark_graph(graph, _WARNED)
        _logger.warning(
            "%s is written by %s with every micro-step, where a big batch writes it "
            "once: K times per update. Pass the write as `after_update_ops`, wrap its "
            "optimizer in AccumulatingOptimizer, or use microbatch_model_fn.",
            variable.name,
            writer.name,
        )
        return


def _repeated_writes(
    graph: tf.Graph, writers: MicroStepWriters, windows: list
) -> Iterator[tuple[tf.Operation, tf.Operation]]:
    """Yields variables that a batch would write once, each with a writer."""
    keys = tf.compat.v1.GraphKeys
    trained = {name for window in windows for name in window.names}
    state = {v.op.name for w in windows for v in w.variables}
    counter = find_global_step()
    names = {*trained, *state} | ({counter.op.name} if counter is not None else set())
    meant = needed_by_updates(graph)
    trainable = {v.op for v in graph.get_collection(keys.TRAINABLE_VARIABLES)}

    @functools.cache
    def decide_update() -> dict:
        variables = [graph.get_operation_by_name(name) for name in trained | state]
        return data_ancestors(writers.all_of(variables), deciding_inside(graph))

    def is_once_per_batch(variable: tf.Operation, writer: tf.Operation) -> bool:
        if _APPLIES.match(writer.type) or variable in trainable:
            return writer not in meant
        tensors = writers.deciding(variable, writer)
        if tensors is None or moves_generator(writer.type):
            return False
        needed = data_ancestors([tensor.op for tensor in tensors])
        is_averaged = any(op.name in trained for op in needed)
        is_of_batch = varying(needed)
        is_used = is_averaged or variable in decide_update()
        if writer in meant and is_averaged:  # such as the vectors of spectral norms
            return False
        return not is_of_batch and is_used and not changes_once(variable, writers)

    for variable in (v.op for v in graph.get_collection(keys.GLOBAL_VARIABLES)):
        if variable.name not in names:
            for writer in writers.of(variable):
                if is_once_per_batch(variable, writer):
                    yield variable, writer
