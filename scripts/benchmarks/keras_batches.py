"""The program of one contender: `fit` of a Keras model on batches, split or unsplit.

    python -m scripts.benchmarks.keras_batches '{"model": "convnet",
        "batch_size": 256, "loss": "one pass", "micro_batches": 8, "updates": 4}'

`model` is "convnet" or "transformer"; `loss` is "one pass" or "two passes", the passes of
a split batch; with `micro_batches` 1 the batch is whole. The program prints one JSON line
with the Keras's version and the peak of the model's memory, and one for every line that it
reads: processor seconds and seconds per update. With `"is_counted": true` a slower
allocator counts the bytes of all tensors; otherwise that peak is null.
"""

import functools
import json
import os
import sys
import time

SPEC = json.loads(sys.argv[1]) if __name__ == "__main__" else {}
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import
if SPEC.get("is_counted"):
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"  # it would have an allocator of its own

import keras
import numpy as np
import tensorflow as tf

from estimator_accum.keras import microbatch
from estimator_accum.reports._memory import MODEL, peak_bytes
from scripts.benchmarks.base import serve
from scripts.benchmarks.keras_fit import encoder
from scripts.benchmarks.models import Size

_PIXELS, _TOKENS, _CLASSES = 28, 128, 10
_SIZE = Size(layers=4, hidden=256, heads=4, vocabulary=2000)


def main() -> None:
    """Trains two updates, then serves."""
    keras.utils.set_random_seed(1)
    model, x = _MODELS[SPEC["model"]](SPEC["batch_size"])
    model = microbatch(model, SPEC["micro_batches"])
    losses = keras.losses.SparseCategoricalCrossentropy(True), _contrast
    loss = losses[SPEC["loss"] == "two passes"]
    model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=False)
    y = np.arange(SPEC["batch_size"], dtype=np.int32) % 2
    batches = tf.data.Dataset.from_tensors((x, y)).repeat()
    batches = batches.unbatch().batch(SPEC["batch_size"])
    model.fit(batches, steps_per_epoch=2, verbose=0)
    facts = {"version": keras.__version__, "peak_bytes": peak_bytes().get(MODEL)}
    serve(facts, **_clocks(model, batches))


def _clocks(model, batches) -> dict:
    """Returns functions of the seconds of an update; one `fit` sets all clocks."""
    clocks = {"processor_secs": time.process_time, "secs": time.perf_counter}
    taken = {}

    def read(name):
        if not taken:
            start = {name: clock() for name, clock in clocks.items()}
            model.fit(batches, steps_per_epoch=SPEC["updates"], verbose=0)
            taken.update({name: clocks[name]() - start[name] for name in clocks})
        return taken.pop(name) / SPEC["updates"]

    return {name: functools.partial(read, name) for name in clocks}


def _contrast(y, outputs):
    """Tells each example from all others, so a split batch needs two passes."""
    del y
    pairs = tf.matmul(outputs, outputs, transpose_b=True)
    labels = tf.range(tf.shape(outputs)[0])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, pairs)


def _convnet(batch_size: int):
    layers = keras.layers
    image = hidden = keras.Input([_PIXELS, _PIXELS, 1])
    for _ in range(8):
        hidden = layers.Conv2D(32, 3, padding="same", activation="relu")(hidden)
    hidden = layers.GlobalAveragePooling2D()(hidden)
    x = np.random.default_rng(0).normal(size=[batch_size, _PIXELS, _PIXELS, 1])
    return keras.Model(image, layers.Dense(_CLASSES)(hidden)), x.astype("float32")


def _transformer(batch_size: int):
    shape = [batch_size, _TOKENS]
    ids = np.random.default_rng(0).integers(0, _SIZE.vocabulary, shape, np.int32)
    return encoder(keras, _SIZE, _TOKENS), ids


_MODELS = {"convnet": _convnet, "transformer": _transformer}


if __name__ == "__main__":
    main()
