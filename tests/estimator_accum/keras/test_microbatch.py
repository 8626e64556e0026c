"""`microbatch`: a batch in micro-batches trains as the batch at once."""

import contextlib
import copy
import functools
import importlib
import logging
import re
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.util import _pywrap_determinism

from estimator_accum.keras import _microbatch, microbatch
from tests.helpers.models.keras_cut import LOSSES, difference, train, train_on
from tests.helpers.tables import rows

# scripts/experiments/keras_microbatch.py takes every loss with every model.
_LIMIT = 1e-11


@pytest.fixture
def keras():
    module = importlib.import_module("keras")
    module.utils.set_random_seed(1)
    yield module
    module.backend.set_floatx("float32")
    module.mixed_precision.set_global_policy("float32")


@pytest.mark.parametrize("loss", rows(LOSSES, LOSSES.keys() - {"binary", "deviation"}))
def test_any_loss_equals_that_of_the_batch_at_once(keras, loss):
    whole, ours = (
        train_on(keras, "dense", loss, number, epochs=1, sizes=[10, 16])
        for number in (1, 4)
    )
    assert difference(ours, whole) < _LIMIT


@pytest.mark.parametrize(
    ("model", "loss", "micro_batches", "steps"),
    [
        ("dense", "sum", 3, 3),
        ("convolution", "contrast", 4, 1),
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


def test_a_recurrent_model_equals_that_of_the_batch_at_once(keras):
    whole, ours = (
        train_on(keras, "recurrent", "sample_weight", number, epochs=1, sizes=[10, 16])
        for number in (1, 5)
    )
    assert difference(ours, whole) < _LIMIT


def _largest(y, outputs):
    """Compares examples, so the model runs twice."""
    return tf.reduce_max(tf.square(outputs - y))


_RUNS = {
    "MeanSquaredError": "once",
    "MeanAbsoluteError": "once",
    "MeanAbsolutePercentageError": "once",
    "MeanSquaredLogarithmicError": "once",
    "Huber": "once",
    "LogCosh": "once",
    "KLDivergence": "once",
    "Poisson": "once",
    "CategoricalHinge": "once",
    "CosineSimilarity": "once",
    "BinaryCrossentropy": "once",
    "BinaryFocalCrossentropy": "once",
    "CategoricalCrossentropy": "once",
    "CategoricalFocalCrossentropy": "once",
    "SparseCategoricalCrossentropy": "once",
    "CategoricalGeneralizedCrossEntropy": "once",  # Keras 3 alone
    "Hinge": "twice",  # reads from all targets whether they are 0 and 1
    "SquaredHinge": "twice",
    "Dice": "twice",
    "Tversky": "twice",
    "Circle": "twice",
}


@pytest.mark.parametrize(
    "loss",
    rows(
        _RUNS, _RUNS.keys() - {"CategoricalCrossentropy", "CosineSimilarity", "Hinge"}
    ),
)
def test_the_first_step_says_how_often_the_model_runs(keras, loss, capsys):
    if loss not in vars(keras.losses):
        assert not hasattr(keras, "ops")
        return
    model = microbatch(_built(keras, keras.layers.Dense(3, "softmax")), 3)
    y = np.arange(10) % 3
    if not loss.startswith(("Sparse", "CategoricalGeneralized", "Circle")):
        y = np.eye(3, dtype="float32")[y]
    _trained(model, _batch(5), y, loss=getattr(keras.losses, loss)())
    model.train_on_batch(_batch(5), y)
    runs = {"twice": "twice: its loss or a layer compares examples"}.get(
        _RUNS[loss], "once"
    )
    said = f"train_step: 10 = at most 4 examples x 3 micro-batches; the model runs {runs}\n"
    assert capsys.readouterr().err.count(said) == 1


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


def _assert_equal(model, other) -> None:
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


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
    assert "make_train_function" not in vars(loaded)
    np.testing.assert_array_equal(loaded.predict(_batch(5)), model(_batch(5)))


def _stepped(keras, number, layers, y, loss, **options):
    """Returns loss and weights of one step in `number` micro-batches."""
    keras.utils.set_random_seed(1)
    model = microbatch(_built(keras, *layers), number)
    model.compile("sgd", loss, **options)
    return float(model.train_on_batch(200 * _batch(5), y)), model.get_weights()


_CLASSES, _BITS = np.arange(10) % 3, np.arange(10)[:, None] % 2


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
def test_a_loss_finds_the_logits_of_an_output(keras, units, activation, loss, y):
    whole, ours = (
        _stepped(keras, number, [keras.layers.Dense(units, activation)], y, loss)
        for number in (1, 3)
    )
    assert ours[0] == pytest.approx(whole[0], rel=1e-5)
    assert np.abs(ours[1][0] - whole[1][0]).max() < 1e-5 * np.abs(whole[1][0]).max()


def _of_pairs(y, outputs):
    del y
    return tf.square(tf.gather(outputs, [0, 2, 4]) - tf.gather(outputs, [1, 3, 5]))


@pytest.mark.parametrize("is_eager", [False, True])
def test_a_loss_may_gather_examples(keras, is_eager):
    def trained(number):
        keras.utils.set_random_seed(1)
        model = microbatch(_built(keras, keras.layers.Dense(2)), number)
        data = _batch(5), _batch(2)
        return _trained(model, *data, loss=_of_pairs, run_eagerly=is_eager)

    _assert_equal(trained(3), trained(1))


def test_a_loss_may_call_the_model(keras):
    def trained(number):
        keras.utils.set_random_seed(1)
        model = microbatch(_built(keras, keras.layers.Dense(5)), number)

        def loss(y, outputs):
            return tf.square(outputs - y) + model(y)

        return _trained(model, _batch(5), _batch(5), loss=loss)

    _assert_equal(trained(3), trained(1))


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


def _compiled(keras):
    """Has steps that are functions of TensorFlow, and read a tensor as Python does."""

    class Compiled(keras.Sequential):
        @tf.function
        def train_step(self, data):
            x, y, *_ = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            variables = self.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            if loss > 0.1:
                loss += 1.0
            return {"loss": loss}

        @tf.function(autograph=False)
        def predict_step(self, x):
            return -super().predict_step(x)

    layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    return Compiled([keras.Input((5,)), *layers])


def _keeping(keras):
    """Keeps a tensor in `self`, which its loss reads."""

    class Keeping(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.last = keras.layers.Dense(4), keras.layers.Dense(1)

        def call(self, x):
            self.kept = self.hidden(x)
            return self.last(self.kept)

        def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
            return tf.reduce_mean((y - y_pred) ** 2) + tf.reduce_mean(self.kept) ** 2

    return Keeping()


def _with_penalty(keras):
    """Has a loss that asks for the gradient of its inputs."""

    class Penalized(keras.Sequential):
        def compute_loss(self, x=None, y=None, *args, **kwargs):
            with tf.GradientTape() as tape:
                tape.watch(x)
                outputs = self(x, training=True)
            return tf.reduce_sum(tape.gradient(outputs, x) ** 2)

    hidden = keras.layers.Dense(4, "tanh")
    return Penalized([keras.Input((5,)), hidden, keras.layers.Dense(1)])


@pytest.mark.parametrize("is_in_branch", [False, True])
@pytest.mark.parametrize("is_eager", [False, True])
def test_each_batch_draws_other_numbers(keras, is_eager, is_in_branch):
    drawn = []

    class Drawing(keras.layers.Layer):
        def call(self, x):
            def draw():
                return x + tf.random.normal(tf.shape(x))

            if is_in_branch:
                return tf.cond(tf.size(x) > 0, draw, lambda: x)
            return draw()

    keras.utils.set_random_seed(1)
    model = microbatch(_built(keras, Drawing()), 3)
    model.compile(run_eagerly=is_eager)
    zeros = np.zeros([10, 5], "float32")
    for _ in range(2):
        drawn.append(model.predict_on_batch(zeros))
    assert len({value for values in drawn for value in np.ravel(values)}) == 100


def test_dropout_in_a_function_of_your_own_is_split_or_refused(keras):
    dropout = keras.layers.Dropout(0.5)

    class Calling(keras.layers.Layer):
        def call(self, x):
            return tf.function(lambda x: dropout(x, training=True))(x)

    model = microbatch(_built(keras, Calling(), keras.layers.Dense(1)), 3)
    is_3, sentence = hasattr(keras, "ops"), "draw them outside of functions, branches"
    expected = (
        pytest.raises(ValueError, match=sentence) if is_3 else contextlib.nullcontext()
    )
    with expected:
        _trained(model, _batch(5), _batch(1))


def test_a_layer_reads_shapes_of_batches_of_any_size(keras):
    class Mapping(keras.layers.Layer):
        def call(self, x):
            y = tf.map_fn(lambda row: row * 2.0, x)
            y.set_shape([None, 5])
            return y * (y.shape[0] or 1.0)

    model = microbatch(_built(keras, Mapping(), keras.layers.Dense(1)), 3)
    model.compile("sgd", "mse")
    model.fit(_batch(5), _batch(1), batch_size=6, verbose=0)  # of None rows


def test_batches_of_several_sizes_share_a_trace(keras):
    sizes = []

    class Layer(keras.layers.Dense):
        def call(self, x):
            sizes.append(x.shape[0])
            return super().call(x)

    model = microbatch(_built(keras, Layer(1)), 2)
    sizes.clear()
    for n in (10, 7, 9, 8):
        model.predict_on_batch(_batch(5)[:n])
    assert sizes == [10, None]  # as unsplit


def test_predictions_of_several_steps_are_joined(keras):
    class Own(keras.Sequential):
        def predict_step(self, data):
            (x,) = data[:1] if isinstance(data, tuple) else (data,)
            return tf.sparse.from_dense(x), tf.reduce_sum(x)

    model = microbatch(Own([keras.Input((5,)), keras.layers.Dense(1)]), 3)
    model.compile(steps_per_execution=2)
    data = tf.data.Dataset.from_tensor_slices(_batch(5)).batch(5)
    step = iter(data)
    model.make_predict_function()
    batches = list(step) if hasattr(keras, "ops") else step
    sparse, sums = model.predict_function(batches)
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), _batch(5))
    assert sums.shape == [2]


def _before_dense(make):
    return lambda keras: _built(keras, make(keras), keras.layers.Dense(1))


@pytest.mark.parametrize(
    "make",
    [
        _before_dense(lambda keras: keras.layers.BatchNormalization()),
        *map(_before_dense, (_mixing, _counting, _adding)),
        lambda keras: _built(keras, keras.layers.Dense(1, activity_regularizer="l2")),
        *(_compiled, _keeping, _with_penalty),
    ],
)
def test_a_step_does_all_that_it_does_with_the_batch_at_once(keras, make):
    def trained(number):
        keras.utils.set_random_seed(1)
        model = microbatch(make(keras), number)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        results = [model.train_on_batch(_batch(5), _batch(1)) for _ in range(2)]
        results.append(model.evaluate(_batch(5), _batch(1), verbose=0))
        results.append(model.predict(_batch(5), verbose=0))
        return *model.get_weights(), *results

    for ours, whole in zip(trained(3), trained(1), strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-6)


def test_a_function_frees_the_memory_of_the_one_that_ran_before(keras):
    model = microbatch(_built(keras, keras.layers.Dense(1)), 3)
    _trained(model, _batch(5), _batch(1))
    with mock.patch.object(model.train_function.step, "release") as release:
        model.train_on_batch(_batch(5), _batch(1))
        release.assert_not_called()
        model.test_on_batch(_batch(5), _batch(1))
        release.assert_called_once_with()


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("call", [lambda function, x: function(x), _called, _looped])
def test_dropout_draws_for_each_example_or_once_for_all(keras, call, is_shared):
    dropped = _dropping(keras, call, (1, 5) if is_shared else None)
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = microbatch(_built(keras, dropped, dense), 3)
    model.compile(keras.optimizers.SGD(1.0), lambda y, outputs: -10 * outputs)
    ones = np.ones([10, 5], "float32")
    if hasattr(keras, "ops") and call in (_called, _looped):  # moves a variable there
        with pytest.raises(ValueError, match="must not change within a batch"):
            model.train_on_batch(ones, ones)
        return
    model.train_on_batch(ones, ones)
    drawn = model.get_weights()[0]  # the sum of all masks
    factor = 4 if call is _looped else 2
    assert all(drawn >= 0) and any(drawn > 0)
    assert all(np.isin(drawn, [0, 10 * factor])) == is_shared


def test_a_gradient_of_each_example_may_be_of_its_own(keras):
    def trained(number):
        keras.utils.set_random_seed(1)
        negated = _with_gradient_of_its_own(keras, lambda dy: -dy)
        model = _built(keras, negated, keras.layers.Dense(1))
        return _trained(microbatch(model, number), _batch(5), _batch(1))

    _assert_equal(trained(3), trained(1))


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
    "clip": lambda dy: tf.clip_by_value(dy, -1e-3, 1e-3),
    "norm": lambda dy: dy / tf.norm(dy),
    "decay": lambda dy: dy + 0.1,
    "constant": tf.ones_like,
    "sign": tf.sign,
}


@pytest.mark.parametrize("name", _CHANGES)
def test_a_gradient_of_a_weight_that_is_no_sum_is_refused(keras, name):
    function = _own_product(_CHANGES[name])
    model = microbatch(_built(keras, _weighted(keras, function)), 3)
    with pytest.raises(ValueError, match="must add up to the batch"):
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
        _of_another_place,
    ],
)
def test_a_gradient_from_outside_its_function_is_looked_at(keras, function):
    layers = keras.layers.Dense(5), _weighted(keras, function)
    model = microbatch(_built(keras, *layers), 3)
    sentence = "must add up to the batch|be computed for each example by itself"
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
    with pytest.raises(ValueError, match="must add up to the batch"):
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
    with pytest.raises(ValueError, match="must add up to the batch"):
        _trained(model, _batch(5), _batch(5))


_SUMS = [
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
]


def test_gradients_of_weights_that_are_sums_are_exact(keras):
    def trained(number):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(5)(inputs)
        products = [_weighted(keras, function)(hidden) for function in _SUMS]
        model = keras.Model(inputs, keras.layers.Add()(products))
        return _trained(microbatch(model, number), _batch(5), _batch(5))

    _assert_equal(trained(3), trained(1))


@pytest.mark.parametrize("output", [tf.identity, tf.reduce_sum])
def test_inputs_may_be_sparse_and_outputs_of_no_example(keras, output):
    class Own(keras.Model):
        def build(self, shape):
            self.w = self.add_weight(shape=[5, 5], initializer="ones", name="w")

        def call(self, inputs):
            w = tf.convert_to_tensor(self.w)
            return output(tf.sparse.sparse_dense_matmul(inputs["b"], w) * inputs["a"])

    def trained(number):
        model = microbatch(Own(), number)
        model.build(None)
        model.compile("sgd", "mse")
        data = {"a": _batch(5), "b": tf.sparse.from_dense(_batch(5))}, _batch(5)
        model.fit(tf.data.Dataset.from_tensor_slices(data).batch(10), verbose=0)
        return model

    _assert_equal(trained(3), trained(1))


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


def test_xla_compiles_no_step_in_micro_batches(keras, caplog):
    caplog.set_level(logging.INFO, "tensorflow.estimator_accum")
    model = microbatch(_built(keras, keras.layers.Dense(1)), 3)
    if hasattr(keras, "ops"):
        _trained(model, _batch(5), _batch(1), jit_compile=True)
        assert caplog.text.count("XLA does not compile a step in micro-batches") == 1
        return
    with pytest.raises(ValueError, match="XLA. Received: jit_compile=True. Leave"):
        _trained(model, _batch(5), _batch(1), jit_compile=True)


@pytest.mark.parametrize(
    ("kind", "received"),
    [
        (tf.distribute.MultiWorkerMirroredStrategy, "of 2 replicas. Train with"),
        (tf.distribute.ParameterServerStrategy, "a ParameterServerStrategy. Train an"),
    ],
)
def test_other_strategies_are_refused(kind, received):
    strategy = mock.MagicMock(kind, num_replicas_in_sync=2)
    with pytest.raises(ValueError, match=received):
        _microbatch._check_strategy(strategy)


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
    is_split = "make_train_function" in vars(copies[0])
    assert is_split is not hasattr(keras, "ops")


def _own_step(model, data):
    x, y, *_ = data
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    (gradient,) = tape.gradient(loss, model.trainable_variables)
    model.trainable_variables[0].assign_sub(gradient)
    return {"loss": loss}


@pytest.mark.parametrize("is_of_class", [False, True])
@pytest.mark.parametrize("wrap", [lambda step: step, tf.function])
def test_a_model_keeps_the_step_that_it_got_itself(keras, wrap, is_of_class):
    class Other(keras.Sequential):
        train_step = tf.function(lambda self, data: {"loss": 0.0})

    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = (Other if is_of_class else keras.Sequential)([keras.Input((5,)), layer])
    model.train_step = wrap(functools.partial(_own_step, model))
    _trained(microbatch(model, 3), _batch(5), _batch(1))
    kernel = np.ones([5, 1])
    x, y = _batch(5), _batch(1)
    expected = kernel - 2 * x.T @ (x @ kernel - y) / 10
    np.testing.assert_allclose(layer.get_weights()[0], expected, rtol=1e-5)


def test_a_step_that_xla_would_compile_is_said_not_to_be(keras, caplog):
    class Compiled(keras.Sequential):
        train_step = tf.function(_own_step, jit_compile=True)

    layer = keras.layers.Dense(1, use_bias=False)
    model = microbatch(Compiled([keras.Input((5,)), layer]), 3)
    _trained(model, _batch(5), _batch(1), jit_compile=False)
    assert caplog.text.count("`jit_compile=True` of its tf.function is left out") == 1


def test_other_models_are_refused(keras):
    class Own(keras.Model):
        def make_train_function(self, force=False):
            return super().make_train_function(force)

    model = _built(keras, keras.layers.Dense(1))
    for wrong in (None, keras.layers.Dense(1)):
        with pytest.raises(TypeError, match="must be a keras.Model. Received: "):
            microbatch(wrong)
    with pytest.raises(TypeError, match="own make_train_function. Received"):
        microbatch(Own())
    for number in (2.5, True, "four"):
        with pytest.raises(TypeError, match='an integer >= 1 or "auto". Received: '):
            microbatch(model, number)
    with pytest.raises(ValueError, match="an integer >= 1. Received: 0. Use 1"):
        microbatch(model, 0)
    assert "make_train_function" not in vars(microbatch(model, 1))
    with pytest.raises(TypeError, match="a make_train_function of its own. Call"):
        microbatch(microbatch(model, 2), 2)
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match="graph of TensorFlow"),
    ):
        microbatch(_built(keras, keras.layers.Dense(1)))


def test_a_module_of_the_users_may_have_the_name_of_keras():
    refused = pytest.raises(TypeError, match="must be a keras.Model. Received: 5")
    with mock.patch.dict("sys.modules", tf_keras=object()), refused:
        microbatch(5)


def _model(keras, micro_batches="auto", loss="mse", constraint=None):
    keras.utils.set_random_seed(1)
    dropout = keras.layers.Dropout(0.3)
    dense = keras.layers.Dense(2, kernel_constraint=constraint)
    model = microbatch(_built(keras, dropout, dense), micro_batches)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["mae"])
    return model


@pytest.mark.parametrize(
    "strategy",
    [
        None,
        lambda device: tf.distribute.MirroredStrategy([device]),
    ],
)
def test_a_batch_without_memory_is_retried_as_if_it_had_never_run(
    keras, strategy, memory
):
    models, history = [], []
    for memory.after, micro_batches in ({0, 1}, "auto"), ((), 4):
        with strategy("/cpu:0").scope() if strategy else contextlib.nullcontext():
            models.append(_model(keras, micro_batches))
        data = _batch(5), _batch(2)
        fitted = models[-1].fit(*data, epochs=2, batch_size=10, verbose=0)
        history.append(fitted.history)
    ours, wanted = models
    assert history[0] == history[1]
    for one, other in zip(ours.get_weights(), wanted.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    if not hasattr(keras, "ops"):  # TensorBoard reads it
        assert ours._train_counter.numpy() == wanted._train_counter.numpy() == 2


def test_a_hundred_errors_leave_no_trace(keras, memory):
    rng = np.random.default_rng(0)

    class TwoErrors(keras.callbacks.Callback):
        """Fails the batch at once, and then after one of two micro-batches of a pass."""

        errors = 0

        def _begin(self, passes):
            memory.begin(1, {0, 1 + rng.integers(2 * passes)})

        def on_train_batch_begin(self, batch, logs=None):
            self._begin(2)

        def on_test_batch_begin(self, batch, logs=None):
            self._begin(1)

        def on_train_batch_end(self, batch, logs=None):
            self.errors += memory.count.value.bit_length() - 1  # each doubles it
            memory.after = ()

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
    ours = run(_model(keras, loss=_largest), [injecting])
    assert injecting.errors == 100
    wanted = run(_model(keras, 4, loss=_largest), [])
    for one, other in zip(ours, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_batch_whose_update_has_begun_is_not_retried(keras):
    def fail():
        raise MemoryError("injected")

    class Constraint(keras.constraints.Constraint):
        def __call__(self, weight):
            with tf.control_dependencies([tf.numpy_function(fail, [], [])]):
                return weight * 1.0

    model = _model(keras, constraint=Constraint())
    with pytest.raises(tf.errors.ResourceExhaustedError, match="injected"):
        model.train_on_batch(_batch(5), _batch(2))


def test_an_example_that_does_not_fit_is_reported(keras, memory):
    memory.after = range(99)
    with pytest.raises(ValueError, match="One example must fit in memory. Received: a"):
        _model(keras).train_on_batch(_batch(5), _batch(2))


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


def _with_stochastic_depth(keras, micro_batches):
    """Trains with layers that drop whole examples, as in Keras's CCT example."""
    keras.utils.set_random_seed(1)

    class StochasticDepth(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            if hasattr(keras, "ops"):
                self.seeds = keras.random.SeedGenerator(2)

        def call(self, x, training=None):
            if not training:
                return x
            if hasattr(keras, "ops"):
                size = keras.ops.shape(x)[0]
                numbers = keras.random.uniform((size, 1, 1), seed=self.seeds)
            else:
                numbers = tf.random.uniform([x.shape[0], 1, 1], dtype=x.dtype)
            return (x / 0.6) * tf.floor(0.6 + numbers)

    inputs = x = keras.Input((4, 5))
    for _ in range(2):
        hidden = keras.layers.Dense(10, "tanh")(x)
        x = keras.layers.Dense(5)(hidden)
        x = StochasticDepth()(x) + hidden[..., :5]
    outputs = keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(x))
    model = microbatch(keras.Model(inputs, outputs), micro_batches)
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    data = rng.normal(size=[22, 4, 5]), rng.normal(size=[22, 2])
    model.fit(*data, batch_size=11, shuffle=False, verbose=0)
    return model.get_weights()


def test_stochastic_depth_is_split(keras, caplog):
    caplog.set_level("DEBUG", "tensorflow.estimator_accum")
    keras.backend.set_floatx("float64")
    keras.mixed_precision.set_global_policy("float64")
    # Keras 2 draws from states of operations, which micro-batches do not have.
    numbers = (1, 4) if hasattr(keras, "ops") else (3, 4)
    weights = [_with_stochastic_depth(keras, number) for number in numbers]
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    shares = re.findall(r"micro-batches: (\S+)% of the activations", caplog.text)
    assert shares and max(map(float, shares)) < 2


def test_layers_behind_random_numbers_are_split(keras, caplog):
    caplog.set_level("DEBUG", "tensorflow.estimator_accum")
    dropouts = [keras.layers.Dropout(0.5) for _ in range(3)]
    layers = [layer for d in dropouts for layer in (d, keras.layers.Dense(5))]
    zoom = keras.layers.RandomZoom(0.1), keras.layers.Flatten()
    model = _built(keras, *zoom, *layers, inputs=keras.Input((2, 2, 1)))
    _trained(microbatch(model, 3), _batch(2, 2, 1), _batch(5))
    shares = re.findall(r"micro-batches: (\S+)% of the activations", caplog.text)
    assert shares and max(map(float, shares)) < 1


_TEXTS = np.array([*["ab c ab", "d", "", "ée d c", "ab"] * 4, "", "", "", ""])


@pytest.mark.parametrize(
    "options",
    [
        {"split": "character", "output_sequence_length": 9},
        {"ngrams": 2, "output_sequence_length": 4},
        {"ngrams": 2, "output_mode": "count"},
        {"output_mode": "multi_hot"},
        {"output_mode": "tf_idf"},
    ],
)
def test_layers_behind_texts_are_split(keras, caplog, options):
    caplog.set_level("DEBUG", "tensorflow.estimator_accum")

    def weights(micro_batches):
        keras.utils.set_random_seed(1)
        texts = keras.Input((), dtype="string")
        words = keras.layers.TextVectorization(**options)
        words.adapt(_TEXTS[_TEXTS != ""])
        hidden = words(texts)
        if "output_mode" not in options:
            hidden = keras.layers.Embedding(30, 4)(hidden)
            hidden = keras.layers.GlobalAveragePooling1D()(hidden)
        hidden = keras.layers.Dense(5, "tanh")(hidden)
        model = keras.Model(texts, keras.layers.Dense(1)(hidden))
        model = microbatch(model, micro_batches)
        model.compile("sgd", "mse")
        for _ in range(2):
            model.train_on_batch(tf.constant(_TEXTS), np.arange(24.0)[:, None] / 24)
        return [w for w in model.get_weights() if w.dtype.kind == "f"]

    for one, other in zip(weights(5), weights(1), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    shares = re.findall(r"micro-batches: (\S+)% of the activations", caplog.text)
    assert shares and max(map(float, shares)) < 1


def test_layers_behind_a_ragged_input_are_split(keras, caplog):
    if hasattr(keras, "ops"):
        pytest.skip("Keras 3 has no ragged inputs")
    caplog.set_level("DEBUG", "tensorflow.estimator_accum")
    ids = tf.ragged.constant([[*range(n % 4)] for n in range(24)], dtype=tf.int64)

    def weights(micro_batches):
        keras.utils.set_random_seed(1)
        words = keras.Input((None,), dtype="int64", ragged=True)
        hidden = keras.layers.IntegerLookup(vocabulary=[1, 2])(words)
        hidden = keras.layers.Embedding(4, 3)(hidden)
        hidden = keras.layers.TimeDistributed(keras.layers.Dense(5, "tanh"))(hidden)
        hidden = keras.layers.Concatenate(1)([hidden, hidden[:, :1]])
        hidden = keras.layers.Lambda(lambda x: tf.reduce_sum(x, 1))(hidden)
        model = keras.Model(words, keras.layers.Dense(1)(hidden))
        model = microbatch(model, micro_batches)
        model.compile("sgd", "mse")
        for _ in range(2):
            model.train_on_batch(ids, np.arange(24.0)[:, None] / 24)
        return [w for w in model.get_weights() if w.dtype.kind == "f"]

    for one, other in zip(weights(5), weights(1), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    shares = re.findall(r"micro-batches: (\S+)% of the activations", caplog.text)
    assert shares and max(map(float, shares)) < 1
