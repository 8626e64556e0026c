"""Sums over replicas."""

import tensorflow as tf

from estimator_accum.core.gradients import Gradient, map_values


def sum_over_replicas(tensors: list[Gradient]) -> list[Gradient]:
    """Sums each tensor over all replicas; call it in replica context."""
    context = tf.distribute.get_replica_context()
    if not tensors or context.num_replicas_in_sync == 1:
        return tensors
    # all_reduce follows each tensor's gradient path back to variables, and does not
    # recognize other replicas' copies of them.
    tensors = [map_values(tf.stop_gradient, tensor) for tensor in tensors]
    if are_cpus_of_one_process(context.strategy):
        return context.merge_call(_sum_on_one_device, args=(tensors,))
    dtypes = {tensor.dtype: None for tensor in tensors}  # a collective takes one
    for dtype in dtypes:
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        sums = context.all_reduce(
            tf.distribute.ReduceOp.SUM, [tensors[i] for i in places]
        )
        for i, value in zip(places, sums, strict=True):
            tensors[i] = value
    return tensors


def are_cpus_of_one_process(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether all replicas, at least two, train on CPUs of this process.

    TensorFlow's collectives, the default of a MirroredStrategy that was made eagerly,
    then wait forever in a Session with fewer CPU devices than replicas, and a Session
    has one CPU device by default.
    """
    devices = strategy.extended.worker_devices
    is_one_process = len(devices) == strategy.num_replicas_in_sync > 1
    return is_one_process and all("CPU" in device.upper() for device in devices)


def _sum_on_one_device(strategy, tensors: list[Gradient]) -> list[Gradient]:
    """Sums each tensor without a collective, in cross-replica context."""
    del strategy
    return tf.distribute.ReductionToOneDevice().batch_reduce(
        tf.distribute.ReduceOp.SUM, [(tensor, tensor) for tensor in tensors]
    )
