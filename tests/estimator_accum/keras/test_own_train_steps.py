"""`microbatch`: models with a `train_step` of their own train as unsplit."""

import importlib
import importlib.util
import itertools

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.keras import microbatch
from tests.helpers.models.keras_kinds import marks_of
from tests.helpers.tables import rows

_N = 10
_KERAS = ["keras"] + ["tf_keras"] * bool(importlib.util.find_spec("tf_keras"))


@pytest.fixture(params=[pytest.param(k, marks=marks_of((k, "new"))) for k in _KERAS])
def keras(request):
    module = importlib.import_module(request.param)
    for dtype in ("float64", "float32"):
        module.backend.set_floatx(dtype)
        module.mixed_precision.set_global_policy(dtype)  # else one that was set stays
        if dtype == "float64":
            yield module


def _x(*shape):
    return np.random.RandomState(sum(shape)).randn(_N, *shape)


def _network(keras, inputs, *units):
    layers = [keras.layers.Dense(n, "tanh") for n in units]
    return keras.Sequential([keras.Input((inputs,)), *layers])


def _noise(rows, width):
    """Returns numbers that do not depend on the micro-batch."""
    return tf.zeros([rows, width], tf.float64) + np.sin(np.arange(width) + 1.0)


def _update(optimizer, tape, loss, variables):
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))


def _autoencoder(keras):
    """A variational autoencoder, with a metric of its own."""

    class Autoencoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = _network(keras, 6, 5, 4)
            self.decoder = _network(keras, 2, 5, 6)
            self.penalty = keras.metrics.Mean(name="penalty")

        @property
        def metrics(self):
            return [self.penalty]

        def train_step(self, x):
            with tf.GradientTape() as tape:
                mean, log_variance = tf.split(self.encoder(x), 2, axis=1)
                noise = _noise(tf.shape(mean)[0], 2)
                outputs = self.decoder(mean + tf.exp(log_variance / 2) * noise)
                penalty = log_variance - mean**2 - tf.exp(log_variance)
                penalty = -tf.reduce_mean(tf.reduce_sum(penalty, axis=1))
                loss = tf.reduce_mean((outputs - x) ** 2) + penalty
            _update(self.optimizer, tape, loss, self.trainable_weights)
            self.penalty.update_state(penalty)
            return {"loss": loss, "penalty": self.penalty.result()}

    return Autoencoder(), _x(6)


def _adversaries(keras):
    """A GAN: two optimizers, of which the second sees the first one's update."""

    class Adversaries(keras.Model):
        def __init__(self):
            super().__init__()
            self.judge, self.maker = _network(keras, 6, 4, 1), _network(keras, 2, 4, 6)
            self.other = keras.optimizers.Adam(0.01)

        def train_step(self, x):
            entropy = tf.nn.sigmoid_cross_entropy_with_logits
            rows = tf.shape(x)[0]
            both = tf.concat([self.maker(_noise(rows, 2)), x], axis=0)
            zeros, ones = tf.zeros([rows, 1], x.dtype), tf.ones([rows, 1], x.dtype)
            labels = tf.concat([zeros, ones], axis=0) + 0.05
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(entropy(labels, self.judge(both)))
            _update(self.optimizer, tape, loss, self.judge.trainable_weights)
            with tf.GradientTape() as tape:
                judged = self.judge(self.maker(_noise(rows, 2)))
                other = tf.reduce_mean(entropy(ones, judged))
            _update(self.other, tape, other, self.maker.trainable_weights)
            return {"loss": loss, "other": other}

    return Adversaries(), _x(6)


def _two_views(keras):
    """SimCLR with a probe: two updates, and metrics of pairs of examples."""

    class TwoViews(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = _network(keras, 6, 4), _network(keras, 4, 3)
            self.probe, self.other = _network(keras, 4, 3), keras.optimizers.Adam(0.01)
            self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

        @property
        def metrics(self):
            return [self.accuracy]

        def train_step(self, data):
            unlabeled, (x, y) = data
            entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
            images = tf.concat([unlabeled, x], axis=0)
            with tf.GradientTape() as tape:
                one, two = (
                    tf.math.l2_normalize(self.head(self.encoder(view)), axis=1)
                    for view in (1.1 * images, images - 0.1)
                )
                logits = one @ tf.transpose(two) / 0.1
                labels = tf.range(tf.shape(one)[0])
                self.accuracy.update_state(labels, tf.transpose(logits))
                loss = entropy(labels, logits) + entropy(labels, tf.transpose(logits))
            weights = self.encoder.trainable_weights + self.head.trainable_weights
            _update(self.optimizer, tape, loss, weights)
            with tf.GradientTape() as tape:
                probed = tf.reduce_mean(entropy(y, self.probe(self.encoder(x))))
            _update(self.other, tape, probed, self.probe.trainable_weights)
            return {"probed": probed, "accuracy": self.accuracy.result()}

    return TwoViews(), (_x(6), (_x(6) + 1, np.arange(_N) % 3))


def _codebook(keras):
    """VQ-VAE: codes are averages of the vectors that chose them."""

    class Codebook(keras.layers.Layer):
        def build(self, shape):
            options = {"initializer": "random_normal", "trainable": False}
            self.codes = self.add_weight(name="codes", shape=(4, 3), **options)
            self.sums = self.add_weight(name="sums", shape=(4, 3), **options)
            options["initializer"] = "ones"
            self.counts = self.add_weight(name="counts", shape=(4, 1), **options)

        def call(self, x):
            flat, codes = tf.reshape(x, [-1, 3]), tf.convert_to_tensor(self.codes)
            distances = tf.reduce_sum((flat[:, None] - codes) ** 2, axis=2)
            chosen = tf.one_hot(tf.argmin(distances, axis=1), 4, dtype=x.dtype)
            nearest = tf.stop_gradient(tf.reshape(chosen @ codes, tf.shape(x)))
            self.add_loss(0.25 * tf.reduce_mean((nearest - x) ** 2))
            counts = tf.reduce_sum(chosen, axis=0)[:, None]
            self.counts.assign(0.9 * self.counts + 0.1 * counts)
            self.sums.assign(0.9 * self.sums + 0.1 * tf.transpose(chosen) @ flat)
            self.codes.assign(self.sums / self.counts)
            return x + tf.stop_gradient(nearest - x)

    class Quantized(keras.Sequential):
        def train_step(self, x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - x) ** 2)
                loss += sum(self.losses)
            _update(self.optimizer, tape, loss, self.trainable_weights)
            return {"loss": loss}

    layers = [keras.Input((6,)), keras.layers.Dense(6), Codebook()]
    return Quantized([*layers, keras.layers.Dense(6)]), _x(6)


def _masked_patches(keras):
    """A masked autoencoder: patches of each example are left out and predicted."""

    class MaskedPatches(keras.Model):
        def __init__(self):
            super().__init__()
            self.project, self.places = (
                keras.layers.Dense(4),
                keras.layers.Embedding(5, 4),
            )
            self.token = self.add_weight(
                name="token", shape=(1, 3), initializer="random_normal"
            )
            self.attention = keras.layers.MultiHeadAttention(1, 4)
            self.out = keras.layers.Dense(3)

        def call(self, x):
            rows = tf.shape(x)[0]
            places = tf.tile(self.places(tf.range(5))[None], [rows, 1, 1])
            order = tf.argsort(tf.reduce_sum(x, axis=2))
            hidden, shown = order[:, :2], order[:, 2:]
            shown = tf.gather(self.project(x) + places, shown, batch_dims=1)
            tokens = tf.repeat(tf.repeat(self.token, 2, axis=0)[None], rows, axis=0)
            hidden_places = tf.gather(places, hidden, batch_dims=1)
            tokens = self.project(tokens) + hidden_places
            both = tf.concat([self.attention(shown, shown) + shown, tokens], axis=1)
            outputs = self.out(self.attention(both, both))[:, 3:]
            return outputs - tf.gather(x, hidden, batch_dims=1)

        def train_step(self, x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(x) ** 2)
            _update(self.optimizer, tape, loss, self.trainable_weights)
            return {"loss": loss}

    return MaskedPatches(), _x(5, 3)


def _normalized_targets(keras):
    """PopArt: weights are rescaled with the statistics of all targets."""

    class Normalized(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.out = _network(keras, 6, 4), keras.layers.Dense(1)
            self.mean, self.square = (
                self.add_weight(name=n, shape=(), initializer=n, trainable=False)
                for n in ("zeros", "ones")
            )

        def call(self, x):
            return self.out(self.hidden(x))

        def train_step(self, data):
            x, y = data
            before = tf.convert_to_tensor(self.mean)
            scale = tf.sqrt(self.square - before**2)
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(y))
            self.square.assign(0.9 * self.square + 0.1 * tf.reduce_mean(y**2))
            new_scale = tf.sqrt(self.square - self.mean**2)
            self.out.kernel.assign(self.out.kernel * scale / new_scale)
            bias = scale * self.out.bias + before - self.mean
            self.out.bias.assign(bias / new_scale)
            with tf.GradientTape() as tape:
                errors = self(x) - (y - self.mean) / new_scale
                loss = tf.reduce_mean(errors**2)
            _update(self.optimizer, tape, loss, self.trainable_weights)
            return {"loss": loss}

    return Normalized(), (_x(6), 3 + _x(1))


def _distilled(keras):
    """A student, which learns from another model and from targets."""

    class Distilled(keras.Sequential):
        teacher = _network(keras, 6, 1)

        def train_step(self, data):
            x, y = data
            taught = self.teacher(x)
            with tf.GradientTape() as tape:
                student = self(x, training=True)
                loss = tf.reduce_mean((student - y) ** 2 + (student - taught) ** 2)
            _update(self.optimizer, tape, loss, self.trainable_weights)
            return {"loss": loss}

    layers = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)
    return Distilled([keras.Input((6,)), *layers]), (_x(6), _x(1))


def _normalized(keras):
    """Batch normalization, whose moving averages a second loss reads after the update."""

    class Normalized(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            _update(self.optimizer, tape, loss, self.trainable_weights)
            shown = tf.reduce_mean((self(x, training=False) - y) ** 2)
            return {"loss": loss, "shown": shown}

    layers = keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization()
    return Normalized([keras.Input((6,)), *layers, keras.layers.Dense(1)]), (
        _x(6),
        _x(1),
    )


def _weighted(keras):
    """Steps for training and tests, whose batches have a scalar beside the examples."""

    class Weighted(keras.Sequential):
        def __init__(self, layers):
            super().__init__(layers)
            self.error = keras.metrics.Mean(name="error")

        @property
        def metrics(self):
            return [self.error]

        def train_step(self, data):
            x, y, weight = data
            with tf.GradientTape() as tape:
                loss = weight * tf.reduce_mean((self(x, training=True) - y) ** 2)
            _update(self.optimizer, tape, loss, self.trainable_weights)
            return {"loss": loss, "weight": weight}

        def test_step(self, data):
            x, y, weight = data
            errors = tf.abs(self(x, training=False) - y)
            self.error.update_state(errors / tf.reduce_max(errors))
            total = weight * tf.reduce_sum(errors)
            return {"error": self.error.result(), "total": total}

    layers = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)
    return Weighted([keras.Input((6,)), *layers]), (_x(6), _x(1), np.float64(0.3))


def _fit(keras, model, data, batches) -> list[np.ndarray]:
    """Trains on one batch an epoch, for each of `batches`; returns the shown values."""
    batches = iter(batches)

    def begin_next(epoch, logs):
        model.stop_training = next(batches, "end") == "end"

    begin_next(0, {})
    callback = keras.callbacks.LambdaCallback(on_epoch_end=begin_next)
    options = {"epochs": 99, "callbacks": [callback], "shuffle": False, "verbose": 0}
    return [*model.fit(data, **options).history.values()]


def _results(keras, make, number, batches, memory) -> list[np.ndarray]:
    keras.utils.set_random_seed(1)
    model, data = make(keras)
    if make in (_masked_patches, _normalized_targets):
        model(data if make is _masked_patches else data[0])
    model = microbatch(model, number)
    # Else TensorFlow reads some variables before optimizers of Keras have changed them.
    model.compile(keras.optimizers.Adam(0.01), run_eagerly=number == 1)
    data = tf.data.Dataset.from_tensors(data)
    shown = _fit(keras, model, data, batches)
    if type(model).test_step is not keras.Model.test_step:
        if number == "auto":
            memory.begin(2, {1})
        shown += model.evaluate(data.repeat(2), verbose=0)
        assert number != "auto" or memory.count.value == 4
    slots = [np.asarray(v) for v in model.optimizer.variables]
    return [*model.get_weights(), *slots, *shown]


_MODELS = {
    _autoencoder: 3,
    _adversaries: 4,
    _two_views: 3,
    _codebook: 4,
    _masked_patches: 3,
    _normalized_targets: 4,
    _distilled: 3,
    _normalized: 4,
    _weighted: 3,
}


@pytest.mark.parametrize(
    ("make", "number"),
    rows([*zip(_MODELS, itertools.repeat("auto")), *_MODELS.items()], _MODELS.items()),
)
def test_a_train_step_of_its_own_equals_that_of_the_batch_at_once(
    keras, make, number, memory
):
    batches, memory.batches = range(2), 2
    if number == "auto":
        batches, memory.batches = memory.each_number(), 0
    ours = _results(keras, make, number, batches, memory)
    whole = _results(keras, make, 1, range(memory.batches), memory)
    for one, other in zip(whole, ours, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
