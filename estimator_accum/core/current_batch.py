"""The batch of `microbatch_model_fn` in which a train op is made.

A train op that is made inside has the batch as its window: `WholeBatch`, of
estimator_accum/microbatch/batch.py. Replicas build their graphs in threads of their own.
"""

import contextlib
import threading

import tensorflow as tf

from estimator_accum.graph.outermost import outermost_function
from estimator_accum.graph.replicas import number_of_replica

_current = threading.local()
_BATCHES = "_estimator_accum_batches"  # attribute of a graph


def current_batch():
    """Returns the `WholeBatch` that is the window; None outside `microbatch_model_fn`."""
    if hasattr(_current, "batch"):
        return _current.batch
    batches = getattr(outermost_function(), _BATCHES, None)
    number = number_of_replica() if batches else None
    return None if number is None else batches[number % len(batches)]


def current_parts() -> list:
    """Returns the tensors of its current micro-batch; none outside."""
    batch = current_batch()
    return [] if batch is None else [part.sliced for part in batch.parts]


def set_batches(graph: tf.Graph, batches: list) -> None:
    """Makes a `WholeBatch` the window in each replica whose thread has no other one.

    Args:
        graph: The graph that the replicas build.
        batches: The batch of each replica.
    """
    setattr(graph, _BATCHES, batches)


@contextlib.contextmanager
def made_inside(batch):
    """Context in which a `WholeBatch`, or None, is the window of this thread's train ops."""
    before = {**vars(_current)}  # not that of a graph, which is left in between
    _current.batch = batch
    try:
        yield
    finally:
        vars(_current).clear()
        vars(_current).update(before)
