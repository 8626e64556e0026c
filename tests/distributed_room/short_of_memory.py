"""`distributed.main` on a machine that holds `--rows_in_memory` images at once.

It dies after `--updates` of them; 0 is never. A Python MemoryError in the graph is
TensorFlow's out-of-memory error.
"""

import os
import sys

import tensorflow as tf

from distributed import model_fn
from distributed.main import main

_training = model_fn._training


def _training_in_memory(loss, labels, *arguments):
    def allocate(labels, step):
        if updates and step >= updates:
            os._exit(9)
        if len(labels) > rows_in_memory:
            raise MemoryError(f"{len(labels)} images")
        return labels

    step = tf.compat.v1.train.get_global_step()
    allocated = tf.numpy_function(allocate, [labels, step], tf.int32)
    with tf.control_dependencies([allocated]):
        loss = tf.identity(loss)
    return _training(loss, labels, *arguments)


if __name__ == "__main__":
    rows_in_memory = int(sys.argv.pop(1).removeprefix("--rows_in_memory="))
    updates = int(sys.argv.pop(1).removeprefix("--updates="))
    model_fn._training = _training_in_memory
    main(sys.argv)
