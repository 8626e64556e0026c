"""MirroredStrategy over two logical CPUs."""

import sys

import numpy as np
import tensorflow as tf

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2,
)


def input_fn():
    x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices(({"x": x}, 2 * x)).repeat().batch(16)


estimator = tf.estimator.DNNRegressor(
    [4],
    [tf.feature_column.numeric_column("x")],
    model_dir=sys.argv[1],
    optimizer=lambda: tf.keras.optimizers.legacy.Adam(0.05),  # one a replica
    config=tf.estimator.RunConfig(
        train_distribute=tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
        # By default the Session makes one CPU device, and then waits for ever.
        session_config=tf.compat.v1.ConfigProto(
            device_count={"CPU": 2}, allow_soft_placement=True
        ),
        tf_random_seed=1,
    ),
)
estimator.train(input_fn, steps=100)
metrics = estimator.evaluate(input_fn, steps=4)
assert metrics["average_loss"] < 0.5, metrics
print("loss", metrics["average_loss"])
