"""Two replicas in one process."""

import tensorflow as tf

TWO_CPUS = tf.compat.v1.ConfigProto(device_count={"CPU": 2}, allow_soft_placement=True)


def two_replicas() -> tf.distribute.MirroredStrategy:
    """Returns a strategy for sessions with `TWO_CPUS`."""
    with tf.Graph().as_default():  # eager creation needs two CPUs
        return tf.distribute.MirroredStrategy(
            ["/cpu:0", "/cpu:1"],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
