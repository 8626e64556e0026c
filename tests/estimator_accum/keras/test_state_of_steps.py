"""Variables that a step of a cut model writes have the values of the batch at once."""

import importlib

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.keras import microbatch

_LIMIT = 1e-12


@pytest.fixture
def keras():
    module = importlib.import_module("keras")
    module.backend.set_floatx("float64")
    module.mixed_precision.set_global_policy("float64")
    yield module
    module.backend.set_floatx("float32")
    module.mixed_precision.set_global_policy("float32")


def _in_branch(state):
    return tf.cond(
        state[0] < 9.0, lambda: state.assign(state * 1.5), lambda: state.read_value()
    )


def _in_loop(state):
    def write(i):
        with tf.control_dependencies([state.assign_add([0.25, 0.5])]):
            return [i + 1]

    return tf.while_loop(lambda i: i < 2, write, [0])


def _in_function(state):
    return tf.function(lambda: tf.function(lambda: state.assign_sub([0.1, 0.2]))())()


_WRITES = {
    "assign": lambda state: state.assign(state * 1.5),
    "assign_add": lambda state: state.assign_add([0.5, 0.25]),
    "scatter": lambda state: state.scatter_add(
        tf.IndexedSlices(tf.constant([0.5], tf.float64), [1])
    ),
    "slice": lambda state: state[0].assign(2.0),
    "branch": _in_branch,
    "loop": _in_loop,
    "function": _in_function,
}


def _writing(keras, place, is_failing=lambda: False):
    """Returns a model that reads all that `place` writes, and the variables."""
    names = [*_WRITES, "metric"]
    states = {name: tf.Variable(np.ones(2), trainable=False) for name in names}

    def write():
        for name, function in _WRITES.items():
            function(states[name])

    def allocate():
        if is_failing():
            raise MemoryError("injected")
        return np.float64(1.0)

    def mean(y, outputs):
        one = tf.reshape(tf.numpy_function(allocate, [], tf.float64), [])
        return tf.reduce_mean(tf.square(y - outputs)) * tf.stop_gradient(one)

    class Metric(keras.metrics.Mean):
        def update_state(self, y, outputs, sample_weight=None):
            states["metric"].assign_add([0.5, 0.125])
            return super().update_state(outputs)

    class Writing(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(2, "tanh")
            self.out = keras.layers.Dense(1)

        def call(self, x):
            hidden = self.hidden(x)
            for state in states.values():
                hidden *= tf.convert_to_tensor(state)
            return self.out(hidden)

    class Computing(Writing):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
            value = mean(y, y_pred)
            write()
            self.hidden.kernel.assign(0.9 * self.hidden.kernel)  # a projection
            return value

    def loss(y, outputs):
        value = mean(y, outputs)
        write()
        return value

    model = Computing() if place == "compute_loss" else Writing()
    options = {"loss": loss} if place == "loss" else {}
    model.compile(
        keras.optimizers.SGD(1e-5), **options, metrics=[Metric()], jit_compile=False
    )
    return model, states


def _trained(keras, micro_batches, place, **options):
    keras.utils.set_random_seed(1)
    model, states = _writing(keras, place, **options)
    model = microbatch(model, micro_batches)
    x = np.random.default_rng(0).normal(size=[20, 3])
    model.fit(x, x[:, :1], batch_size=10, epochs=2, shuffle=False, verbose=0)
    return [*model.get_weights(), *(state.numpy() for state in states.values())]


@pytest.mark.parametrize("place", ["loss", "compute_loss"])
def test_variables_that_a_step_writes_have_the_values_of_the_batch_at_once(
    keras, place
):
    calls = []

    def is_failing():
        calls.append(None)
        return len(calls) == 1  # the batch at once

    wanted = _trained(keras, 1, place)
    for ours in (
        _trained(keras, 3, place),
        _trained(keras, "auto", place, is_failing=is_failing),
    ):
        for one, other in zip(ours, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=_LIMIT, atol=_LIMIT)
    assert len(calls) == 5


def test_an_eager_loss_may_write_what_the_model_reads(keras):
    def stepped(number):
        keras.utils.set_random_seed(1)
        model, states = _writing(keras, "compute_loss")
        model = microbatch(model, number)
        model.compile(keras.optimizers.SGD(1e-5), run_eagerly=True)
        x = np.random.default_rng(0).normal(size=[10, 3])
        for _ in range(2):
            model.train_on_batch(x, x[:, :1])
        return [*model.get_weights(), *(state.numpy() for state in states.values())]

    for one, other in zip(stepped(3), stepped(1), strict=True):
        np.testing.assert_allclose(one, other, rtol=_LIMIT, atol=_LIMIT)


def test_a_loss_may_write_a_table_that_the_model_reads(keras):
    key = tf.constant([0], tf.int64)

    def trained(number):
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float64, 1.0)

        class Reading(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(1, kernel_initializer="ones")

            def call(self, x):
                return self.dense(x) * tf.ensure_shape(table.lookup(key), [1])

        def loss(y, outputs):
            table.insert(key, table.lookup(key) + 1.0)
            return tf.reduce_mean(tf.square(y - outputs))

        model = microbatch(Reading(), number)
        model.compile("sgd", loss, jit_compile=False)
        for _ in range(2):
            model.train_on_batch(np.ones([4, 2]), np.ones([4, 1]))
        return [*model.get_weights(), table.lookup(key).numpy()]

    for one, other in zip(trained(2), trained(1), strict=True):
        np.testing.assert_allclose(one, other, rtol=_LIMIT, atol=_LIMIT)


@pytest.mark.parametrize("number", [2, "auto"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_model_may_look_up_tables(keras, number, is_inside):
    """Whose handles enter the functions that run micro-batches, which write nothing."""
    initializer = tf.lookup.KeyValueTensorInitializer(
        tf.constant(["a", "b", "c"]), tf.constant([1, 2, 3])
    )
    table = tf.lookup.StaticHashTable(initializer, 0)

    class Words(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedded = keras.layers.Embedding(4, 3)
            self.out = keras.layers.Dense(1)

        def call(self, x):
            look_up = tf.function(table.lookup) if is_inside else table.lookup
            return self.out(tf.reduce_mean(self.embedded(look_up(x)), 1))

    def largest(y, outputs):
        return tf.reduce_max(tf.square(y - outputs))

    x = tf.constant(np.random.default_rng(0).choice(["a", "b", "c", "d"], [8, 3]))
    y = np.random.default_rng(0).normal(size=[8, 1])

    def trained(number):
        keras.utils.set_random_seed(1)
        model = microbatch(Words(), number)
        model.compile(keras.optimizers.SGD(0.1), largest, jit_compile=False)
        model.train_on_batch(x, y)
        model.predict_on_batch(x)
        return model.get_weights()

    for one, other in zip(trained(number), trained(1), strict=True):
        np.testing.assert_allclose(one, other, rtol=_LIMIT, atol=_LIMIT)


def _positions(tokens, places, x):
    return tokens(x) + places(tf.range(tf.shape(x)[1]))


def _both_ways(tokens, places, x):
    positions = tokens(tf.range(tf.shape(x)[1])) + tokens(tf.range(3))[0]
    return positions + tokens(x) * places(x)


@pytest.mark.parametrize("look_up", [_positions, _both_ways])
@pytest.mark.parametrize("passes", [1, 2])
def test_places_that_no_example_decides_have_one_slice(keras, look_up, passes):
    """Adam of Keras 3 squares each slice by itself, and clipping reads them all."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, [32, 5]), rng.random([32, 1])

    class Embedded(keras.Model):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = (keras.layers.Embedding(9, 4) for _ in range(2))
            self.out = keras.layers.Dense(1)

        def call(self, x):
            embedded = look_up(self.tokens, self.places, x)
            return self.out(tf.reshape(embedded, [-1, 20]))

    def largest(y, outputs):
        return tf.reduce_max(tf.square(y - outputs))

    def trained(number):
        keras.utils.set_random_seed(1)
        model = microbatch(Embedded(), number)
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.1)
        model.compile(optimizer, "mse" if passes == 1 else largest, jit_compile=False)
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        return model.get_weights()

    for one, other in zip(trained(3), trained(1), strict=True):
        np.testing.assert_allclose(one, other, rtol=_LIMIT, atol=_LIMIT)


def _size_in_the_loss(keras):
    """Returns layers and a loss that read the static number of examples."""

    def loss(y, outputs):
        return tf.reduce_sum(tf.square(y - outputs), -1) / (y.shape[0] or 1)

    return [keras.layers.Dense(1)], loss


def _size_in_a_layer(keras):
    class Scale(keras.layers.Layer):
        def call(self, x):
            return x / float(x.shape[0] or 1)

    return [keras.layers.Dense(3), Scale(), keras.layers.Dense(1)], "mse"


def _results(model, number, x) -> list:
    """Returns the weights after a step, and the loss of an evaluation of each kind."""
    model = microbatch(model, number)
    y, last = x[:, :1], tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    first = model.train_on_batch(x, y)
    numbers = model.evaluate(last.batch(10, drop_remainder=True), verbose=0)
    model.fit(last.batch(10, drop_remainder=True), verbose=0)
    after = model.evaluate(x, y, batch_size=5, verbose=0)
    losses = [first, numbers, after, model.test_on_batch(x, y)]
    return [*model.get_weights(), *(np.ravel(loss) for loss in losses)]


@pytest.mark.parametrize("number", [2, "auto"])
@pytest.mark.parametrize("make", [_size_in_the_loss, _size_in_a_layer])
def test_the_static_number_of_examples_is_that_of_the_batch(keras, make, number):
    def results(number):
        keras.utils.set_random_seed(1)
        layers, loss = make(keras)
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
        x = np.random.default_rng(0).normal(size=[10, 3])
        return _results(model, number, x)

    for one, other in zip(results(number), results(1), strict=True):
        np.testing.assert_allclose(one, other, rtol=_LIMIT, atol=_LIMIT)


@pytest.mark.parametrize("number", [3, "auto"])
def test_a_loss_may_have_the_gradient_with_respect_to_inputs(keras, number):
    """In training and in an evaluation, also with "auto" before a batch is split."""

    class Smooth(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden = keras.layers.Dense(4, "tanh")
            self.out = keras.layers.Dense(1)
            self.penalty = keras.metrics.Mean("penalty")

        def call(self, x):
            return self.out(self.hidden(x))

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
            with tf.GradientTape() as tape:
                tape.watch(x)
                outputs = self(x)
            penalty = tf.reduce_mean(tape.gradient(outputs, x) ** 2)
            self.penalty.update_state(penalty)
            return tf.reduce_mean((y - outputs) ** 2) + penalty

    def results(number):
        keras.utils.set_random_seed(1)
        model = Smooth()
        model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
        x = np.random.default_rng(0).normal(size=[10, 3])
        return _results(model, number, x)

    for one, other in zip(results(number), results(1), strict=True):
        np.testing.assert_allclose(one, other, rtol=_LIMIT, atol=_LIMIT)


@pytest.mark.parametrize("name", ["Nadam", "Adafactor", "ScheduleFreeAdamW"])
def test_an_optimizer_is_built_as_in_the_first_call_of_a_tf_function(keras, name):
    """They build in Python, and by writes; the second trace has neither."""
    if not hasattr(keras.optimizers, name):
        pytest.skip(f"Keras 2 has no {name}")

    def trained(number):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model = microbatch(model, number)
        optimizer = getattr(keras.optimizers, name)(0.1)
        model.compile(optimizer, "mse", jit_compile=False)
        x = np.random.default_rng(0).normal(size=[20, 3])
        model.fit(x, x[:, :2], batch_size=10, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    for one, other in zip(trained(3), trained(1), strict=True):
        np.testing.assert_allclose(one, other, rtol=_LIMIT, atol=_LIMIT)
