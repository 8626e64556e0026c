"""`housing_example.main` on a made-up machine: `--cpus=2 --rows_in_memory=20`, 0: any.

Several logical CPUs are several devices; a Python MemoryError in the graph is
TensorFlow's out-of-memory error. Checkpoints are 20 updates apart.
"""

import sys

import tensorflow as tf

from housing_example import jobs, model_fn
from housing_example.main import main

_training = model_fn._training


def _training_in_memory(head, features, labels, *arguments):
    def allocate(labels):
        if rows_in_memory and len(labels) > rows_in_memory:
            raise MemoryError(f"{len(labels)} rows")
        return labels

    shape = labels.shape
    labels = tf.numpy_function(allocate, [labels], labels.dtype)
    labels.set_shape(shape)
    return _training(head, features, labels, *arguments)


if __name__ == "__main__":
    cpus = int(sys.argv.pop(1).removeprefix("--cpus="))
    rows_in_memory = int(sys.argv.pop(1).removeprefix("--rows_in_memory="))
    model_fn._training = _training_in_memory
    jobs._UPDATES_BETWEEN_CHECKPOINTS = 20
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * cpus,
    )
    main(sys.argv)
