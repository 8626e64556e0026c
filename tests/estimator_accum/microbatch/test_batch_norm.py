"""batch_norm="micro_batch": own statistics to normalize by, the batch's in averages."""

import contextlib
import importlib
import logging

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    make_accumulating_train_op,
    microbatch_model_fn,
    microbatch_step,
)
from estimator_accum.keras import microbatch
from estimator_accum.microbatch.batch import WholeBatch
from estimator_accum.microbatch.collecting import Moments, collect_moments
from estimator_accum.microbatch.own_optimizer import fed_moments
from estimator_accum.microbatch.work import Turn
from tests.helpers.models.microbatch_runs import spec_of

v1 = tf.compat.v1
_RANDOM = np.random.RandomState(0)
_IMAGES = _RANDOM.randn(23, 5, 5, 2)
_ROWS = _RANDOM.randn(23, 4)
_SCALED = (_ROWS * np.linspace(1, 5, 23)[:, None]).astype(np.float32)
_LABELS = _RANDOM.randint(0, 3, 23)
_LIMIT = {"float64": 1e-14, "float32": 2e-6}
_RATE = 0.125  # exact in float32, as TensorFlow 1 has it


def _crossentropy(labels, logits):
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )


def _layers(dtype, axis=-1):
    """Returns layers of Keras; those of Keras 2 are fused for images of float32."""
    keras = importlib.import_module("keras")
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Conv2D(4, 3, dtype=dtype),
        keras.layers.BatchNormalization(axis, momentum=0.9, dtype=dtype),
        keras.layers.Activation("swish", dtype=dtype),  # has a tf.custom_gradient
        keras.layers.Conv2D(3, 2, dtype=dtype),
        keras.layers.BatchNormalization(momentum=0.8, scale=False, dtype=dtype),
        keras.layers.GlobalAveragePooling2D(dtype=dtype),
    ]
    hidden = tf.cast(_IMAGES[:2], dtype)
    for layer in layers:
        hidden = layer(hidden)
    return layers


def _is_norm(layer) -> bool:
    return "BatchNorm" in type(layer).__name__


def _call(layers, x, call_norm=lambda layer, h: layer(h, training=True)):
    for layer in layers:
        x = call_norm(layer, x) if _is_norm(layer) else layer(x)
    return x


def _gradients(layers, loss_of):
    variables = [v for layer in layers for v in layer.trainable_variables]
    with tf.GradientTape() as tape:
        loss = loss_of()
    return loss, variables, tape.gradient(loss, variables)


def _step(layers):
    def step(x, labels):
        def loss_of():
            return _crossentropy(labels, _call(layers, x))

        loss, variables, gradients = _gradients(layers, loss_of)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(_RATE * gradient)
        return loss

    return step


def _by_hand(layers, x, labels, size):
    """Runs a step on one micro-batch after the other, with the layers as they are."""
    norms = [layer for layer in layers if _is_norm(layer)]
    weights = [norm.get_weights() for norm in norms]
    inputs, sums, total = [[] for _ in norms], None, 0.0

    def call_norm(layer, hidden):
        place = norms.index(layer)
        inputs[place].append(hidden)
        result = layer(hidden, training=True)
        layer.set_weights(weights[place])
        return result

    for begin in range(0, len(x), size):
        part = slice(begin, begin + size)
        share = len(x[part]) / len(x)

        def loss_of(part=part):
            return _crossentropy(labels[part], _call(layers, x[part], call_norm))

        loss, variables, gradients = _gradients(layers, loss_of)
        gradients = [share * gradient for gradient in gradients]
        sums = gradients if sums is None else list(map(tf.add, sums, gradients))
        total += share * loss
    for norm, parts in zip(norms, inputs, strict=True):
        norm(tf.concat(parts, 0), training=True)  # its averages, of all examples
    for variable, gradient in zip(variables, sums, strict=True):
        variable.assign_sub(_RATE * gradient)
    return total


def _values(layers):
    return [value for layer in layers for value in layer.get_weights()]


def _assert_equal(ours, theirs, dtype):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=_LIMIT[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layers_of_keras_train_as_micro_batches_by_hand(dtype, memory):
    ours, theirs = _layers(dtype), _layers(dtype)
    x = tf.cast(_IMAGES, dtype)
    step = microbatch_step(_step(ours), batch_norm="micro_batch")
    for _ in memory.each_number():
        loss, size = step(x, _LABELS), -(-23 // memory.count.value)
        _assert_equal([loss], [_by_hand(theirs, x, _LABELS, size)], dtype)
    _assert_equal(_values(ours), _values(theirs), dtype)


def test_a_model_of_keras_trains_as_micro_batches_by_hand():
    keras = importlib.import_module("keras")
    ours, theirs = _layers("float64"), _layers("float64")
    model = microbatch(keras.Sequential(ours), 3, batch_norm="micro_batch")
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(_RATE), crossentropy)
    data = {"x": _IMAGES, "y": _LABELS}
    model.fit(**data, batch_size=23, epochs=2, shuffle=False, verbose=0)
    for _ in range(2):
        _by_hand(theirs, _IMAGES, _LABELS, 8)
    for one, other in zip(_values(ours), _values(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-7)  # a rate of float32


def test_a_layer_that_asks_for_examples_has_the_same_statistics():
    """As layers of Keras 2 do under a strategy, whose replicas may have none."""
    trained = []
    for strategy in None, tf.distribute.MirroredStrategy(["CPU:0"]):
        with strategy.scope() if strategy else contextlib.nullcontext():
            keras = importlib.import_module("keras")
            keras.utils.set_random_seed(1)
            hidden = keras.layers.Dense(5, dtype="float64")
            norm = keras.layers.BatchNormalization(dtype="float64")
            out = keras.layers.Dense(3, dtype="float64")
            model = keras.Sequential([hidden, norm, out])
            model = microbatch(model, 3, batch_norm="micro_batch")
            model.compile(keras.optimizers.SGD(_RATE), "mse")
        data = tf.data.Dataset.from_tensors((_ROWS, _ROWS[:, :3]))
        model.fit(data, epochs=2, verbose=0)
        trained.append(model.get_weights())
    for ours, theirs in zip(*trained, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-7)


class _Norm:
    """Batch normalization in operations of TensorFlow, with moving averages.

    Args:
        is_fused: Whether it is one operation.
    """

    def __init__(self, is_fused):
        self._is_fused, dtype = is_fused, tf.float32 if is_fused else tf.float64
        self.averages = [
            tf.Variable(tf.zeros(3, dtype)),
            tf.Variable(tf.ones(3, dtype)),
        ]

    def __call__(self, x):
        if self._is_fused:
            ones = tf.ones(3)
            x, *moments = v1.nn.fused_batch_norm(
                x[:, None, None], ones, 0 * ones, epsilon=1e-3
            )
            x = x[:, 0, 0]
        else:
            moments = tf.nn.moments(x, [0])
            x = tf.nn.batch_normalization(x, *moments, None, None, 1e-3)
        for average, moment in zip(self.averages, moments, strict=True):
            average.assign_sub(0.1 * (average - moment))
        return x


@pytest.mark.parametrize("is_fused", [True, False])
def test_two_views_are_normalized_apart_and_compared_with_all(is_fused):
    """The loss compares examples, so the model runs twice."""
    dtype = "float32" if is_fused else "float64"
    x = tf.cast(_ROWS, dtype)

    def make():
        kernel = tf.Variable(tf.cast(np.random.RandomState(1).randn(4, 3), dtype))
        norm = _Norm(is_fused)

        def logits(*views):
            one, other = (tf.math.l2_normalize(view, 1) for view in views)
            return one @ tf.transpose(other)

        def step(x):
            with tf.GradientTape() as tape:
                views = norm(x @ kernel), norm((x - 0.3) @ kernel)
                loss = _crossentropy(tf.range(tf.shape(x)[0]), logits(*views))
            kernel.assign_sub(_RATE * tape.gradient(loss, kernel))
            return loss

        def by_hand(x):
            averages = [average.numpy() for average in norm.averages]
            with tf.GradientTape() as tape:
                hidden = [x @ kernel, (x - 0.3) @ kernel]
                parts = [
                    [norm(part[i : i + 6]) for i in range(0, 23, 6)] for part in hidden
                ]
                views = [tf.concat(part, 0) for part in parts]
                loss = _crossentropy(tf.range(23), logits(*views))
            for average, value in zip(norm.averages, averages, strict=True):
                average.assign(value)
            for part in hidden:
                norm(part)
            kernel.assign_sub(_RATE * tape.gradient(loss, kernel))
            return loss

        return step, by_hand, [kernel, *norm.averages]

    step, _, ours = make()
    _, by_hand, theirs = make()
    step = microbatch_step(step, 4, batch_norm="micro_batch")
    for _ in range(3):
        _assert_equal([step(x)], [by_hand(x)], dtype)
    _assert_equal(ours, theirs, dtype)


def _model_fn(is_fused, train):
    def model_fn(features, labels, mode):
        rows = features if is_fused else tf.reshape(features, [-1, 50])
        norm = v1.layers.batch_normalization
        rows = norm(rows, momentum=0.75, fused=is_fused, training=True)
        hidden = tf.reduce_mean(tf.tanh(rows), [1, 2]) if is_fused else tf.tanh(rows)
        width = hidden.shape[1]
        kernel = v1.get_variable("kernel", initializer=_kernel(width, hidden.dtype))
        loss = _crossentropy(labels, hidden @ kernel)
        update_ops = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
        assert len(update_ops) == 2
        return spec_of(mode, loss, tf.group(train(loss), *update_ops))

    return model_fn


def _kernel(width, dtype):
    return np.linspace(-1, 1, width * 3).reshape(width, 3).astype(dtype.as_numpy_dtype)


def _by_sgd(loss):
    optimizer = v1.train.GradientDescentOptimizer(_RATE)
    return optimizer.minimize(loss, v1.train.get_global_step())


def _train(model_fn, dtype, folder):
    """Returns the variables after two batches."""

    def input_fn():
        data = tf.data.Dataset.from_tensors((_IMAGES.astype(dtype), _LABELS))
        return data.repeat(2)

    estimator = tf.estimator.Estimator(model_fn, str(folder))
    estimator.train(input_fn)
    names = [name.split("/")[-1] for name in estimator.get_variable_names()]
    values = map(estimator.get_variable_value, estimator.get_variable_names())
    return dict(zip(names, values, strict=True))


def _trained_by_hand(is_fused, dtype, size):
    x = tf.cast(_IMAGES, dtype)
    x = x if is_fused else tf.reshape(x, [-1, 50])
    axes, width = list(range(len(x.shape) - 1)), x.shape[-1]
    ones = np.ones(width, dtype)
    values = {"gamma": ones, "beta": 0 * ones, "kernel": _kernel(width, x.dtype)}
    variables = {name: tf.Variable(value) for name, value in values.items()}
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = 0.0
            for begin in range(0, 23, size):
                rows = x[begin : begin + size]
                parameters = variables["beta"], variables["gamma"]
                moments = tf.nn.moments(rows, axes)
                rows = tf.tanh(
                    tf.nn.batch_normalization(rows, *moments, *parameters, 1e-3)
                )
                hidden = tf.reduce_mean(rows, [1, 2]) if is_fused else rows
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    _LABELS[begin : begin + size], hidden @ variables["kernel"]
                )
                loss += tf.reduce_sum(losses) / 23
        gradients = tape.gradient(loss, variables)
        for name, variable in variables.items():
            variable.assign_sub(_RATE * gradients[name])
    mean, variance = tf.nn.moments(x, axes)
    number = x.shape.num_elements() / width
    variance *= number / (number - 1) if is_fused else 1.0
    averages = {
        "moving_mean": (1 - 0.75**2) * mean,
        "moving_variance": 0.75**2 + (1 - 0.75**2) * variance,
    }
    return {name: np.asarray(value) for name, value in (variables | averages).items()}


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize(("number", "size"), [(3, 8), (4, 6), ("auto", 23)])
def test_layers_of_tensorflow_1_train_as_micro_batches_by_hand(
    number, size, is_fused, tmp_path
):
    dtype = "float32" if is_fused else "float64"
    model_fn = _model_fn(is_fused, _by_sgd)
    model_fn = microbatch_model_fn(model_fn, number, batch_norm="micro_batch")
    ours = _train(model_fn, dtype, tmp_path)
    for name, value in _trained_by_hand(is_fused, dtype, size).items():
        _assert_equal([ours[name]], [value], dtype)


def test_a_model_fn_that_trains_by_this_library_has_no_choice(tmp_path):
    def train(loss):
        optimizer = v1.train.GradientDescentOptimizer(_RATE)
        return make_accumulating_train_op(loss, optimizer, 1)

    model_fn = microbatch_model_fn(_model_fn(True, train), 2, batch_norm="micro_batch")
    with pytest.raises(
        ValueError, match="`batch_norm` must be left out for a model_fn"
    ):
        _train(model_fn, "float32", tmp_path)


def test_moments_of_a_loss_are_those_of_the_whole_batch():
    """They are written nowhere, or normalize nothing."""
    average = tf.Variable(np.zeros(3))

    def make():
        kernel = tf.Variable(np.random.RandomState(1).randn(4, 3))

        def step(x):
            with tf.GradientTape() as tape:
                hidden = x @ kernel
                mean, variance = tf.nn.moments(hidden, [0])
                loss = tf.reduce_mean(tf.nn.relu(1 - tf.sqrt(variance + 1e-4)))
                average.assign_sub(0.1 * (average - mean))
                targets = tf.stop_gradient(hidden[:, :1])
                mean, variance = tf.nn.moments(targets, [0])
                targets = (targets - mean) * tf.math.rsqrt(variance + 1e-3)
                loss += tf.reduce_mean((hidden - targets) ** 2)
            kernel.assign_sub(_RATE * tape.gradient(loss, kernel))
            return loss

        return step, kernel

    step, ours = make()
    whole, theirs = make()
    step, whole = microbatch_step(step, 4, batch_norm="micro_batch"), tf.function(whole)
    for _ in range(2):
        _assert_equal([step(_ROWS)], [whole(_ROWS)], "float64")
    _assert_equal([ours], [theirs], "float64")


@pytest.mark.parametrize("batch_norm", ["batch", "micro_batch"])
def test_only_statistics_of_the_batch_take_activations_of_the_batch(batch_norm, caplog):
    step = microbatch_step(_step(_layers("float32")), 4, batch_norm=batch_norm)
    with caplog.at_level(logging.WARNING):
        step(_IMAGES.astype("float32"), _LABELS)
    is_warned = "activations are computed on the whole batch" in caplog.text
    assert is_warned == (batch_norm == "batch")


@tf.custom_gradient
def _joining(x):
    return x, lambda gradient: gradient * tf.reduce_mean(gradient**2)


def test_two_gradients_of_a_loss_are_those_of_one_call():
    """Copies of the network for the first are not of the second's head."""

    def gradients_by(calls):
        keras = importlib.import_module("keras")
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model(_SCALED)

        def step(x):
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.sqrt(tf.reduce_mean((model(x, training=True) - 1) ** 2))
            return calls(tape, loss, model.trainable_variables)

        return microbatch_step(step, 4, batch_norm="micro_batch")(_SCALED)

    one = gradients_by(lambda tape, loss, v: tape.gradient(loss, v))
    two = gradients_by(
        lambda tape, loss, v: tape.gradient(loss, v[:2]) + tape.gradient(loss, v[2:])
    )
    for ours, theirs in zip(two, one, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_gradient_that_combines_examples_is_found_behind_the_layer():
    layers = _layers("float32")
    layers.insert(2, _Layer(_joining))
    step = microbatch_step(_step(layers), 4, batch_norm="micro_batch")
    with pytest.raises(ValueError, match="tf.custom_gradient"):
        step(_IMAGES.astype("float32"), _LABELS)


class _Layer:
    """A function as a layer without weights."""

    def __init__(self, function):
        self._function, self.trainable_variables = function, []

    def __call__(self, x):
        return self._function(x)

    def get_weights(self):
        return []


def _renormalized():
    layer = importlib.import_module("keras").layers.BatchNormalization(
        renorm=True, dtype="float32"
    )
    return lambda x: layer(tf.cast(x, tf.float32), training=True)


def _synchronized():
    layer = importlib.import_module("keras").layers.BatchNormalization(
        synchronized=True, dtype="float64"
    )
    return lambda x: layer(x, training=True)


def _masked():
    layer = importlib.import_module("keras").layers.BatchNormalization(dtype="float64")

    def call(x):
        return layer(x, training=True, mask=tf.cast(x[:, 0] > 0, tf.bool))

    return call


def _masked_by_hand():
    moving = tf.Variable(tf.zeros(3, tf.float64))

    def call(x):
        mask = tf.cast(x[:, :1] > 0, x.dtype)
        mean = tf.reduce_sum(mask * x, 0) / 8
        moving.assign(mean)
        return (x - mean) / tf.sqrt(tf.reduce_sum(mask * (x - mean) ** 2, 0) / 8)

    return call


def _of_several_examples():
    norm = _Norm(False)
    return lambda x: norm(x - tf.reduce_mean(x, 0))


def _in_a_function():
    @tf.function
    def call(x):
        x = tf.cast(x, tf.float32)[:, None, None]
        return v1.nn.fused_batch_norm(x, tf.ones(3), tf.zeros(3))[0]

    return lambda x: tf.cast(call(x)[:, 0, 0], tf.float64)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (_renormalized, "corrects by moving averages"),
        (_synchronized, "part of others, as if masked or synchronized"),
        (_masked, "part of others, as if masked or synchronized"),
        (_masked_by_hand, "part of others, as if masked or synchronized"),
        (_of_several_examples, "whose values are not computed for each example"),
        (_in_a_function, "inside of a function, branch or loop"),
    ],
)
def test_statistics_that_are_not_those_of_a_micro_batch_are_refused(make, sentence):
    kernel, norm = tf.Variable(np.random.RandomState(1).randn(4, 3)), make()

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(norm(x @ kernel)) ** 2)
        kernel.assign_sub(tape.gradient(loss, kernel))

    with pytest.raises(ValueError, match=rf"{sentence}.*Use batch_norm='batch'"):
        microbatch_step(step, 4, batch_norm="micro_batch")(_ROWS)


def test_a_synchronized_layer_of_one_replica_normalizes_the_whole_batch():
    def trained(split):
        kernel, norm = (
            tf.Variable(np.random.RandomState(1).randn(4, 3)),
            _synchronized(),
        )

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(norm(x @ kernel)) ** 2)
            kernel.assign_sub(tape.gradient(loss, kernel))

        split(step)(_ROWS)
        return kernel.numpy()

    unsplit = trained(lambda step: step)
    ours = trained(lambda step: microbatch_step(step, 4))
    np.testing.assert_allclose(ours, unsplit, rtol=1e-12)


@pytest.mark.parametrize("is_fused", [True, False])
def test_averages_that_are_written_after_the_gradient_are_refused(is_fused):
    kernel, moving = tf.Variable(tf.ones([4, 3])), tf.Variable(tf.zeros(3))

    def normalize(x):
        if is_fused:
            x, mean, _ = v1.nn.fused_batch_norm(
                x[:, None, None],
                *(tf.ones(3), tf.zeros(3), moving, tf.ones(3)),
                exponential_avg_factor=0.1,
            )
            return x[:, 0, 0], mean
        mean, variance = tf.nn.moments(x, [0])
        x = (x - mean) / tf.sqrt(variance + 1e-3)
        return x, 0.9 * moving + 0.1 * mean

    def step(x, is_late):
        with tf.GradientTape() as tape:
            hidden, average = normalize(tf.cast(x, tf.float32) @ kernel)
            loss = tf.reduce_mean(tf.tanh(hidden) ** 2)
        if not is_late:
            moving.assign(average)
        kernel.assign_sub(tape.gradient(loss, kernel))
        if is_late:
            moving.assign(average)

    step = microbatch_step(step, 4, batch_norm="micro_batch")
    step(_ROWS, False)
    with pytest.raises(ValueError, match="gets after the gradient is taken; write it"):
        step(_ROWS, True)


def _split_model(_, batch_norm):
    keras = importlib.import_module("keras")
    microbatch(keras.Sequential([keras.layers.Dense(1)]), batch_norm=batch_norm)


@pytest.mark.parametrize("wrap", [microbatch_step, microbatch_model_fn, _split_model])
def test_another_choice_is_refused(wrap):
    with pytest.raises(
        ValueError, match="one of 'batch' and 'micro_batch'. Received: 1"
    ):
        wrap(print, batch_norm=1)


@pytest.mark.parametrize(("data_format", "axis"), [("NHWC", 3), ("NCHW", 1)])
def test_gradients_beside_fed_moments_have_little_rounding_far_from_zero(
    data_format, axis
):
    shape = [-1 if a == axis else 1 for a in range(4)]
    draws = [_RANDOM.uniform(1, 2, _IMAGES.shape[axis]) for _ in range(4)]
    arrays = [_IMAGES + 1e4, _RANDOM.randn(*_IMAGES.shape), *draws]
    arrays[-1] += 1e4
    arrays = [array.astype(np.float32) for array in arrays]
    with tf.Graph().as_default(), v1.Session() as session:
        values, arriving, scale, offset = map(tf.constant, arrays[:4])
        results = v1.nn.fused_batch_norm(
            values, scale, offset, epsilon=1e-3, data_format=data_format
        )
        sources = [values, scale, offset]
        derived = tf.gradients(results[0], sources, arriving)
        (mean, variance), others = fed_moments._feed_fused(results[0].op, derived)
        ours = [others[tensor.name] for tensor in (results[0], *derived)]
        ours = session.run(ours, {variance: arrays[4], mean: arrays[5]})
    values, arriving, *parts = (array.astype(np.float64) for array in arrays)
    scale, offset, variance, mean = (part.reshape(shape) for part in parts)
    normalized = (values - mean) / np.sqrt(variance + 1e-3)
    axes = tuple(a for a in range(4) if a != axis)
    expected = normalized * scale + offset, arriving * scale / np.sqrt(variance + 1e-3)
    sums = [np.sum(x, axes) for x in (arriving * normalized, arriving)]
    for array, right in zip(ours, (*expected, *sums), strict=True):
        np.testing.assert_allclose(array, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [4, None])
def test_moments_on_a_replica_without_examples_are_those_of_none(width):
    with tf.Graph().as_default(), v1.Session() as session:
        rows = v1.placeholder_with_default(_ROWS, [23, width])
        batch = WholeBatch({"features": rows, "labels": None}, "mean")
        x, feeds = batch.sliced["features"], batch.feeds(0, 23, 23, 1, False)
        of_part = tf.nn.moments(x, [0], keepdims=True)
        both = collect_moments(batch, Turn.LAST, Moments(x, *of_part, False))
        both = [tf.squeeze(tensor, [0]) for tensor in both]  # as tf.nn.moments does
        total = batch.works.total
        session.run([batch.stage, total.initialize])
        session.run(total.micro_ops, feeds)
        wanted = [_ROWS.mean(0), _ROWS.var(0)]
        np.testing.assert_allclose(session.run(both), wanted, rtol=1e-12)
        session.run(total.empty)
        nothing = np.full([2, width or 1], np.nan)
        np.testing.assert_array_equal(session.run(both), nothing)
