"""The program of one contender: a training step by tf.function or `microbatch_step`.

    python -m scripts.benchmarks.steps '{"size": [4, 512, 8], "tokens": 32,
        "batch_size": 32, "micro_batches": 4}'

With `micro_batches` 1 the step is a tf.function. The program prints one JSON line that says
nothing, and one for every line that it reads: the processor seconds of the first call of a
step that trains BERT's encoder, which traces it, and the seconds of a later call of a step
of five operations.
"""

import json
import os
import sys
import time

SPEC = json.loads(sys.argv[1]) if __name__ == "__main__" else {}
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import

import keras
import numpy as np
import tensorflow as tf

from estimator_accum import microbatch_step
from scripts.benchmarks.base import serve
from scripts.benchmarks.keras_fit import encoder
from scripts.benchmarks.models import Size

_CALLS = 100


def main() -> None:
    """Traces a short step, which imports all that is needed, then serves."""
    call_secs()
    serve({}, first_secs=first_secs, call_secs=call_secs)


def first_secs() -> float:
    """Returns the processor seconds of the first call of a step."""
    size = Size(*SPEC["size"])
    model = encoder(keras, size, SPEC["tokens"])
    shape = SPEC["batch_size"], SPEC["tokens"]
    ids = np.random.default_rng(0).integers(0, size.vocabulary, shape, np.int32)

    def step(ids):
        weights = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(ids, training=True) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-3 * tf.convert_to_tensor(gradient))
        return loss

    step, start = microbatch_step(step, SPEC["micro_batches"]), time.process_time()
    step(ids)
    return time.process_time() - start


def call_secs() -> float:
    """Returns the seconds of a call of a step with almost no work."""
    kernel, x = tf.Variable(tf.ones([4, 4])), tf.ones([64, 4])

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ kernel)
        kernel.assign_sub(1e-3 * tape.gradient(loss, kernel))
        return loss

    step = microbatch_step(step, SPEC["micro_batches"])
    for _ in range(8):  # the first ones are looked at
        step(x)
    start = time.perf_counter()
    for _ in range(_CALLS):
        step(x)
    return (time.perf_counter() - start) / _CALLS


if __name__ == "__main__":
    main()
