"""Inputs of a graph: a pipeline's batches, or the placeholders of an exported model.

Hooks do not run in a SavedModel, so the graph of an export is the plain model's.
"""

import re

import tensorflow as tf

from estimator_accum._graph import ancestors

_TAKES_A_BATCH = re.compile(r"IteratorGetNext|Queue\w*Dequeue|ReaderRead")


def _inputs_of(batch: dict) -> dict[tf.Operation, tf.Operation | None]:
    """Returns the operations from which `batch` is computed."""
    parts = tf.nest.flatten(batch, expand_composites=True)
    return ancestors([part.op for part in parts if isinstance(part, tf.Tensor)])


def is_fed(batch: dict) -> bool:
    """Returns whether `batch` comes from placeholders, as that of an exported model.

    Args:
        batch: The features and labels, in any structure.
    """
    types = {operation.type for operation in _inputs_of(batch)}
    is_read = any(map(_TAKES_A_BATCH.match, types))
    # One with a default may also be a number that goes with a data set's batches.
    return "Placeholder" in types or "PlaceholderWithDefault" in types and not is_read


def check_input_summaries(batch: dict) -> None:
    """Raises ValueError if a summary of input_fn would take a batch from training.

    Args:
        batch: The features and labels from input_fn, in any structure.
    """
    takers = {op for op in _inputs_of(batch) if _TAKES_A_BATCH.match(op.type)}
    for summary in tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SUMMARIES):
        if takers & ancestors([summary.op]).keys():
            raise ValueError(
                "A summary must not read the input pipeline, of which every read takes "
                f"a batch. Received: {summary.op.name}, made by input_fn. Make it in "
                "model_fn."
            )


class RefuseTraining(tf.compat.v1.train.SessionRunHook):
    """Refuses to train a graph that is made for export; an export runs no hooks."""

    def begin(self) -> None:
        raise ValueError(
            "Inside `microbatch_model_fn` input_fn must return batches of a data set or "
            "a queue. Received: placeholders. Return a tf.data.Dataset."
        )
