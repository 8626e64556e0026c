"""Losses or models of Keras, trained on whole batches or in micro-batches."""

import itertools

import numpy as np
import tensorflow as tf

from estimator_accum.keras import microbatch

_EXAMPLES, _BATCH = 26, 10  # the last batch of an epoch has 6


def _contrast(y, outputs):
    """Sees all pairs of examples."""
    pairs = tf.matmul(outputs, outputs, transpose_b=True)
    return tf.reduce_logsumexp(pairs, axis=1) + tf.reduce_sum(y * outputs, axis=1)


def _largest(y, outputs):
    return tf.reduce_max(tf.square(outputs - y))


def _deviation(y, outputs):
    return tf.math.reduce_std(outputs) + tf.reduce_mean(tf.square(outputs - y))


# Each makes (loss, further arguments of fit, kind of targets).
LOSSES = {
    "mse": lambda keras: ("mse", {}, "floats"),
    "mae": lambda keras: ("mae", {}, "floats"),
    "huber": lambda keras: (keras.losses.Huber(0.3), {}, "floats"),
    "log_cosh": lambda keras: (keras.losses.LogCosh(), {}, "floats"),
    "binary": lambda keras: (keras.losses.BinaryCrossentropy(True), {}, "bits"),
    "categorical": lambda keras: (
        keras.losses.CategoricalCrossentropy(True),
        {},
        "bits",
    ),
    "sum": lambda keras: (keras.losses.MeanSquaredError("sum"), {}, "floats"),
    "sample_weight": lambda keras: ("mse", {"sample_weight": _weights()}, "floats"),
    "class_weight": lambda keras: (
        keras.losses.SparseCategoricalCrossentropy(True),
        {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}},
        "classes",
    ),
    "contrast": lambda keras: (_contrast, {}, "floats"),
    "largest": lambda keras: (_largest, {}, "floats"),
    "deviation": lambda keras: (_deviation, {}, "floats"),
}


def _weights():
    return np.random.default_rng(3).uniform(0.2, 2.0, size=[_EXAMPLES])


def _dense(keras):
    layers = keras.layers
    hidden = layers.Dense(
        8, "tanh", kernel_regularizer="l2", kernel_constraint="max_norm"
    )
    return keras.Sequential([keras.Input((5,)), hidden, layers.Dense(3)])


def _convolution(keras):
    layers = keras.layers
    image = keras.Input((6, 6, 2))
    hidden = layers.Conv2D(4, 3, activation="relu", padding="same")(image)
    hidden = layers.LayerNormalization()(layers.MaxPooling2D()(hidden))
    return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(hidden)))


def _recurrent(keras):
    layers = keras.layers
    words = keras.Input((7,), dtype="int64")
    hidden = layers.LSTM(4)(layers.Embedding(20, 4, mask_zero=True)(words))
    return keras.Model(words, layers.Dense(3)(hidden))


def _attention(keras):
    layers = keras.layers

    class Attention(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(4)])
            self.attention = layers.MultiHeadAttention(2, 2)
            self.normalization = layers.LayerNormalization()
            self.out = layers.Dense(3)

        def call(self, x):
            hidden = self.inner(x)
            hidden = self.normalization(hidden + self.attention(hidden, hidden))
            return self.out(tf.reduce_mean(hidden, axis=1))

    return Attention()


def _outputs(keras):
    layers = keras.layers
    inputs = keras.Input((5,))
    hidden = layers.Dense(6, "tanh")(inputs)
    outputs = {name: layers.Dense(3, name=name)(hidden) for name in _TWO_OUTPUTS}
    return keras.Model(inputs, outputs)


_TWO_OUTPUTS = "first", "second"
MODELS = {
    "dense": (_dense, [5]),
    "convolution": (_convolution, [6, 6, 2]),
    "recurrent": (_recurrent, [7]),
    "attention": (_attention, [5, 3]),
    "outputs": (_outputs, [5]),
}


def data(model: str, targets: str):
    """Returns x and y of all examples."""
    rng = np.random.default_rng(0)
    _, shape = MODELS[model]
    x = rng.normal(size=[_EXAMPLES, *shape])
    if model == "recurrent":
        x = rng.integers(1, 20, size=[_EXAMPLES, *shape])
        x[:, 4:] *= rng.integers(0, 2, size=[_EXAMPLES, 3])
    y = {
        "floats": rng.normal(size=[_EXAMPLES, 3]),
        "bits": np.eye(3)[rng.integers(0, 3, size=[_EXAMPLES])],
        "classes": rng.integers(0, 3, size=[_EXAMPLES]),
    }
    return x, y[targets]


def train(keras, model: str, loss: str, micro_batches: int, epochs: int, **options):
    """Trains in float64; returns everything that training computes, by name."""
    network, (x, y), more = _compiled(keras, model, loss, micro_batches, options)
    sizes = {"batch_size": _BATCH, "verbose": 0}
    history = network.fit(x, y, epochs=epochs, shuffle=False, **sizes, **more)
    results = _results(network, history)
    results["evaluated"] = network.evaluate(x, y, **sizes)
    results["predicted"] = network.predict(x, **sizes)
    return results


def train_on(keras, model: str, loss: str, micro_batches: int, epochs: int, sizes):
    """Trains in float64 on batches of these sizes; returns all but predictions."""
    network, data, more = _compiled(keras, model, loss, micro_batches, {})
    if "sample_weight" in more:
        data = *data, more.pop("sample_weight")
    bounds = itertools.pairwise([0, *np.cumsum(sizes)])
    parts = [tf.nest.map_structure(lambda a, b=b, e=e: a[b:e], data) for b, e in bounds]
    kind = tf.nest.map_structure(
        lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), data
    )
    batches = tf.data.Dataset.from_generator(lambda: parts, output_signature=kind)
    # Without it, Keras 2 counts one update more than there are batches.
    batches = batches.apply(tf.data.experimental.assert_cardinality(len(parts)))
    return _results(network, network.fit(batches, epochs=epochs, verbose=0, **more))


def _compiled(keras, model: str, loss: str, micro_batches: int, options: dict):
    """Returns a model, its data, and further arguments of `fit`."""
    keras.backend.set_floatx("float64")
    keras.mixed_precision.set_global_policy("float64")
    keras.utils.set_random_seed(1)
    make, _ = MODELS[model]
    network = make(keras)
    if micro_batches != 1:
        network = microbatch(network, micro_batches)
    loss, more, targets = LOSSES[loss](keras)
    x, y = data(model, targets)
    metrics = ["accuracy"] if targets != "floats" else ["mae"]
    if model == "outputs":
        loss, metrics, y = ({n: v for n in _TWO_OUTPUTS} for v in (loss, metrics, y))
    optimizer = keras.optimizers.Adam(0.01, clipnorm=0.5)
    network.compile(optimizer, loss, metrics=metrics, **options)
    return network, (x, y), more


def _results(network, history) -> dict:
    weights, slots = network.get_weights(), network.optimizer.variables
    results = {f"weight {i}": value for i, value in enumerate(weights)}
    results |= {f"slot {i}": np.array(value) for i, value in enumerate(slots)}
    return results | history.history


def difference(one: dict, other: dict) -> float:
    """Returns the largest difference of any value, NaN if one is NaN."""
    assert one.keys() == other.keys()
    return float(np.max([np.abs(np.array(one[k]) - other[k]).max() for k in one]))
