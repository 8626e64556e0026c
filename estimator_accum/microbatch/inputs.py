"""Inputs of a graph: a pipeline's batches, or the placeholders of an exported model.

Hooks do not run in a SavedModel, so the graph of an export is the plain model's.
"""

import tensorflow as tf

from estimator_accum.graph.functions import library_of_functions
from estimator_accum.graph.internals import context_of
from estimator_accum.graph.names import TAKING_A_BATCH
from estimator_accum.graph.walks import ancestors, descendants
from estimator_accum.graph.writers import is_reference
from estimator_accum.microbatch.repeatable import is_repeatable


def is_fed(batch: dict) -> bool:
    """Returns whether `batch` comes from placeholders, as that of an exported model.

    Args:
        batch: The features and labels, in any structure.
    """
    parts = tf.nest.flatten(batch, expand_composites=True)
    needed = ancestors([part.op for part in parts if isinstance(part, tf.Tensor)])
    types = {operation.type for operation in needed}
    is_read = any(map(TAKING_A_BATCH.match, types))
    # One with a default may also be a number that goes with a data set's batches.
    return "Placeholder" in types or "PlaceholderWithDefault" in types and not is_read


def pipeline_of(stages: list[tf.Operation]) -> tuple[dict, set[tf.Operation]]:
    """Returns the ancestors of operations that stage batches, and those that read batches.

    Every run of the latter, or of draws of random numbers there, has other results.
    """
    library = library_of_functions()
    staging = ancestors(stages)
    takers = [operation for operation in staging if gives_another(operation, library)]
    return staging, {*takers, *(descendants(takers) & staging.keys())}


def gives_another(operation: tf.Operation, library: dict) -> bool:
    """Returns whether an operation of the pipeline has new results in every run."""
    has_results = any(map(can_be_fed, operation.outputs))
    return has_results and not is_repeatable(operation, library)


def can_be_fed(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor has a value that a session fetches and feeds."""
    is_value = tensor.dtype not in (tf.resource, tf.variant)
    is_outside = context_of(tensor.op) is None
    return is_value and is_outside and not is_reference(tensor)


class RefuseTraining(tf.compat.v1.train.SessionRunHook):
    """Refuses to train a graph that is made for export; an export runs no hooks."""

    def begin(self) -> None:
        raise ValueError(
            "Inside `microbatch_model_fn` input_fn must return batches of a data set or "
            "a queue. Received: placeholders. Return a tf.data.Dataset."
        )
