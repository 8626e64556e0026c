"""`microbatch`: a batch in micro-batches trains as the batch at once."""

import copy
import importlib
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.util import _pywrap_determinism

import estimator_accum.keras._internals as internals
from estimator_accum.keras import (
    _joined,
    _microbatch,
    _models,
    _retries,
    microbatch,
)
from estimator_accum.keras._forward import Forward
from estimator_accum.keras._row_loss import row_loss_of
from tests.helpers.models.keras_cut import LOSSES, difference, train

# scripts/experiments/keras_microbatch.py takes every loss with every model.
_LIMIT = 1e-11


@pytest.fixture
def keras():
    module = importlib.import_module("keras")
    module.utils.set_random_seed(1)
    yield module
    module.backend.set_floatx("float32")
    module.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("loss", LOSSES)
def test_any_loss_equals_that_of_the_batch_at_once(keras, loss):
    whole, ours = (
        train(keras, "dense", loss, number, epochs=1, run_eagerly=True)
        for number in (1, 4)
    )
    assert difference(ours, whole) < _LIMIT


@pytest.mark.parametrize(
    ("model", "loss", "micro_batches", "steps"),
    [
        ("dense", "sum", 3, 3),
        ("convolution", "contrast", 4, 1),
        ("recurrent", "sample_weight", 5, 1),
        ("attention", "class_weight", 10, 1),
    ],
)
def test_any_model_equals_that_of_the_batch_at_once(
    keras, model, loss, micro_batches, steps
):
    whole, ours = (
        train(keras, model, loss, number, epochs=1, steps_per_execution=steps)
        for number in (1, micro_batches)
    )
    assert difference(ours, whole) < _LIMIT


def _largest(y, outputs):
    """Compares examples, so the model runs twice."""
    return tf.reduce_max(tf.square(outputs - y))


_ROW_LOSSES = [
    *("MeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError"),
    *("MeanSquaredLogarithmicError", "Huber", "LogCosh", "KLDivergence"),
    *("Poisson", "CategoricalHinge", "CosineSimilarity"),
    *("BinaryCrossentropy", "BinaryFocalCrossentropy"),
    *("CategoricalCrossentropy", "CategoricalFocalCrossentropy"),
    "SparseCategoricalCrossentropy",
    "CategoricalGeneralizedCrossEntropy",  # Keras 3 alone
]


def _parts(keras, loss, shape=(3,), **options):
    """Returns the loss of 10 examples, and the sum over 4, 4 and 2 or None."""
    model = _built(keras, keras.layers.Dense(3), inputs=keras.Input(shape))
    model.compile("sgd", loss, **options)
    output = tf.nn.softmax(tf.constant(_batch(*shape)))
    rank = len(shape) - 1
    y = tf.one_hot(tf.argmax(tf.constant(_batch(*shape)), -1), 3)
    if type(loss).__name__.startswith(("Sparse", "CategoricalGeneralized")):
        y = tf.argmax(y, -1)
    weights = tf.abs(tf.constant(_batch(*shape[:rank])))
    function = types.SimpleNamespace(graph=tf.Graph(), outputs=[output])
    forward = Forward(function, output, [], [], draws=False, has_own_gradients=False)
    family = _models.Model3 if hasattr(keras, "ops") else _models.Model2
    with tf.Graph().as_default():
        part_of_loss = row_loss_of(family, model, forward, [y, weights], 10)
    if part_of_loss is None:
        return None
    parts = [
        part_of_loss(
            (end - begin) / 10, [output[begin:end]], [y[begin:end], weights[begin:end]]
        )
        for begin, end in ((0, 4), (4, 8), (8, 10))
    ]
    return float(loss(y, output, weights)), float(sum(parts))


@pytest.mark.parametrize("name", _ROW_LOSSES)
def test_losses_of_keras_without_other_examples_need_one_pass(keras, name):
    loss = getattr(keras.losses, name, None)
    if loss is None:
        assert not hasattr(keras, "ops")
        return
    for shape in ((3,), (4, 3)):
        whole, parts = _parts(keras, loss(), shape)
        assert parts == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Hinge", {}),  # reads from all targets whether they are 0 and 1
        ("SquaredHinge", {}),
        ("SparseCategoricalCrossentropy", {"ignore_class": 1}),
        ("MeanSquaredError", {"reduction": "none"}),
        ("MeanSquaredError", {"reduction": "mean_with_sample_weight"}),
        ("Dice", {}),
        ("Tversky", {}),
        ("Circle", {}),
        ("CTC", {}),
    ],
)
def test_other_losses_of_keras_need_two_passes(keras, name, options):
    is_3 = hasattr(keras, "ops")
    if is_3 or (name in vars(keras.losses) and "weight" not in str(options)):
        assert _parts(keras, getattr(keras.losses, name)(**options)) is None


def _batch(*shape):
    rng = np.random.default_rng(0)
    return rng.normal(size=[10, *shape]).astype("float32")


def _built(keras, *layers, inputs=None):
    inputs = keras.Input((5,)) if inputs is None else inputs
    return keras.Sequential([inputs, *layers])


def _trained(model, *data, loss="mse", **options):
    model.compile("sgd", loss, **options)
    model.train_on_batch(*data)
    return model


def _regularized(keras):
    model = _built(keras, keras.layers.Dense(1))
    model.activity_regularizer = keras.regularizers.L2(0.5)
    return model


def _doubled(keras):
    class Doubled(keras.Sequential):
        def __call__(self, *args, **kwargs):
            return 2.0 * super().__call__(*args, **kwargs)

    return Doubled([keras.Input((5,)), keras.layers.Dense(1)])


def _masked(keras):
    class Masked(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.supports_masking = keras.layers.Dense(1), True

        def call(self, x):
            return self.dense(x[..., None])

        def compute_mask(self, x, mask=None):
            return x > 0.0

    return Masked()


def _drawn(y, outputs):
    draws = 100 * tf.shape(outputs)[1]
    draws = tf.random.stateless_uniform([tf.shape(y)[0]], [1, 2], 0, draws, tf.int32)
    return tf.reduce_mean(tf.square(outputs - tf.cast(draws, tf.float32)[:, None]), -1)


def _asserted(y, outputs):
    is_right = tf.shape(y)[0] == 10
    with tf.control_dependencies([tf.debugging.Assert(is_right, ["other batch"])]):
        return tf.reduce_mean(tf.square(outputs - y), -1)


@pytest.mark.parametrize(
    ("make", "loss", "targets"),
    [
        (_regularized, "mse", (1,)),
        (_doubled, "mse", (1,)),
        (_masked, "mse", (5, 1)),
        (lambda keras: _built(keras, keras.layers.Dense(1)), _drawn, (1,)),
        (lambda keras: _built(keras, keras.layers.Dense(1)), _asserted, (1,)),
    ],
)
def test_losses_that_need_more_than_rows_of_outputs_are_exact(
    keras, make, loss, targets
):
    def weights(micro_batches):
        keras.utils.set_random_seed(1)
        model = microbatch(make(keras), micro_batches)
        return _trained(model, _batch(5), _batch(*targets), loss=loss).get_weights()

    for ours, whole in zip(weights(5), weights(1), strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-5)


def test_functions_of_the_model_alone_are_refused(keras):
    model = _built(keras, keras.layers.Dense(1))
    model.compute_loss = lambda *args, **kwargs: 0.0
    with pytest.raises(TypeError, match="have the compute_loss of its class"):
        _trained(microbatch(model, 2), _batch(5), _batch(1))


def test_several_inputs_and_outputs_have_losses_of_their_own(keras):
    def train(micro_batches):
        keras.utils.set_random_seed(1)
        one, two = keras.Input((5,), name="a"), keras.Input((5,), name="b")
        hidden = keras.layers.Dense(4, "tanh")
        out = keras.layers.Dense(2, name="y")(hidden(one) * hidden(two))
        outputs = {"y": out, "z": keras.layers.Dense(1, name="z")(hidden(two))}
        model = microbatch(keras.Model({"a": one, "b": two}, outputs), micro_batches)
        y = {"y": _batch(2), "z": _batch(1)}
        losses = {"y": "mse", "z": "mae"}
        return _trained(
            model,
            {"a": _batch(5), "b": -_batch(5)},
            y,
            loss=losses,
            loss_weights={"y": 0.3, "z": 2.0},
        )

    for ours, whole in zip(train(3).get_weights(), train(1).get_weights()):
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-6)


def _mean(y, outputs):
    return tf.reduce_mean(outputs)


@pytest.mark.parametrize("loss", [_mean, lambda y, outputs: outputs])
def test_dropout_draws_the_same_for_loss_and_gradient(keras, loss):
    ones = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = _built(keras, keras.layers.Dropout(0.5), ones)
    microbatch(model, 4).compile(keras.optimizers.SGD(1.0), loss)
    data = np.abs(_batch(5)), np.zeros([10, 1], "float32")
    # The loss is the mean output, which the update subtracts.
    losses = []
    for _ in range(3):
        before = model.get_weights()[0]
        model.reset_metrics()
        losses.append(float(np.ravel(model.train_on_batch(*data))[0]))
        subtracted = before - model.get_weights()[0]
        assert np.sum(subtracted * before) == pytest.approx(losses[-1], rel=1e-5)
        model.set_weights([before])
    assert len(set(losses)) == 3  # each batch draws anew


def test_model_is_saved_as_before(keras, tmp_path):
    model = microbatch(_built(keras, keras.layers.Dense(1)), 3)
    _trained(model, _batch(5), _batch(1)).save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not {"call", "train_step"} & vars(loaded).keys()
    np.testing.assert_array_equal(loaded.predict(_batch(5)), model(_batch(5)))


@pytest.mark.parametrize(("loss", "passes"), [("mse", 1), (_largest, 2)])
def test_the_second_pass_begins_when_the_first_is_done(keras, loss, passes):
    rows = []

    class Wide(keras.layers.Layer):
        def call(self, x):
            size = tf.shape(x)[0]
            note = tf.numpy_function(lambda n: rows.append(int(n)), [size], [])
            with tf.control_dependencies([note]):
                return x * 2.0

    model = microbatch(_built(keras, Wide(), keras.layers.Dense(1)), 3)
    _trained(model, _batch(5), _batch(1), loss=loss)
    assert rows == [4, 4, 2] * passes


def test_the_other_micro_batches_begin_when_the_first_is_done():
    forward = types.SimpleNamespace(function=lambda x, seed: [tf.abs(x, name="run")])
    with tf.Graph().as_default() as graph:
        x = tf.ones([10, 2])
        seed = tf.zeros([2], tf.int32)
        _joined.outputs_of(forward, _joined.Cut([x], 3), [x], seed)
    (loop,) = [op for op in graph.get_operations() if "While" in op.type]
    counter = loop.inputs[0].op
    assert graph.get_operation_by_name("run") in counter.control_inputs


def _stepped(keras, number, layers, y, loss, **options):
    """Returns loss and weights of one step in `number` micro-batches."""
    keras.utils.set_random_seed(1)
    model = microbatch(_built(keras, *layers), number)
    model.compile("sgd", loss, **options)
    return float(model.train_on_batch(200 * _batch(5), y)), model.get_weights()


_CLASSES, _BITS = np.arange(10) % 3, np.arange(10)[:, None] % 2


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize(
    ("units", "activation", "loss", "y"),
    [
        (3, "softmax", "sparse_categorical_crossentropy", _CLASSES),
        (3, tf.nn.softmax, "sparse_categorical_crossentropy", _CLASSES),
        (1, "sigmoid", "binary_crossentropy", _BITS),
        (1, tf.nn.sigmoid, "binary_crossentropy", _BITS),
        (3, tf.nn.sigmoid, "sparse_categorical_crossentropy", _CLASSES),
    ],
)
def test_a_loss_finds_the_logits_of_an_output(
    keras, units, activation, loss, y, is_eager
):
    whole, ours = (
        _stepped(
            keras,
            number,
            [keras.layers.Dense(units, activation)],
            y,
            loss,
            run_eagerly=is_eager,
        )
        for number in (1, 3)
    )
    assert ours[0] == pytest.approx(whole[0], rel=1e-5)
    assert np.abs(ours[1][0] - whole[1][0]).max() < 1e-5 * np.abs(whole[1][0]).max()


def _of_pairs(y, outputs):
    del y
    return tf.square(tf.gather(outputs, [0, 2, 4]) - tf.gather(outputs, [1, 3, 5]))


def _of_static_size(y, outputs):
    return tf.matmul(tf.eye(outputs.shape[0]), tf.square(outputs - y))


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("loss", [_of_pairs, _of_static_size])
def test_a_loss_may_gather_and_count_examples(keras, loss, is_eager):
    model = microbatch(_built(keras, keras.layers.Dense(2)), 3)
    whole = _built(keras, keras.layers.Dense(2))
    whole.set_weights(model.get_weights())
    for network in (whole, model):
        network.compile("sgd", loss, run_eagerly=is_eager)
        batches = tf.data.Dataset.from_tensors((_batch(5), _batch(2)))
        network.fit(batches, verbose=0)
    for value, other in zip(model.get_weights(), whole.get_weights(), strict=True):
        assert np.allclose(value, other, atol=1e-6)


def test_a_loss_may_call_the_model(keras):
    x, y = _batch(5), _batch(5)
    traces = []

    def build():
        model = _built(keras, _noting(keras, traces), keras.layers.Dense(5))
        return model, lambda y, outputs: tf.square(outputs - y) + model(y)

    whole, loss = build()
    whole.compile("sgd", loss)
    model, loss = build()
    model.set_weights(whole.get_weights())
    microbatch(model, 3).compile("sgd", loss)
    whole.train_on_batch(x, y)
    traces.clear()
    model.train_on_batch(x, y)
    assert len(traces) < 20
    assert np.allclose(model.get_weights()[0], whole.get_weights()[0], atol=1e-6)


def _noting(keras, traces):
    class Noting(keras.layers.Layer):
        def call(self, x):
            traces.append(x)
            return x

    return Noting()


def test_an_eager_step_reads_python_anew(keras):
    class Scaled(keras.layers.Layer):
        factor = 1.0

        def call(self, x):
            return x * self.factor

    scaled = Scaled()
    weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = microbatch(_built(keras, scaled, weight), 3)
    optimizer = keras.optimizers.SGD(1.0)
    model.compile(optimizer, lambda y, outputs: outputs, run_eagerly=True)
    ones = np.ones([10, 5], np.float32)
    losses = []
    for scaled.factor in (1.0, 3.0):
        losses.append(float(model.train_on_batch(ones, ones)))
    assert losses == [5.0, 0.0]
    np.testing.assert_array_equal(model.get_weights()[0], np.full([5, 1], -3.0))


def _mixing(keras):
    class Mixing(keras.layers.Layer):
        def call(self, x):
            return x - tf.reduce_mean(x, axis=0)

    return Mixing()


def _counting(keras):
    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.calls = self.add_weight(
                name="calls", shape=[], initializer="zeros", trainable=False
            )

        def call(self, x):
            self.calls.assign_add(1.0)
            return x

    return Counting()


def _adding(keras):
    class Adding(keras.layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_mean(x))
            return x

    return Adding()


def _summing(keras):
    class Summing(keras.layers.Layer):
        def call(self, x):
            return tf.reduce_sum(x, axis=0, keepdims=True)

    return Summing()


def _drawing(keras, draw):
    class Drawing(keras.layers.Layer):
        def call(self, x):
            return x + draw(x)

    return Drawing()


def _dropping(keras, function, noise_shape=None):
    """Calls dropout in a function of TensorFlow."""

    class Dropping(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.dropout = keras.layers.Dropout(0.5, noise_shape=noise_shape)

        def call(self, x):
            return function(lambda x: self.dropout(x, training=True), x)

    return Dropping()


def _called(function, *args):
    return tf.function(function)(*args)


def _looped(function, x):
    return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, function(x)), [0, x])[
        1
    ]


def _with_gradient_of_its_own(keras, gradient):
    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), gradient

    return keras.Sequential([keras.layers.Dense(2), _layer(keras, identity)])


def _layer(keras, function):
    class Own(keras.layers.Layer):
        def call(self, x):
            return function(x)

    return Own()


def _encoder_and_decoder(keras, gradient):
    """Two loops, of which the first has a gradient of its own, the second another one."""

    @tf.custom_gradient
    def encode(x):
        return tf.tanh(x), gradient

    @tf.custom_gradient
    def decode(x):
        return tf.sin(x), lambda dy: -dy * x

    layers = [
        _layer(keras, lambda x: _looped(encode, x)),
        _layer(keras, lambda x: _looped(decode, x)),
    ]
    return keras.Sequential([keras.layers.Dense(2), *layers])


def _columns(x):
    """Takes operations whose gradients have no rule."""
    x = tf.sort(tf.concat([x[:, ::2], tf.slice(x, [0, 1], [-1, 1])], 1))
    return tf.transpose(tf.gather(tf.transpose(tf.tile(x, [1, 2])), [0, 3, 2]))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda keras: keras.layers.BatchNormalization(), "batch normalization"),
        (_mixing, "must be computed from its own example. Received: .*Mean"),
        (_summing, "must be computed from its own example. Received: .*Sum"),
        (_counting, "must write no variable while it trains.* Received"),
        (_adding, "a layer's loss, from add_loss"),
        (
            lambda keras: keras.layers.Dense(2, activity_regularizer="l2"),
            "a layer's loss, from add_loss",
        ),
        (
            lambda keras: _drawing(keras, lambda x: tf.random.normal(tf.shape(x))),
            "which runs RandomStandardNormal. Draw random numbers by a layer",
        ),
        (
            lambda keras: _drawing(keras, lambda x: tf.random.shuffle(tf.range(5.0))),
            "which runs RandomShuffle. Draw",
        ),
        (
            lambda keras: _drawing(
                keras, lambda x: tf.random.stateless_gamma([5], [1, 2], 1.0)
            ),
            "StatelessRandomGamma.*: it is computed once, for all examples",
        ),
        (
            lambda keras: _dropping(keras, _called, noise_shape=(1, 5)),
            "it is computed once, for all examples",
        ),
        (
            lambda keras: _with_gradient_of_its_own(keras, lambda dy: dy / tf.norm(dy)),
            "A tf.custom_gradient must be computed for each example by itself",
        ),
        (
            lambda keras: _encoder_and_decoder(keras, lambda dy: dy / tf.norm(dy)),
            "A tf.custom_gradient must be computed for each example by itself",
        ),
        (
            lambda keras: keras.layers.Dropout(0.5, noise_shape=(1, 5)),
            "it is computed once, for all examples",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(keras, make, sentence):
    model = _built(keras, make(keras), keras.layers.Dense(1))
    before = model.get_weights()
    microbatch(model, 3).compile("sgd", "mse")
    with pytest.raises(ValueError, match=sentence):
        model.train_on_batch(_batch(5), _batch(1))
    for one, other in zip(model.get_weights(), before):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("function", [_called, _looped])
def test_dropout_in_functions_is_cut_and_in_loops_of_keras_3_alone(keras, function):
    model = microbatch(_built(keras, _dropping(keras, function)), 3)
    if function is _called or hasattr(keras, "ops"):
        _trained(model, _batch(5), _batch(5))
        return
    with pytest.raises(ValueError, match="Keras 2 must draw no random numbers in a lo"):
        _trained(model, _batch(5), _batch(5))


@pytest.mark.parametrize("make", [_with_gradient_of_its_own, _encoder_and_decoder])
def test_a_gradient_of_each_example_may_be_of_its_own(keras, make):
    weights = []
    for number in 1, 3:
        keras.utils.set_random_seed(1)
        negated = make(keras, lambda dy: -dy)
        model = _built(keras, negated, _layer(keras, _columns), keras.layers.Dense(1))
        model = _trained(microbatch(model, number), _batch(5), _batch(1))
        weights.append(model.get_weights())
    for ours, whole in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-6)


def _own_weight(change):
    """A product with a weight whose gradient is changed."""

    @tf.custom_gradient
    def identity(w):
        return tf.identity(w), change

    return lambda x, w: tf.matmul(x, identity(w))


def _own_product(change):
    """A product whose gradient with respect to its weight is changed."""

    @tf.custom_gradient
    def product(x, w):
        def gradient(dy):
            by_w = tf.matmul(x, dy, transpose_a=True)
            return tf.matmul(dy, w, transpose_b=True), change(by_w)

        return tf.matmul(x, w), gradient

    return product


def _weighted(keras, function):
    class Weighted(keras.layers.Layer):
        def build(self, shape):
            start = keras.initializers.GlorotUniform(seed=0)
            self.w = self.add_weight(shape=[5, 5], initializer=start, name="w")

        def call(self, x):
            return function(x, tf.convert_to_tensor(self.w))

    return Weighted()


def _within(call, function):
    return lambda x, w: call(lambda x: function(x, w), x)


def _of_places(dy):
    """Is linear by many operations."""
    dy = tf.concat([dy[:2], tf.zeros([1, 5]), -dy[3:] / 2.0], 0)
    dy = tf.where(tf.eye(5) > 0, dy, tf.zeros([5, 5]))
    return tf.transpose(tf.stack(tf.unstack(dy))) @ tf.ones([5, 5])


def _of_bias(x, w):
    @tf.custom_gradient
    def add(x, b):
        return x + b, lambda dy: (dy, 3.0 * tf.reduce_sum(dy, 0))

    return add(x, w[0])


@tf.custom_gradient
def _straight_through(w):
    return tf.round(8 * w) / 8, lambda dy: tf.where(tf.abs(w) <= 0.5, dy, 0.0)


def _changed_later(x, w):
    @tf.custom_gradient
    def slower(w):  # TensorFlow derives no branch whose own gradient reads more
        return tf.round(8 * w) / 8, lambda dy: 0.5 * dy

    is_late = tf.reduce_sum(w) < 1e9
    return x @ tf.cond(is_late, lambda: slower(w), lambda: w)


def _behind_silu(x, w):
    product = tf.function(tf.matmul)
    return product(tf.nn.silu(x), _straight_through(w))


def _of_places_of_any_number(x, w):
    """A layer that an activation of a dynamic number of places precedes."""
    number = tf.shape(tf.unique(tf.range(5))[0])[0]
    places = tf.nn.silu(tf.gather(w, tf.range(number)))
    return x + tf.reduce_sum(places, 0)


_CHANGES = {
    "clip": (lambda dy: tf.clip_by_value(dy, -1e-3, 1e-3), "Minimum"),
    "norm": (lambda dy: dy / tf.norm(dy), "Mul"),
    "decay": (lambda dy: dy + 0.1, "AddV2"),
    "constant": (lambda dy: tf.ones_like(dy), ""),
    "sign": (tf.sign, "Sign"),
}


@pytest.mark.parametrize("make", [_own_weight, _own_product])
@pytest.mark.parametrize("name", _CHANGES)
def test_a_gradient_of_a_weight_that_is_no_sum_is_refused(keras, name, make):
    change, kind = _CHANGES[name]
    model = microbatch(_built(keras, _weighted(keras, make(change))), 3)
    with pytest.raises(ValueError, match=f"be sums over the examples.* of type {kind}"):
        _trained(model, _batch(5), _batch(5))


@tf.custom_gradient
def _decayed(x, w):
    decay = 0.01 * w
    return tf.matmul(x, w), lambda dy: (tf.matmul(dy, w, transpose_b=True), decay)


@tf.custom_gradient
def _penalized(x, w):
    penalty = tf.clip_by_norm(tf.matmul(x, x, transpose_a=True), 1.0)
    return tf.matmul(x, w), lambda dy: (tf.matmul(dy, w, transpose_b=True), penalty)


@tf.custom_gradient
def _taped(x, w):
    with tf.GradientTape() as tape:
        tape.watch(w)
        y = tf.matmul(x, w)
        penalty = tf.norm(y)

    def gradient(dy):
        return tf.matmul(dy, w, transpose_b=True), tape.gradient(penalty, w)

    return y, gradient


@tf.custom_gradient
def _derived_before(x, w):
    y = tf.matmul(x, w)
    (penalty,) = tf.gradients(tf.norm(y), w)
    return y, lambda dy: (tf.matmul(dy, w, transpose_b=True), penalty)


def _pooled(x, w):
    @tf.custom_gradient
    def pooled(x):
        return tf.identity(x), lambda dy: tf.reduce_sum(dy, 0, keepdims=True)

    return pooled(tf.square(tf.matmul(x, w)))


def _of_another_place(x, w):
    decay = 0.01 * w[0]

    @tf.custom_gradient
    def add(x, v):
        return x + v, lambda dy: (dy, decay)

    def body(i, x, v):
        return i + 1, add(x, v), tf.stop_gradient(v)

    return tf.while_loop(lambda i, *_: i < 2, body, [0, x, w[0]])[1]


@tf.custom_gradient
def _united(x):
    unit = x / tf.norm(x)
    return tf.square(x), lambda dy: unit


def _of_examples_together(x, w):
    return _united(tf.matmul(x, w))


def _with_residual(x, w):
    hidden = tf.matmul(x, w)
    return _united(hidden) + hidden


def _of_outer_scope(x, w):
    @tf.custom_gradient
    def product(x, w):
        def gradient(dy):
            by_w = tf.matmul(x, dy, transpose_a=True)
            with tf.name_scope(""):
                return tf.matmul(dy, w, transpose_b=True), tf.sign(by_w)

        return tf.matmul(x, w), gradient

    return product(x, w)


@tf.custom_gradient
def _by_place(x, w):
    def gradient(dy):
        return dy, tf.math.unsorted_segment_sum(dy, tf.range(tf.shape(dy)[0]), 5)

    return x + w[0], gradient


@tf.custom_gradient
def _by_slices(x, w):
    def gradient(dy):
        return dy, tf.IndexedSlices(dy, tf.range(tf.shape(dy)[0]), tf.constant([5, 5]))

    return x + w[0], gradient


@pytest.mark.parametrize(
    "function",
    [
        _decayed,
        _penalized,
        _taped,
        _of_examples_together,
        _of_outer_scope,
        _by_place,
        _by_slices,
        lambda x, w: _decayed(x, w) + tf.matmul(x, w),
        _with_residual,
        lambda x, w: _united(tf.nn.silu(tf.matmul(x, w))),
        lambda x, w: _called(_decayed, x, w),
        lambda x, w: _called(_penalized, x, w),
        lambda x, w: _called(_of_outer_scope, x, w),
        lambda x, w: _called(_of_examples_together, x, w),
        _within(_looped, _decayed),
        _within(_looped, _of_examples_together),
        _derived_before,
        _pooled,
        lambda x, w: _called(_pooled, x, w),
        _of_another_place,
    ],
)
def test_a_gradient_from_outside_its_function_is_looked_at(keras, function):
    layers = keras.layers.Dense(5), _weighted(keras, function)
    model = microbatch(_built(keras, *layers), 3)
    sentence = "be sums over the examples|be computed for each example by itself"
    with pytest.raises(ValueError, match=sentence):
        _trained(model, _batch(5), _batch(5))


def test_rows_of_an_unknown_rank_hide_no_gradient(keras):
    @tf.custom_gradient
    def look_up(ids, table):
        def gradient(dy):
            by_row = tf.math.unsorted_segment_sum(dy, tf.reshape(ids, [-1]), 5)
            return None, tf.clip_by_norm(by_row, 1e-3)

        return tf.gather(table, tf.reshape(ids, [-1])), gradient

    specs = [tf.TensorSpec(None, tf.int32), tf.TensorSpec([5, 5])]
    function = tf.function(look_up, input_signature=specs)

    def call(x, w):
        y = function(tf.cast(x[:, 0] > 0, tf.int32), w)
        y.set_shape([None, 5])
        return y

    model = microbatch(_built(keras, _weighted(keras, call)), 3)
    with pytest.raises(ValueError, match="be sums over the examples"):
        _trained(model, _batch(5), _batch(5))


def _optimizer_with_scale(keras):
    if hasattr(keras, "ops"):
        return keras.optimizers.SGD(0.1, loss_scale_factor=1024.0)
    wrapped = keras.mixed_precision.LossScaleOptimizer
    return wrapped(keras.optimizers.SGD(0.1), dynamic=False, initial_scale=1024)


def test_a_gradient_that_is_not_linear_gets_the_scaled_loss(keras):
    weights = []
    for number in 1, 3:
        keras.utils.set_random_seed(1)
        model = _built(
            keras,
            _with_gradient_of_its_own(
                keras, lambda dy: tf.clip_by_value(dy, -0.1, 0.1)
            ),
        )
        model = microbatch(model, number)
        model.compile(_optimizer_with_scale(keras), "mse")
        model.train_on_batch(_batch(5), _batch(2))
        weights.append(model.get_weights())
    for ours, whole in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("call", [_called, _looped])
def test_such_a_gradient_is_found_in_functions_and_loops(keras, call):
    function = _within(call, _own_product(tf.sign))
    model = microbatch(_built(keras, _weighted(keras, function)), 3)
    with pytest.raises(ValueError, match="be sums over the examples.* of type Sign"):
        _trained(model, _batch(5), _batch(5))


@pytest.mark.parametrize(
    "function",
    [
        _own_weight(lambda dy: 0.5 * dy),
        _own_weight(_of_places),
        _own_product(_of_places),
        _own_product(tf.zeros_like),
        _within(_called, _own_product(tf.negative)),
        _within(_looped, _own_product(tf.negative)),
        _within(_looped, lambda x, w: tf.nn.silu(x @ w)),
        _of_bias,
        lambda x, w: _called(_own_weight(tf.negative), x, w),
        _changed_later,
        _behind_silu,
        _within(_looped, lambda x, w: x + tf.nn.silu(tf.tanh(w))[0]),
        _own_weight(lambda dy: tf.raw_ops.TanhGrad(y=tf.ones([5, 5]) / 2, dy=dy)),
        _of_places_of_any_number,
    ],
)
def test_a_gradient_of_a_weight_that_is_a_sum_is_exact(keras, function):
    weights = []
    for number in 1, 3:
        keras.utils.set_random_seed(1)
        model = _built(keras, keras.layers.Dense(5), _weighted(keras, function))
        model = _trained(microbatch(model, number), _batch(5), _batch(5))
        weights.append(model.get_weights())
    for ours, whole in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-6)


def _model_with_loss(keras, loss):
    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, *args, **kwargs):
            return loss(self, x)

    inputs = keras.Input((5,))
    return Own(inputs, keras.layers.Dense(5)(inputs))


def _penalty(model, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = model(x, training=True)
    return tf.reduce_sum(tape.gradient(outputs, x) ** 2)


@pytest.mark.parametrize("loss", [lambda model, x: model(model(x)), _penalty])
def test_inputs_with_a_gradient_are_refused(keras, loss):
    model = microbatch(_model_with_loss(keras, loss), 3)
    with pytest.raises(ValueError, match="inputs of a cut model must be data, without"):
        _trained(model, _batch(5), _batch(5))


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_tensor_that_call_keeps_is_returned(keras, is_eager):
    class Keeping(keras.Model):
        def __init__(self, is_returning):
            super().__init__()
            self.hidden, self.last = keras.layers.Dense(4), keras.layers.Dense(1)
            self.is_returning = is_returning

        def call(self, x):
            self.kept = self.hidden(x)
            y = self.last(self.kept)
            return (y, self.kept) if self.is_returning else y

        def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
            outputs, kept = y_pred if self.is_returning else (y_pred, self.kept)
            return tf.reduce_mean((y - outputs) ** 2) + tf.reduce_mean(kept) ** 2

    options = {"run_eagerly": is_eager, "loss": None}
    with pytest.raises(ValueError, match="(?s)must read no tensor .* Return it as one"):
        _trained(microbatch(Keeping(False), 3), _batch(5), _batch(1), **options)
    weights = []
    for is_returning, number in (False, 1), (True, 3):
        keras.utils.set_random_seed(1)
        model = microbatch(Keeping(is_returning), number)
        model = _trained(model, _batch(5), _batch(1), **options)
        weights.append(model.get_weights()[0])
    assert np.allclose(*weights, atol=1e-6)


def test_the_first_pass_is_not_recorded(keras, monkeypatch):
    recorded = []

    def outputs_of(*args):
        recorded.append(internals.is_recorded([args[0].function.captured_inputs[0]]))
        return _joined.outputs_of(*args)

    monkeypatch.setattr(_microbatch, "outputs_of", outputs_of)
    model = microbatch(_built(keras, keras.layers.Dense(1)), 3)
    _trained(model, _batch(5), _batch(1), run_eagerly=True)
    assert recorded == [False]


_DENSE = "must be dense tensors with a row for each"


@pytest.mark.parametrize(
    ("b", "output", "error", "sentence"),
    [
        (tf.ones([3, 5]), tf.identity, tf.errors.InvalidArgumentError, "other numbers"),
        (
            tf.sparse.eye(4, 5),
            tf.identity,
            TypeError,
            f"inputs of a cut model {_DENSE}",
        ),
        (tf.ones([4, 5]), tf.reduce_sum, TypeError, f"outputs of a cut model {_DENSE}"),
        (tf.ones([4, 5]), tf.sparse.from_dense, TypeError, f"outputs .* {_DENSE}"),
    ],
)
def test_other_inputs_and_outputs_are_refused(keras, b, output, error, sentence):
    class Own(keras.Model):
        def call(self, inputs):
            return output(inputs["a"])

    model = microbatch(Own(), 3)
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(error, match=sentence):
        model.train_step(({"a": tf.ones([4, 5]), "b": b}, tf.ones([4, 5])))


def test_targets_have_a_row_for_each_example():
    rows = tf.TensorSpec([None, 1])
    cut = tf.function(lambda x, y: _joined.Cut([x], 3, [y]).number, [rows, rows])
    assert cut(tf.ones([4, 1]), tf.ones([4, 1])) == 2
    with pytest.raises(tf.errors.InvalidArgumentError, match="All targets and weights"):
        cut(tf.ones([4, 1]), tf.ones([1, 1]))


@pytest.mark.parametrize("activation", [None, "softmax", tf.nn.softmax])
def test_masks_of_the_outputs_reach_the_loss(keras, activation):
    def losses(micro_batches):
        keras.utils.set_random_seed(1)
        embedding = keras.layers.Embedding(9, 3, mask_zero=True)
        words = keras.Input((4,), dtype="int64")
        model = _built(
            keras, embedding, keras.layers.Dense(2, activation), inputs=words
        )
        model = microbatch(model, micro_batches)
        x = np.random.default_rng(0).integers(0, 9, size=[10, 4])
        model.compile("sgd", "mse")
        return model.train_on_batch(x, _batch(4, 2)), *model.get_weights()

    for ours, whole in zip(losses(3), losses(1)):
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-6)


def test_batch_normalization_that_is_frozen_is_cut(keras):
    layer = keras.layers.BatchNormalization(trainable=False)
    model = microbatch(_built(keras, layer, keras.layers.Dense(1)), 3)
    (before,) = layer.get_weights()[:1]
    kernel = model.layers[-1].get_weights()[0]
    _trained(model, _batch(5), _batch(1))
    np.testing.assert_array_equal(layer.get_weights()[0], before)
    assert not np.array_equal(model.layers[-1].get_weights()[0], kernel)


def test_xla_compiles_a_model_of_keras_3_alone(keras):
    if hasattr(keras, "ops"):
        whole = train(keras, "dense", "contrast", 1, epochs=1, run_eagerly=True)
        ours = train(keras, "dense", "contrast", 4, epochs=1, jit_compile=True)
        assert difference(ours, whole) < _LIMIT
        return
    for number in (3, "auto"):
        model = microbatch(_built(keras, keras.layers.Dense(1)), number)
        with pytest.raises(ValueError, match="XLA. Received: jit_compile=True. Leave"):
            _trained(model, _batch(5), _batch(1), jit_compile=True)


@pytest.mark.parametrize(
    ("has_servers", "is_retried", "received"),
    [
        (False, False, "a SimpleNamespace of 2 replicas. Train with"),
        (False, True, "a SimpleNamespace of 2 replicas. Train with"),
        (True, False, "a ParameterServerStrategy. Train an Estimator"),
    ],
)
def test_other_strategies_are_refused(monkeypatch, has_servers, is_retried, received):
    strategy = types.SimpleNamespace(
        num_replicas_in_sync=2, _should_use_with_coordinator=has_servers
    )
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    with pytest.raises(ValueError, match=f"Received: {received}"):
        _microbatch._check_strategy(is_retried)


@pytest.mark.parametrize(
    "strategy",
    [tf.distribute.OneDeviceStrategy, lambda d: tf.distribute.MirroredStrategy([d])],
)
def test_auto_retries_under_a_strategy_of_one_device(keras, strategy):
    weights = []
    for fails, number in ({0, 2}, "auto"), ((), 4):
        with strategy("/cpu:0").scope():
            model = _retried(keras, fails, number)
        model.fit(_batch(5), _batch(2), epochs=2, batch_size=10, verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_copy_of_a_model_trains_its_own_weights(keras):
    dense = keras.layers.Dense(1)
    for number in 3, "auto":
        model = microbatch(keras.Sequential([dense]), number)  # not built
        copies = [copy.deepcopy(model), keras.models.clone_model(model)]
        for other in copies:
            _trained(other, _batch(5), _batch(1))
            before = other.get_weights()[0]
            other.train_on_batch(_batch(5), _batch(1))
            assert not np.array_equal(other.get_weights()[0], before)
        assert not model.built
    assert ("train_step" in vars(copies[0])) is not hasattr(keras, "ops")


def test_other_models_are_refused(keras):
    class Own(keras.Model):
        def train_step(self, data):
            return {}

    model = _built(keras, keras.layers.Dense(1))
    for wrong in (None, keras.layers.Dense(1)):
        with pytest.raises(TypeError, match="must be a keras.Model. Received: "):
            microbatch(wrong)
    with pytest.raises(TypeError, match="own train_step. Received: that of Own"):
        microbatch(Own())
    for number in (2.5, True, "four"):
        with pytest.raises(TypeError, match='an integer >= 1 or "auto". Received: '):
            microbatch(model, number)
    with pytest.raises(ValueError, match="an integer >= 1. Received: 0. Use 1"):
        microbatch(model, 0)
    assert "train_step" not in vars(microbatch(model, 1))
    with pytest.raises(TypeError, match="a train_step of its own. Call"):
        microbatch(microbatch(model, 2), 2)
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match="graph of TensorFlow"),
    ):
        microbatch(_built(keras, keras.layers.Dense(1)))


def _failing(keras, fails, place="call", calls=None):
    """Runs out of memory in the calls of these numbers, or in a constraint."""
    calls = [] if calls is None else calls

    def check():
        calls.append(None)
        if len(calls) - 1 in fails:
            raise MemoryError("injected")

    class Failing(keras.layers.Layer):
        def call(self, x):
            with tf.control_dependencies([tf.numpy_function(check, [], [])]):
                return x * 2.0

    class Constraint(keras.constraints.Constraint):
        def __call__(self, weight):
            with tf.control_dependencies([tf.numpy_function(check, [], [])]):
                return weight * 1.0

    if place == "call":
        return Failing(), None
    return keras.layers.Activation("linear"), Constraint()


def _retried(keras, fails, micro_batches="auto", place="call", loss="mse", calls=None):
    keras.utils.set_random_seed(1)
    layer, constraint = _failing(keras, fails, place, calls)
    dropout = keras.layers.Dropout(0.3)
    dense = keras.layers.Dense(2, kernel_constraint=constraint)
    model = microbatch(_built(keras, layer, dropout, dense), micro_batches)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["mae"])
    return model


def test_a_batch_without_memory_is_retried_as_if_it_had_never_run(keras):
    models, history = [], []
    for fails, number in (({0, 2}, "auto"), ((), 4)):
        models.append(_retried(keras, fails, number))
        fitted = models[-1].fit(
            _batch(5), _batch(2), epochs=2, batch_size=10, verbose=0
        )
        history.append(fitted.history)
    ours, wanted = models
    assert history[0] == history[1]
    for one, other in zip(ours.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    if not hasattr(keras, "ops"):  # TensorBoard reads it
        assert ours._train_counter.numpy() == wanted._train_counter.numpy() == 2


def test_a_hundred_errors_leave_no_trace(keras, monkeypatch):
    rng, fails, calls, counts = np.random.default_rng(0), [], [], []
    make_count = _retries.MicroBatchCount
    monkeypatch.setattr(
        _retries, "MicroBatchCount", lambda: counts.append(make_count()) or counts[-1]
    )

    class TwoErrors(keras.callbacks.Callback):
        """Fails the batch at once, and then a call of one of its two micro-batches."""

        errors = 0

        def _begin(self, number_of_calls):
            calls.clear()
            counts[0]._plan = counts[0]._plan._replace(micro_batches=1)
            fails[:] = [0, 1 + rng.integers(number_of_calls)]

        def on_train_batch_begin(self, batch, logs=None):
            self._begin(4)  # in two passes

        def on_test_batch_begin(self, batch, logs=None):
            self._begin(2)

        def on_train_batch_end(self, batch, logs=None):
            self.errors += counts[0].value.bit_length() - 1  # each doubles it

        on_predict_batch_begin = on_test_batch_begin
        on_test_batch_end = on_predict_batch_end = on_train_batch_end

    def run(model, callbacks):
        options = {"batch_size": 10, "verbose": 0, "callbacks": callbacks}
        x, y = np.tile(_batch(5), [5, 1]), np.tile(_batch(2), [5, 1])
        predicted = model.predict(x, **options)
        evaluated = model.evaluate(x, y, **options)
        history = model.fit(x, y, epochs=8, **options).history
        return predicted, evaluated, *history.values(), *model.get_weights()

    injecting = TwoErrors()
    ours = run(_retried(keras, fails, loss=_largest, calls=calls), [injecting])
    assert injecting.errors == 100
    wanted = run(_retried(keras, (), 4, loss=_largest), [])
    for one, other in zip(ours, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_batch_whose_update_has_begun_is_not_retried(keras):
    model = _retried(keras, {0}, place="constraint")
    with pytest.raises(tf.errors.ResourceExhaustedError, match="injected"):
        model.train_on_batch(_batch(5), _batch(2))


def test_an_example_that_does_not_fit_is_reported(keras):
    model = _retried(keras, range(99))
    with pytest.raises(ValueError, match="One example must fit in memory. Received: a"):
        model.train_on_batch(_batch(5), _batch(2))


def test_auto_refuses_a_model_before_it_trains(keras):
    model = microbatch(_built(keras, keras.layers.BatchNormalization()), "auto")
    with pytest.raises(ValueError, match="must write no|from its own example"):
        _trained(model, _batch(5), _batch(5))


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_loss_scale_sees_the_batch_once(keras, policy):
    is_3 = hasattr(keras, "ops")
    keras.mixed_precision.set_global_policy(policy)
    names = keras.optimizers if is_3 else keras.mixed_precision
    options = {"initial_scale": 8, "dynamic_growth_steps": 2}
    optimizer = names.LossScaleOptimizer(keras.optimizers.SGD(0.1), **options)
    model = _built(keras, keras.layers.Dense(1))
    kernel = model.get_weights()[0]
    microbatch(model, 3).compile(optimizer, "mse")
    for _ in range(2):
        model.train_on_batch(_batch(5), _batch(1))
    assert float(optimizer.dynamic_scale if is_3 else optimizer.loss_scale) == 16
    x, y = _batch(5), _batch(1)
    bias = np.zeros([1])
    for _ in range(2):
        errors = (x @ kernel + bias - y) / 10
        kernel, bias = kernel - 0.2 * x.T @ errors, bias - 0.2 * errors.sum(axis=0)
    tolerance = 1e-5 if policy == "float32" else 1e-2
    np.testing.assert_allclose(model.get_weights()[0], kernel, tolerance, tolerance)


def test_deterministic_operations_are_enough(keras):
    def weights():
        keras.utils.set_random_seed(1)
        layers = keras.layers.Dropout(0.5), keras.layers.Dense(1)
        return _trained(microbatch(_built(keras, *layers), 3), _batch(5), _batch(1))

    tf.config.experimental.enable_op_determinism()
    try:
        ours, again = weights().get_weights(), weights().get_weights()
    finally:
        _pywrap_determinism.enable(False)
    for one, other in zip(ours, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_losses_shown_of_outputs_are_those_of_the_batch_at_once(keras):
    def history(micro_batches):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        outputs = [keras.layers.Dense(n, name=f"of_{n}")(inputs) for n in (2, 1)]
        model = microbatch(keras.Model(inputs, outputs), micro_batches)
        model.compile("sgd", ["mse", "mae"])
        x, y, z = (np.concatenate([_batch(n)] * 3)[:26] for n in (5, 2, 1))
        model.train_on_batch(x, [y, z], sample_weight=[x[:, 0] ** 2] * 2)
        model.fit(x[:, :5], [y, z], sample_weight=[x[:, 1] ** 2] * 2, verbose=0)
        return model.fit(x, [y, z], batch_size=10, epochs=2, verbose=0).history

    ours, wanted = history("auto"), history(1)
    assert ours.keys() == wanted.keys() >= {"of_2_loss", "of_1_loss"}
    for name, values in wanted.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5)


def test_auto_retries_one_batch_at_a_time(keras):
    model = microbatch(_built(keras, keras.layers.Dense(2)), "auto")
    for steps in (2,) if hasattr(keras, "ops") else (2, "auto"):
        with pytest.raises(ValueError, match=f"steps_per_execution={steps}. Leave it"):
            _trained(model, _batch(5), _batch(2), steps_per_execution=steps)
