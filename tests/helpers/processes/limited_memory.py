"""Compares "auto" with 2 micro-batches in a process that has little memory.

    python -m tests.helpers.processes.limited_memory FOLDER

Prints the largest difference of a weight. The six wide layers take 24 MB for a batch, so
the batch at once exceeds a limit of 20 MB.
"""

import sys

import tensorflow as tf

from estimator_accum import microbatch_model_fn
from tests.helpers.models import microbatch_runs as runs


def _wide_layers(x: tf.Tensor) -> tf.Tensor:
    start = tf.compat.v1.ones_initializer()
    kernel = tf.compat.v1.get_variable("wide", [runs.WIDTH, 1024], initializer=start)
    wide = tf.matmul(x, kernel)
    for _ in range(6):
        wide = tf.tanh(wide)
    return tf.reduce_mean(tf.reshape(wide, [-1, 8, 128]), 2)


def main(folder: str) -> None:
    model_fn = runs.make_model_fn(runs.plain("adam"), _wide_layers)
    batches = runs.input_fn_of(examples=2 * 1024, batch_size=1024)
    auto, fixed = microbatch_model_fn(model_fn), microbatch_model_fn(model_fn, 2)
    ours = runs.train(auto, f"{folder}/auto", batches)
    theirs = runs.train(fixed, f"{folder}/fixed", batches)
    print(f"{runs.difference(ours, theirs):.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
