"""Checks of the context in which a train op is made."""

import inspect

import tensorflow as tf

from estimator_accum.core.reduction import are_cpus_of_one_process
from estimator_accum.core.v1_optimizers import always_reduces
from estimator_accum.graph.internals import kind_of_reduction


def check_replica_context(optimizer) -> None:
    """Raises ValueError if no micro-step can be made here with this optimizer."""
    if tf.distribute.get_replica_context() is None:
        raise ValueError(
            "An accumulating train op must be made in replica context. Received: "
            "cross-replica context. Call it inside a model_fn or inside strategy.run."
        )
    if not tf.distribute.has_strategy():
        return
    if always_reduces(optimizer):
        _check_no_collectives(tf.distribute.get_strategy())
        return
    parameters = inspect.signature(optimizer.apply_gradients).parameters
    if "skip_gradients_aggregation" not in parameters:
        raise ValueError(
            "Under a tf.distribute strategy `optimizer.apply_gradients` must take "
            "`skip_gradients_aggregation`, so that gradients are reduced once. "
            f"Received: {type(optimizer).__name__}, which overrides it without. "
            "Implement _resource_apply_dense and _resource_apply_sparse instead."
        )


def _check_no_collectives(strategy) -> None:
    """Raises ValueError if an optimizer that reduces gradients itself may hang."""
    reduces_by = kind_of_reduction(strategy)
    if are_cpus_of_one_process(strategy) and reduces_by == "CollectiveAllReduce":
        raise ValueError(
            "On several CPUs of one process a loss-scaling optimizer, and before "
            "TensorFlow 2.13 any, must not reduce by collectives, which wait for ever in a "
            "Session with one CPU device. "
            f"Received: {type(strategy).__name__} with {reduces_by}. Pass it "
            "cross_device_ops=tf.distribute.ReductionToOneDevice()."
        )
