"""The program of one Keras contender: `fit` of a BERT encoder, plain or accumulating.

    python -m scripts.benchmarks.keras_fit '{"keras": "keras", "way": "plain",
        "size": [4, 512, 8], "steps": 4, "micro_batch_size": 8, "tokens": 16,
        "micro_steps": 16}'

It serves seconds per micro-step. `way` is "plain", "accumulate" or, with Keras 3,
"built-in".
"""

import importlib
import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import

import numpy as np
import tensorflow as tf

from estimator_accum.keras import accumulate
from scripts.benchmarks.base import serve
from scripts.benchmarks.models import Size


def main() -> None:
    """Reads the contender from the command line, and serves."""
    spec = json.loads(sys.argv[1])
    keras = importlib.import_module(spec["keras"])
    size = Size(*spec["size"])
    model = encoder(keras, size, spec["tokens"])
    model.compile(
        make_optimizer(keras, spec["way"], spec["steps"]),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    shape = [spec["micro_batch_size"], spec["tokens"]]
    ids = np.random.default_rng(0).integers(0, size.vocabulary, shape, np.int32)
    batch = tf.data.Dataset.from_tensors((ids, np.zeros(shape[0], np.int32)))
    data = batch.repeat(spec["steps"] * max(1, spec["micro_steps"] // spec["steps"]))
    model.fit(data, verbose=0)  # compiles and allocates

    def secs_per_micro_step():
        start = time.perf_counter()
        model.fit(data, verbose=0)
        return (time.perf_counter() - start) / len(data)

    serve({"version": keras.__version__}, secs=secs_per_micro_step)


def make_optimizer(keras, way: str, steps: int):
    """Returns Adam, which updates every `steps` micro-steps unless `way` is plain."""
    if way == "built-in":
        return keras.optimizers.Adam(1e-6, gradient_accumulation_steps=steps)
    plain = keras.optimizers.Adam(1e-6)
    return plain if way == "plain" else accumulate(plain, steps)


def encoder(keras, size: Size, tokens: int):
    """Returns BERT's encoder with a two-class classifier, made of Keras layers."""
    layers, hidden, heads, vocabulary = size
    ids = keras.Input([tokens], dtype="int32")
    x = keras.layers.Embedding(vocabulary, hidden)(ids)
    for _ in range(layers):
        attended = keras.layers.MultiHeadAttention(heads, hidden // heads)(x, x)
        x = keras.layers.LayerNormalization()(keras.layers.Add()([x, attended]))
        inner = keras.layers.Dense(4 * hidden, activation="gelu")(x)
        inner = keras.layers.Dense(hidden)(inner)
        x = keras.layers.LayerNormalization()(keras.layers.Add()([x, inner]))
    pooled = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(ids, keras.layers.Dense(2)(pooled))


if __name__ == "__main__":
    main()
