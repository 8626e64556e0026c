"""The batch of `microbatch_model_fn` in which a train op is made.

A train op that is made inside has the batch as its window: `WholeBatch`, of
estimator_accum/microbatch/batch.py. Replicas build their graphs in threads of their own.
"""

import threading

_current = threading.local()


def current_batch():
    """Returns the `WholeBatch` that is the window; None outside `microbatch_model_fn`."""
    return getattr(_current, "batch", None)


def current_parts() -> list:
    """Returns the tensors of its current micro-batch; none outside."""
    batch = current_batch()
    return [] if batch is None else [part.sliced for part in batch.parts]


def set_current_batch(batch) -> None:
    """Makes a `WholeBatch`, or None, the window of train ops that this thread makes."""
    _current.batch = batch
