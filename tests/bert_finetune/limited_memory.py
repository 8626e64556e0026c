"""Training in which only so many examples fit in memory at once.

EXAMPLES_THAT_FIT=5 python limited_memory.py --flags=of run_classifier.py
"""

import os
import sys

import numpy as np
import tensorflow as tf

from bert_finetune import modeling, run_classifier


def limited(encode, examples: int):
    """Returns `encode`, which runs out of memory over more examples in training."""

    def check(rows):
        if rows > examples:
            raise MemoryError(f"{rows} examples")  # to TensorFlow, as its own
        return np.int32(0)

    def limited_encode(config, input_ids, *args, is_training, **options):
        if is_training:
            zero = tf.numpy_function(check, [tf.shape(input_ids)[0]], tf.int32)
            zero.set_shape([])
            input_ids += zero
        return encode(config, input_ids, *args, is_training=is_training, **options)

    return limited_encode


if __name__ == "__main__":
    fits = int(os.environ["EXAMPLES_THAT_FIT"])
    modeling.encode = limited(modeling.encode, fits)
    run_classifier.main(sys.argv)
