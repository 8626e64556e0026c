"""Several replicas in one process."""

import tensorflow as tf

TWO_CPUS = tf.compat.v1.ConfigProto(device_count={"CPU": 2}, allow_soft_placement=True)


def two_replicas() -> tf.distribute.MirroredStrategy:
    """Returns a strategy for sessions with `TWO_CPUS`."""
    return replicas_on_cpus(2)


def replicas_on_cpus(count: int) -> tf.distribute.Strategy:
    """Returns a strategy for sessions with as many CPUs; the default one for 1."""
    if count == 1:
        return tf.distribute.get_strategy()
    with tf.Graph().as_default():  # eager creation needs the CPUs
        return tf.distribute.MirroredStrategy(
            [f"/cpu:{number}" for number in range(count)],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
