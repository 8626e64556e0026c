"""`microbatch_step`: training steps of TensorFlow 2 equal those on the batch at once."""

import concurrent.futures
import functools
import gc
import importlib
import itertools
import re
import types
import weakref

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import micro_batch_seed, microbatch_step
from estimator_accum.core.current_batch import current_batch
from estimator_accum.graph.walks import ancestors
from estimator_accum.microbatch import executors
from tests.helpers.models import of_replicas
from tests.helpers.processes import strategy_program
from tests.helpers.tables import rows

_RANDOM = np.random.RandomState(0)
_X = _RANDOM.randn(23, 6)
_Y = _RANDOM.randn(23, 2)
_CLASSES = _RANDOM.randint(0, 3, 23)
_IDS = np.random.RandomState(5).randint(0, 11, (23, 3))
_LIMIT = 1e-14


def _weights(*shape):
    return tf.Variable(np.random.RandomState(len(shape)).randn(*shape) / 2)


def _network(inputs, outputs):
    kernels = [_weights(inputs, 5), _weights(5, outputs)]
    return kernels, lambda x: tf.tanh(x @ kernels[0]) @ kernels[1]


def _crossentropy(labels, logits):
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )


def _descend(tape, loss, variables, rate=0.1):
    for variable, gradient in zip(
        variables, tape.gradient(loss, variables), strict=True
    ):
        variable.assign_sub(rate * gradient)


def _contrast():
    kernels, network = _network(6, 2)
    temperature = tf.Variable(np.float64(0.5))
    keras = importlib.import_module("keras")
    optimizer = keras.optimizers.Adam(0.01)

    def step(x, y):
        variables = [*kernels, temperature]
        with tf.GradientTape() as tape:
            mine, other = (tf.math.l2_normalize(t, 1) for t in (network(x), y))
            logits = mine @ tf.transpose(other) / temperature
            loss = _crossentropy(tf.range(tf.shape(x)[0]), logits)
        gradients = tape.gradient(loss, variables)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.5)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        temperature.assign(tf.clip_by_value(temperature, 0.01, 1.0))
        return {"loss": loss, "norm": norm, "rows": mine, "none": None}

    return step, [*kernels, temperature], (_X, _Y)


def _critic_and_generator(critic_steps=2):
    """WGAN-GP, with an optimizer of each."""
    critic, judge = _network(6, 1)
    generator, make = _network(2, 6)
    keras = importlib.import_module("keras")
    optimizer, other_optimizer = (
        keras.optimizers.SGD(rate, momentum=0.5) for rate in (0.01, 0.1)
    )

    def step(x, noise):
        for _ in range(critic_steps):
            with tf.GradientTape() as tape:
                fake = make(noise)
                between = x + 0.3 * (fake - x)
                with tf.GradientTape() as inner:
                    inner.watch(between)
                    judged = judge(between)
                slopes = tf.norm(inner.gradient(judged, between), axis=1)
                loss = tf.reduce_mean(judge(fake)) - tf.reduce_mean(judge(x))
                loss += 10 * tf.reduce_mean((slopes - 1) ** 2)
            gradients = tape.gradient(loss, critic)
            optimizer.apply_gradients(zip(gradients, critic, strict=True))
        with tf.GradientTape() as tape:
            other = -tf.reduce_mean(judge(make(noise)))
        gradients = tape.gradient(other, generator)
        other_optimizer.apply_gradients(zip(gradients, generator, strict=True))
        return loss, other, loss + other

    return step, [*critic, *generator], (_X, _Y)


def _both_losses_first():
    critic, judge = _network(6, 1)
    generator, make = _network(2, 6)

    def step(x, noise):
        with tf.GradientTape() as one, tf.GradientTape() as two:
            fake = judge(make(noise))
            loss = tf.reduce_mean(tf.nn.softplus(-fake))
            other = tf.reduce_mean(tf.nn.softplus(fake) + tf.nn.softplus(-judge(x)))
        gradients = one.gradient(loss, generator)
        _descend(two, other, critic)
        for variable, gradient in zip(generator, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss, other

    return step, [*critic, *generator], (_X, _Y)


def _normalized_targets():
    kernels, network = _network(6, 1)
    mean, deviation = tf.Variable(np.float64(0)), tf.Variable(np.float64(1))
    counter = tf.Variable(0)

    def step(x, y):
        counter.assign_add(1)
        mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(y))
        deviation.assign(0.9 * deviation + 0.1 * tf.math.reduce_std(y))
        with tf.GradientTape() as tape:
            errors = network(x)[:, 0] - (y[:, 0] - mean) / deviation
            loss = tf.reduce_mean(errors**2) / tf.cast(counter, tf.float64)
        _descend(tape, loss, kernels)
        return loss, counter.read_value()

    return step, [*kernels, mean, deviation, counter], (_X, _Y)


def _masked_words():
    """A masked language model, and a loss of chosen examples beside all."""
    table, kernels = _weights(11, 4), [_weights(4, 5), _weights(5, 11), _weights(5, 2)]

    def step(x, y, ids):
        with tf.GradientTape() as tape:
            words = tf.one_hot(ids, 11, dtype=tf.float64)
            hidden = tf.tanh(words @ (table @ kernels[0]))  # [B, 3, 5]
            chosen = tf.equal(ids % 3, 1)
            logits = tf.boolean_mask(hidden, chosen) @ kernels[1]
            loss = _crossentropy(tf.boolean_mask(ids, chosen), logits)
            is_large = x[:, 0] > 0.5
            scores = tf.boolean_mask(hidden[:, 0], is_large) @ kernels[2]
            errors = (scores - tf.boolean_mask(y, is_large)) ** 2
            root = tf.sqrt(tf.reduce_sum(errors) / tf.cast(tf.size(errors), x.dtype))
            loss += root * tf.reduce_mean(hidden**2)
        _descend(tape, loss, [table, *kernels])
        return loss, tf.shape(logits)[0], root

    return step, [table, *kernels], (_X, _Y, _IDS)


def _codebook():
    encoder, encode = _network(6, 3)
    decoder, decode = _network(3, 6)
    codes, counts = _weights(4, 3), tf.Variable(np.ones(4))

    def step(x):
        with tf.GradientTape() as tape:
            z = encode(x)
            places = tf.argmin(tf.reduce_sum((z[:, None] - codes) ** 2, -1), 1)
            nearest = tf.stop_gradient(tf.gather(codes, places))
            loss = tf.reduce_mean((decode(z + tf.stop_gradient(nearest - z)) - x) ** 2)
            loss += tf.reduce_mean((z - nearest) ** 2)
        _descend(tape, loss, [*encoder, *decoder])
        hot = tf.one_hot(places, 4, dtype=tf.float64)
        counts.assign(0.9 * counts + 0.1 * tf.reduce_sum(hot, 0))
        codes.assign(0.9 * codes + 0.1 * (tf.transpose(hot) @ z) / counts[:, None])
        return loss

    return step, [*encoder, *decoder, codes, counts], (_X,)


def _two_views():
    kernels, network = _network(6, 3)

    def step(x):
        with tf.GradientTape() as tape:
            views = tf.concat([1.1 * x, x - 0.1], 0)
            z, n = tf.math.l2_normalize(network(views), 1), tf.shape(x)[0]
            logits = 5 * z @ tf.transpose(z) - 1e9 * tf.eye(2 * n, dtype=tf.float64)
            places = tf.concat([tf.range(n) + n, tf.range(n)], 0)
            loss = _crossentropy(places, logits)
        _descend(tape, loss, kernels)
        return loss

    return step, kernels, (_X,)


def _embedding():
    table, kernel = _weights(11, 4), _weights(4, 3)
    keras = importlib.import_module("keras")
    optimizer = keras.optimizers.Adam(0.01)
    places = np.random.RandomState(3).randint(0, 11, (23, 4))
    lengths, counter = np.arange(23) % 3, tf.Variable(np.float64(0))
    marks = np.random.RandomState(4).randn(sum(lengths))
    marks = tf.RaggedTensor.from_row_lengths(marks, lengths)

    def step(batch, *, scale):
        counter.assign_add(1)  # so the gradient has a phase of its own
        with tf.GradientTape() as tape:
            hidden = tf.reduce_mean(tf.gather(table, batch["places"]), 1)
            hidden += tf.reduce_sum(batch["marks"], 1)[:, None] / counter
            loss = scale * _crossentropy(batch["labels"], hidden @ kernel)
        pairs = zip(tape.gradient(loss, [table, kernel]), [table, kernel], strict=True)
        optimizer.apply_gradients(pairs)
        return loss

    batch = {"places": places, "labels": _CLASSES, "marks": marks}
    variables = [table, kernel, counter]
    return (lambda data: step(data, scale=2.0)), variables, (batch,)


def _conditional_update():
    kernels, network = _network(6, 3)
    scale, steps = tf.Variable(np.float64(8)), tf.Variable(0)

    def step(x, labels):
        with tf.GradientTape() as tape:
            loss = _crossentropy(labels, network(x))
            scaled = loss * scale
        gradients = [g / scale for g in tape.gradient(scaled, kernels)]
        if tf.reduce_all(tf.math.is_finite(gradients[0])):
            for variable, gradient in zip(kernels, gradients, strict=True):
                variable.assign_sub(0.1 * gradient)
            steps.assign_add(1)
        if steps % 2 == 0:
            scale.assign(scale * 2)
        tf.debugging.assert_all_finite(loss, "not finite")
        return loss, scaled

    return step, [*kernels, scale, steps], (_X, _CLASSES)


def _loss_scale(policy="float64"):
    """Mixed precision: gradients of the second of three batches are not finite."""
    keras = importlib.import_module("keras")
    is_3 = hasattr(keras, "ops")
    home = keras.optimizers if is_3 else keras.mixed_precision
    options = {"initial_scale": 8, "dynamic_growth_steps": 2}
    optimizer = home.LossScaleOptimizer(keras.optimizers.SGD(0.1), **options)
    layer, counter = keras.layers.Dense(3, dtype=policy), tf.Variable(0)
    layer.build([None, 6])
    layer.set_weights([_weights(6, 3).numpy(), _weights(3).numpy()])
    variables = [*layer.trainable_variables]

    def step(x, labels):
        counter.assign_add(1)
        with tf.GradientTape() as tape:
            loss = _crossentropy(labels, tf.cast(layer(x), tf.float64))
            loss *= tf.where(counter % 3 == 2, np.float64(np.inf), 1.0)
            scaled = (optimizer.scale_loss if is_3 else optimizer.get_scaled_loss)(loss)
        gradients = tape.gradient(scaled, variables)
        if not is_3:
            gradients = optimizer.get_unscaled_gradients(gradients)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        scale = optimizer.dynamic_scale if is_3 else optimizer.loss_scale
        return loss, tf.identity(scale), tf.identity(optimizer.iterations)

    return step, variables, (_X, _CLASSES)


def _checked_critic():
    """The second gradient reads the critic's new weights, behind a check and a print."""
    critic, judge = _network(6, 1)
    generator, make = _network(2, 6)

    @tf.function
    def judge_checked(x):
        tf.debugging.assert_all_finite(x, "not finite")
        tf.print("judged", output_stream="file:///dev/null")
        return judge(x)

    def step(x, noise):
        for variables, sign in ((critic, 1), (generator, -1)):
            with tf.GradientTape() as tape:
                loss = sign * tf.reduce_mean(judge_checked(make(noise)) ** 2)
            _descend(tape, loss, variables)
        return loss

    return step, [*critic, *generator], (_X, _Y)


def _counted_updates():
    """A count waits for each update, through the constant that is added."""
    critic, judge = _network(6, 1)
    generator, make = _network(2, 6)
    count = tf.Variable(np.float64(0))

    def step(x, noise):
        for variables, sign in ((critic, 1), (generator, -1)):
            with tf.GradientTape() as tape:
                loss = sign * tf.reduce_mean(judge(make(noise)) ** 2 - judge(x))
            gradients = tape.gradient(loss, variables)
            updates = [
                variable.assign_sub(0.1 * gradient)
                for variable, gradient in zip(variables, gradients, strict=True)
            ]
            with tf.control_dependencies(updates):
                count.assign_add(1.0)
        return loss

    return step, [*critic, *generator, count], (_X, _Y)


def _complex_losses():
    kernels = [_weights(6, 3), _weights(3, 1)]

    def step(x):
        with tf.GradientTape() as tape:
            z = tf.complex(tf.tanh(x @ kernels[0]) @ kernels[1], x[:, :1])
            losses = [tf.reduce_mean(z * tf.math.conj(z)), tf.exp(1j * z / 3)]
        gradients = tape.gradient(losses, kernels)
        for variable, gradient in zip(kernels, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return losses

    return step, kernels, (_X,)


def _penalty_in_a_branch():
    """A gradient with respect to examples, every second step."""
    kernel, steps = _weights(6, 1), tf.Variable(0)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ kernel) ** 2)
            if steps % 2 == 0:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    total = tf.reduce_sum((x @ kernel) ** 2)
                loss += tf.reduce_max(inner.gradient(total, x) ** 2)
        _descend(tape, loss, [kernel], 0.001)
        steps.assign_add(1)
        return loss

    return step, [kernel, steps], (_X,)


def _gradients_in_branches():
    """Two updates, whose gradients are computed in a branch, and in a function."""
    kernels, network = _network(6, 3)
    steps = tf.Variable(0)

    def step(x, labels):
        steps.assign_add(1)
        with tf.GradientTape() as tape:
            first = _crossentropy(labels, network(x))
        if steps % 2 == 1:
            _descend(tape, first, kernels)
        with tf.GradientTape() as tape:
            second = _crossentropy(labels, network(x)) ** 2

        @tf.function
        def descend():
            if steps > 1:
                _descend(tape, second, kernels)

        descend()
        return first, second

    return step, [*kernels, steps], (_X, _CLASSES)


def _statistics():
    """Batch normalization with the statistics of the whole batch."""
    kernels, _ = _network(6, 3)
    moving = tf.Variable(np.zeros(5))

    def step(x, labels):
        with tf.GradientTape() as tape:
            hidden = x @ kernels[0]
            mean, variance = tf.nn.moments(hidden, [0])
            moving.assign(0.9 * moving + 0.1 * mean)
            hidden = tf.tanh((hidden - mean) / tf.sqrt(variance + 1e-3))
            loss = _crossentropy(labels, hidden @ kernels[1])
        _descend(tape, loss, kernels)
        return loss

    return step, [*kernels, moving], (_X, _CLASSES)


def _of_looked_up(kernels, ids):
    rows = tf.reduce_mean(tf.gather(kernels[0], ids), 1)
    return tf.reduce_mean((rows @ kernels[1]) ** 2 + rows[:, :1])


def _predictor_and_corrector():
    """Heun's method, whose second update has the slices of both gradients."""
    kernels = [_weights(11, 4), _weights(4, 1)]

    def gradients(ids):
        with tf.GradientTape() as tape:
            loss = _of_looked_up(kernels, ids)
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, kernels)]

    def step(ids):
        first = gradients(ids)
        for variable, gradient in zip(kernels, first, strict=True):
            variable.assign_sub(0.1 * gradient)
        for variable, old, new in zip(kernels, first, gradients(ids), strict=True):
            variable.assign_add(0.05 * (old - new))

    return step, kernels, (_IDS,)


def _adversarial_words():
    """The fast gradient method: a table is moved, and moved back after the look-ups."""
    kernels = [_weights(11, 4), _weights(4, 1)]

    def step(ids):
        with tf.GradientTape() as tape:
            loss = _of_looked_up(kernels, ids)
        gradient = tf.convert_to_tensor(tape.gradient(loss, kernels[0]))
        move = 0.2 * gradient / tf.norm(gradient)
        kernels[0].assign_add(move)
        with tf.GradientTape() as tape:
            loss = _of_looked_up(kernels, ids)
        gradients = tape.gradient(loss, kernels)
        kernels[0].assign_sub(move)
        for variable, gradient in zip(kernels, gradients, strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    return step, kernels, (_IDS,)


def _rate_of_a_function():
    """A function reads the rate of a phase before it changes."""
    kernels, rate = [_weights(6, 4), _weights(4, 1)], tf.Variable(np.float64(0.1))

    @tf.function
    def update(gradient):
        kernels[1].assign_sub(rate * gradient)

    def step(x):
        for variable, change in zip(kernels, (None, update), strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ kernels[0] @ kernels[1]) ** 2)
            gradient = tape.gradient(loss, variable)
            if change is None:
                variable.assign_sub(0.1 * gradient)
            else:
                change(gradient)
        rate.assign(0.5 * rate)
        return loss

    return step, [*kernels, rate], (_X,)


def _noise_on_weights():
    """Noise is added before the gradient and taken back after it."""
    kernel, generator = _weights(6, 3), tf.random.Generator.from_seed(1)

    def step(x):
        noise = generator.normal([6, 3], dtype=tf.float64)
        kernel.assign_add(noise)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ kernel) ** 2)
        kernel.assign_sub(noise + 0.1 * tape.gradient(loss, kernel))

    return step, [kernel, generator.state], (_X,)


def _chain_of_noise():
    """Langevin's: gradients with respect to random numbers of the batch's size."""
    kernel = _weights(6, 1)

    def energy(x):
        return tf.tanh(x @ kernel) ** 2

    def step(x):
        noise = tf.random.stateless_normal([x.shape[0], 6], [1, 2], dtype=tf.float64)
        # Columns, by chance as many as examples.
        columns = tf.random.stateless_uniform([23], [3, 4], 0, 6, tf.int32)
        for _ in range(2):
            with tf.GradientTape() as tape:
                tape.watch(noise)
                total = tf.reduce_sum(energy(noise))
            noise -= 0.1 * tape.gradient(total, noise)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(energy(x)) - tf.reduce_mean(energy(noise))
            rows = tf.gather(x, columns, axis=1) * kernel[0]
            loss += tf.reduce_mean(
                tf.reshape(rows, [-1, 23]) @ tf.ones([23, 2], x.dtype)
            )
        _descend(tape, loss, [kernel])
        return loss

    return step, [kernel], (_X,)


_STEPS = [
    _chain_of_noise,
    _contrast,
    _predictor_and_corrector,
    _adversarial_words,
    _noise_on_weights,
    _rate_of_a_function,
    _critic_and_generator,
    _both_losses_first,
    _normalized_targets,
    _masked_words,
    _codebook,
    _two_views,
    _embedding,
    _conditional_update,
    _loss_scale,
    _gradients_in_branches,
    _statistics,
    _checked_critic,
    _counted_updates,
    _complex_losses,
    _penalty_in_a_branch,
]


def _run(make, wrap, batches=range(3)):
    """Returns all results of steps, and the variables afterwards."""
    step, variables, arguments = make()
    step = wrap(step)
    results = [step(*arguments) for _ in batches]
    results = [
        tf.convert_to_tensor(t) for t in tf.nest.flatten(results) if t is not None
    ]
    return [np.asarray(t, complex) for t in [*results, *variables]]


def _eager(step):
    """Returns a step without tf.function, which reads variables as they are.

    A tf.function whose second loss reads variables that optimizers of Keras have changed
    before computes other numbers in some traces.
    """

    def tensor(leaf):
        return tf.constant(leaf) if isinstance(leaf, np.ndarray) else leaf

    return lambda *args: step(*tf.nest.map_structure(tensor, args))


@pytest.mark.parametrize("make", _STEPS)
def test_a_step_trains_as_on_the_batch_at_once(make, memory):
    """Also where memory runs out after any micro-batch of any pass."""
    ours = _run(make, microbatch_step, memory.each_number())
    whole = _run(make, _eager, range(memory.batches))
    for one, other in zip(whole, ours, strict=True):
        np.testing.assert_allclose(one, other, rtol=_LIMIT, atol=_LIMIT)


def test_a_loss_scale_of_float16_sees_the_batch_once(memory):
    make = functools.partial(_loss_scale, "mixed_float16")
    ours = _run(make, microbatch_step, memory.each_number())
    whole = _run(make, _eager, range(memory.batches))
    for one, other in zip(whole, ours, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)
    losses, scales = ours[:-2:3], ours[1:-2:3]
    assert np.isfinite(losses[:4]).tolist() == [True, False, True, True]
    assert scales[:4] == [8, 4, 4, 8]


@pytest.mark.daily
def test_five_critic_steps_and_the_generators_run_the_model_six_times(caplog):
    caplog.set_level("INFO", "tensorflow.estimator_accum")
    make = functools.partial(_critic_and_generator, 5)
    whole, ours = (
        _run(make, wrap) for wrap in (_eager, lambda step: microbatch_step(step, 4))
    )
    for one, other in zip(whole, ours, strict=True):
        np.testing.assert_allclose(one, other, rtol=_LIMIT, atol=_LIMIT)
    assert "the model runs 6 times" in caplog.text


def test_a_gradient_that_comes_after_a_change_by_its_loss_is_refused():
    kernels = [_weights(6, 1) for _ in range(3)]
    scale = tf.Variable(np.float64(1))

    def step(x):
        with tf.GradientTape() as tape:
            first = tf.reduce_mean((x @ kernels[0]) ** 2)
        kernels[0].assign_sub(tape.gradient(first, kernels[0]))
        with tf.GradientTape() as late:
            second = tf.reduce_mean((x @ kernels[0]) * (x @ kernels[1]))
        scale.assign(0.9 * scale + second)
        with tf.GradientTape() as tape:
            third = tf.reduce_mean((x @ kernels[2]) ** 2) / scale
        kernels[2].assign_sub(tape.gradient(third, kernels[2]))
        kernels[1].assign_sub(late.gradient(second, kernels[1]))
        return third

    with pytest.raises(
        ValueError, match="must be taken before a variable is changed by"
    ):
        microbatch_step(step, 4)(_X)


def test_one_micro_batch_is_the_step_itself():
    for one, other in zip(
        _run(_contrast, tf.function),
        _run(_contrast, lambda step: microbatch_step(tf.function(step), 1)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_a_step_without_gradients_computes_results_of_the_batch():
    _, network = _network(6, 3)
    total = tf.Variable(np.float64(0))

    def step(x):
        total.assign_add(tf.reduce_sum(x))
        return network(x), total.read_value()

    rows, value = microbatch_step(step, 5)(_X)
    np.testing.assert_allclose(rows, network(_X), rtol=_LIMIT)
    assert value.numpy() == total.numpy() == pytest.approx(_X.sum(), rel=_LIMIT)


def test_examples_draw_numbers_of_their_own_from_one_seed():
    state, kernel = tf.Variable([1, 2]), _weights(6, 3)

    def step(x):
        with tf.GradientTape() as tape:
            noise = tf.random.stateless_uniform(tf.shape(x), state, dtype=tf.float64)
            state.assign_add([0, 1])
            loss = tf.reduce_mean((noise * x) @ kernel)
        _descend(tape, loss, [kernel])
        return noise

    first = tf.random.stateless_uniform([6, 6], [1, 2], dtype=tf.float64)
    noise = microbatch_step(step, 4)(_X).numpy()
    np.testing.assert_array_equal(noise[:6], first)
    assert len(np.unique(noise)) == noise.size
    np.testing.assert_array_equal(state, [1, 3])


def test_a_write_that_the_forward_pass_waits_for_is_made_once():
    kernel, counter = _weights(6, 3), tf.Variable(0)

    def step(x):
        counted = counter.assign_add(1, read_value=False)
        with tf.GradientTape() as tape, tf.control_dependencies([counted]):
            loss = tf.reduce_mean((tf.identity(x) @ kernel) ** 2)
        _descend(tape, loss, [kernel])
        return counter

    step = microbatch_step(step, 4)
    assert [int(step(_X)) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("is_in_function", [False, True])
def test_a_table_that_a_step_writes_is_read_afterwards(is_in_function):
    kernel = _weights(6, 3)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float64, 0.0)

    def count(key):
        table.insert(key, table.lookup(key) + 1)

    def make():
        kernel.assign(tf.ones_like(kernel))
        table.insert(np.int64(1), np.float64(0))

        def step(x):
            key = tf.constant(1, tf.int64)
            (tf.function(count) if is_in_function else count)(key)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ kernel) ** 2) * table.lookup(key)
            _descend(tape, loss, [kernel])
            return loss

        return step, [kernel], (_X,)

    for one, other in zip(
        _run(make, tf.function),
        _run(make, lambda step: microbatch_step(step, 4)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=_LIMIT)


def _noisy(generator, kernel):
    def step(x):
        with tf.GradientTape() as tape:
            noise = generator.uniform(tf.shape(x), dtype=tf.float64)
            loss = tf.reduce_mean((noise * x) @ kernel)
        _descend(tape, loss, [kernel])
        return noise

    return step


def test_a_generator_draws_numbers_for_each_micro_batch():
    step = _noisy(tf.random.Generator.from_seed(1), _weights(6, 3))
    noise = microbatch_step(step, 4)(_X).numpy()
    assert len(np.unique(noise)) == noise.size


def test_draws_from_a_variables_seeds_are_others_in_each_micro_batch():
    """As layers of Keras 3 draw."""
    kernel, seeds = _weights(6, 3), tf.Variable([1, 2])

    def step(x):
        noise = tf.random.stateless_normal(tf.shape(x), seeds, dtype=tf.float64)
        seeds.assign_add([1, 0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(((x + noise) @ kernel) ** 2)
        _descend(tape, loss, [kernel])
        return noise

    noise = microbatch_step(step, 4)(_X).numpy()
    assert len(np.unique(noise)) == noise.size


def test_a_generator_draws_once_for_each_batch_what_all_examples_share(caplog):
    def make():
        generator, kernel = tf.random.Generator.from_seed(1), _weights(6, 3)

        def step(x):
            with tf.GradientTape() as tape:
                seeds = generator.make_seeds(1)[:, 0]
                factor = tf.random.stateless_uniform([], seeds, dtype=tf.float64)
                moved = x * factor + generator.normal([6], dtype=tf.float64)
                loss = tf.reduce_mean(tf.tanh(moved @ kernel))
            _descend(tape, loss, [kernel])
            return loss

        return step, [kernel, generator.state], (_X,)

    for one, other in zip(
        _run(make, tf.function),
        _run(make, lambda step: microbatch_step(step, 4)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=_LIMIT)
    assert "on the whole batch" not in caplog.text


def test_a_generator_draws_the_same_in_a_batch_that_is_retried(memory):
    def train(micro_batches):
        generator, kernel = tf.random.Generator.from_seed(1), _weights(6, 3)
        step = microbatch_step(_noisy(generator, kernel), micro_batches)
        return step(_X), kernel, generator.state

    expected = train(2)
    memory.after, memory.done = {0}, 0  # after the whole batch has moved the generator
    for one, other in zip(train("auto"), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert memory.count.value == 2


def test_a_part_of_unknown_rank_is_told_of_set_shape_where_the_rank_is_read():
    @tf.function(input_signature=[tf.TensorSpec(None, tf.float64)])
    def step(x):
        return tf.reduce_sum(x, axis=len(x.shape) - 1)

    with pytest.raises(
        ValueError, match="(?s)static rank where code .*tensor.set_shape"
    ):
        microbatch_step(step, 2)(_X)


def _two_updates(noise_of):
    """Two updates of two passes each, which need the same random numbers."""
    kernels, network = _network(6, 3)
    others, other = _network(6, 3)

    def step(x):
        noise = noise_of(x)
        for variables, z_of in ((kernels, network), (others, other)):
            with tf.GradientTape() as tape:
                z = network(noise) * z_of(x)
                loss = _crossentropy(tf.range(tf.shape(x)[0]), z @ tf.transpose(z))
            _descend(tape, loss, variables)
        return noise

    return step, [*kernels, *others]


def test_a_generator_gives_all_passes_of_a_step_the_same_numbers():
    generator = tf.random.Generator.from_seed(1)
    step, variables = _two_updates(
        lambda x: generator.uniform(tf.shape(x), dtype=tf.float64)
    )
    ours, state = microbatch_step(step, 4), generator.state.numpy()
    noise = [ours(_X).numpy() for _ in range(2)]
    assert len(np.unique(noise)) == 2 * _X.size
    assert not np.array_equal(generator.state, state)
    again = iter(noise)
    whole, expected = _two_updates(lambda x: next(again))
    [whole(_X) for _ in noise]
    for one, other in zip(variables, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=_LIMIT, atol=_LIMIT)


class _Trainer:
    def __init__(self):
        self.kernel, self.seen = _weights(6, 3), []

    def step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ self.kernel) ** 2)
        _descend(tape, loss, [self.kernel])
        if loss > 0:
            tf.py_function(lambda: self.seen.append(1), [], [])
        return loss

    @functools.partial(microbatch_step, micro_batches=4)
    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float64)])
    def decorated(self, x):
        assert x.shape[0] is None
        return self.step(x)

    def __call__(self, x):
        return self.step(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda trainer: microbatch_step(trainer.step, 4),
        lambda trainer: microbatch_step(trainer, 4),
        lambda trainer: microbatch_step(functools.partial(_Trainer.step, trainer), 4),
        lambda trainer: trainer.decorated,
    ],
)
def test_a_step_may_be_anything_that_can_be_called(make):
    trainer, other = _Trainer(), _Trainer()
    step = make(trainer)
    make(other)(_X)
    step(_X), step(_X)
    assert (trainer.seen, other.seen) == ([1, 1], [1])


def test_a_batch_that_fails_is_undone_at_once():
    generator, is_failing = tf.random.Generator.from_seed(1), tf.Variable(True)
    kernel, state = _weights(6, 3), generator.state.numpy()

    def step(x):
        noise = tf.cond(  # where each micro-batch moves the state
            is_failing | True,
            lambda: generator.normal(tf.shape(x), dtype=tf.float64),
            lambda: x,
        )
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(((x + noise) @ kernel) ** 2)
        _descend(tape, loss, [kernel])
        tf.debugging.Assert(~is_failing, ["failed"])

    step = microbatch_step(step, 4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="failed"):
        step(_X)
    np.testing.assert_array_equal(generator.state, state)
    generator.normal([7])  # by another user
    is_failing.assign(False)
    state = generator.state.numpy()
    step(_X)
    assert generator.state[0] > state[0]


def test_a_step_without_autograph_has_none():
    @tf.function(autograph=False)
    def step(x):
        return 1 if tf.reduce_sum(x) > 0 else 2

    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        microbatch_step(step, 4)(_X)


def test_two_lists_that_are_joined_need_not_be_as_long():
    table = _weights(4, 3)
    one, other = (
        tf.sparse.from_dense(np.where(_IDS % number, 1 + _IDS % 3, 0))
        for number in (2, 5)
    )

    def step(one, other):
        with tf.GradientTape() as tape:
            ids = tf.concat([one.values, other.values], 0)
            rows = tf.nn.embedding_lookup_sparse(table, one, None, combiner="sum")
            loss = tf.reduce_mean(rows**2) + tf.reduce_sum(tf.gather(table, ids) ** 2)
        return tf.convert_to_tensor(tape.gradient(loss, table))

    expected = tf.function(step)(one, other)
    np.testing.assert_allclose(
        microbatch_step(step, 4)(one, other), expected, rtol=1e-12
    )


def test_a_row_of_another_example_ends_also_a_step_that_trains_nothing():
    def step(x):
        flat, numbers = tf.reshape(x, [-1]), tf.range(tf.shape(x)[0])
        return tf.gather(flat, tf.cast(x[:, 0], tf.int32) + 6 * numbers)

    x = np.zeros([23, 6])
    step = microbatch_step(step, 4)
    np.testing.assert_array_equal(step(x), x[:, 0])
    x[0, 0] = 7  # of the second example
    with pytest.raises(ValueError, match="only look up values of its own"):
        step(x)


def _gradient(kernel, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ kernel) ** 2)
    return tape.gradient(loss, kernel)


def _of_gradient(kernel, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(_gradient(kernel, x) ** 2)
    return tape.gradient(loss, kernel)


def _forward_over_backward(kernel, x):
    with tf.autodiff.ForwardAccumulator(kernel, tf.ones_like(kernel)) as accumulator:
        gradient = _gradient(kernel, x)
    return accumulator.jvp(gradient, unconnected_gradients="zero")


def _of_old_rows(kernel, x):
    rows = tf.gather(kernel, tf.cast(x[:, 0] > 0, tf.int32))
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((rows + x @ kernel) ** 2)
        gradient = tape.gradient(loss, kernel)
        kernel.assign_sub(gradient)
    return gradient


@tf.function
def _dropped(x):
    return tf.nn.dropout(x, 0.5)


def _of_new_rows(kernel, x):
    rows = _dropped(x)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((rows @ kernel) ** 2)
        gradient = tape.gradient(loss, kernel)
        kernel.assign_sub(gradient)
    return gradient


@pytest.mark.parametrize(
    ("gradient_of", "sentence"),
    [
        (tf.function(_gradient), "made inside of tf.cond, tf.while_loop or a function"),
        (
            lambda kernel, x: tf.cond(
                x[0, 0] > 0, lambda: _gradient(kernel, x), lambda: tf.identity(kernel)
            ),
            "made inside of tf.cond, tf.while_loop or a function",
        ),
        (_of_gradient, "must not contain gradients with .* gradient of Variable:0"),
        (_forward_over_backward, "ForwardAccumulator.jvp, must not contain gradients"),
        (_of_old_rows, "A variable that examples look up must not change before"),
        (_of_new_rows, "computed in each phase, so their operations must give one"),
    ],
)
def test_a_gradient_that_no_micro_batches_have_is_refused(gradient_of, sentence):
    kernel = _weights(6, 3)
    step = microbatch_step(lambda x: kernel.assign_sub(gradient_of(kernel, x)), 2)
    with pytest.raises(ValueError, match=sentence):
        step(_X)


def test_a_function_of_the_loss_that_writes_a_summary_is_refused(tmp_path):
    kernel, writer = _weights(6, 3), tf.summary.create_file_writer(str(tmp_path))

    @tf.function
    def network(x):
        tf.summary.scalar("mean", tf.reduce_mean(x), step=0)
        return x @ kernel

    def step(x):
        with writer.as_default(), tf.GradientTape() as tape:
            loss = tf.reduce_mean(network(x) ** 2)
        return tape.gradient(loss, kernel)

    with pytest.raises(ValueError, match="must change nothing.*with .*WriteSummary"):
        microbatch_step(step, 2)(_X)


def test_a_gradient_that_was_traced_before_is_that_of_the_batch(caplog):
    kernel, before = _weights(6, 3), _weights(6, 3)
    traced = tf.function(lambda x: _gradient(kernel, x)).get_concrete_function(
        tf.TensorSpec([None, 6], tf.float64)
    )
    microbatch_step(lambda x: kernel.assign_sub(traced(x)), 4)(_X)
    before.assign_sub(_gradient(before, tf.constant(_X)))
    np.testing.assert_allclose(kernel, before, rtol=_LIMIT)


def _ragged():
    """Returns ragged words, with empty rows, and micro-batches of no words."""
    rows = [[3, 1], [], [2, 2, 5, 10], [7], *[[]] * 9, [1, 9], [4]]
    rows += [[0, n] for n in range(8)]
    return tf.ragged.constant(rows, dtype=tf.int64, ragged_rank=1)


def _of_ragged(read, ids):
    """Looks up words of a ragged part; `read` makes rows of them."""
    kernels = _weights(11, 5), _weights(5, 2)

    def step(ids):
        with tf.GradientTape() as tape:
            words = tf.nn.embedding_lookup(kernels[0], ids)
            hidden = tf.tanh(read(words.with_flat_values(tf.tanh(words.flat_values))))
            loss = tf.reduce_mean((hidden @ kernels[1]) ** 2)
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, kernels)]

    return step, (ids,)


def _by_place(words):
    """Returns words times their place in the row, over its length."""
    numbers = tf.ragged.range(words.row_lengths())
    factors = tf.cast(numbers.values, words.dtype)[:, None]
    lengths = tf.repeat(words.row_lengths(), words.row_lengths())
    return words.with_values(
        words.values * factors / tf.cast(lengths, words.dtype)[:, None]
    )


@pytest.mark.parametrize(
    "read",
    [
        lambda words: tf.reduce_sum(words, 1),
        lambda words: words.to_tensor(shape=[None, 3, 5]),
        lambda words: (
            tf.reduce_sum(words[:, -2:], 1) + tf.reduce_sum(_by_place(words), 1)
        ),
    ],
)
def test_layers_behind_a_ragged_part_of_the_batch_are_split(caplog, read):
    caplog.set_level("DEBUG", "tensorflow.estimator_accum")
    step, arguments = _of_ragged(read, _ragged())
    received = microbatch_step(step, 5)(*arguments)
    for one, other in zip(received, tf.function(step)(*arguments), strict=True):
        np.testing.assert_allclose(one, other, rtol=_LIMIT, atol=_LIMIT)
    assert re.search(r"micro-batches: 0\.\d% of the activations", caplog.text)


def _two_ragged(ids, marks):
    kernel = _weights(11, 5)

    def step(ids, marks):
        with tf.GradientTape() as tape:
            words = tf.nn.embedding_lookup(kernel, ids.values)
            words *= tf.cast(marks.values, tf.float64)[:, None]
            rows = tf.reduce_sum(ids.with_values(words), 1)
            loss = tf.reduce_mean(rows**2)
        return tf.convert_to_tensor(tape.gradient(loss, kernel))

    return step, (ids, marks)


def test_two_ragged_parts_of_a_batch_are_combined_entry_by_entry():
    words = _ragged()
    step, batch = _two_ragged(words, words.with_values(words.values + 1))
    wanted = tf.function(step)(*batch)
    np.testing.assert_allclose(microbatch_step(step, 5)(*batch), wanted, rtol=_LIMIT)
    lengths = tf.tensor_scatter_nd_update(words.row_lengths(), [[0], [1]], [0, 2])
    others = tf.RaggedTensor.from_row_lengths(words.values, lengths)
    with pytest.raises(ValueError, match="must have as many entries of each example"):
        microbatch_step(step, 5)(words, others)


def _behind_a_mean():
    kernels = _weights(6, 5), _weights(5, 2)

    @tf.function
    def network(x):
        return tf.tanh((x - tf.reduce_mean(x, 0)) @ kernels[0]) @ kernels[1]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(network(x) ** 2)
        return tape.gradient(loss, kernels)

    return step, (_X,)


def _behind_python(number, width=50):
    """Reads `number` results of Python, in a layer as wide as all others or less."""
    kernels = _weights(6, 50), _weights(50, width)

    def of_python(x):
        y = tf.numpy_function(np.tanh, [x], tf.float64, stateful=False)
        return tf.ensure_shape(y, [None, 6])

    def step(x):
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x @ kernels[0]) @ kernels[1]
            values = tf.add_n([of_python(x) for _ in range(number)])
            if width == 50:
                values = tf.tanh(tf.tanh(values @ kernels[0]))
            loss = tf.reduce_mean((hidden + values[:, :width]) ** 2)
        return tape.gradient(loss, kernels)

    return step, (_X,)


def test_a_small_share_of_layers_that_are_not_split_is_no_warning(caplog):
    caplog.set_level("INFO", "tensorflow.estimator_accum")
    step, arguments = _behind_python(1, width=2)
    microbatch_step(step, 4)(*arguments)
    (record,) = [r for r in caplog.records if "of the activations" in r.getMessage()]
    assert record.levelname == "INFO"
    said = (
        r"micro-batches: \d+% of the activations are computed on the whole batch: see "
    )
    assert re.match(
        said + r"PyFuncStateless of type PyFuncStateless", record.getMessage()
    )


def _fused_normalization():
    scale = tf.Variable(tf.ones(6))

    def step(x):
        with tf.GradientTape() as tape:
            x = scale * tf.cast(x, tf.float32)[:, None, None]
            rows, *_ = tf.compat.v1.nn.fused_batch_norm(x, scale, tf.zeros(6))
            loss = tf.reduce_mean(tf.tanh(tf.tanh(tf.tanh(tf.tanh(rows)))))
        return tape.gradient(loss, scale)

    return step, (_X,)


def _centered():
    """Has the mean and variance of examples, but no averages of them."""
    kernel = _weights(6, 5)

    def step(x):
        with tf.GradientTape() as tape:
            rows = x @ kernel
            mean, variance = tf.nn.moments(rows, [0])
            loss = tf.reduce_mean(tf.tanh((rows - mean) / variance))
        return tape.gradient(loss, kernel)

    return step, (_X,)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (
            lambda: _statistics()[::2],
            r'moments/mean of .*\)\. batch_norm="micro_batch" splits moments/mean: .* own',
        ),
        (
            lambda: _behind_python(5),
            r"_2 .*\) and 2 others\. If each row of \S+_4 .* estimator_accum\.per_example\("
            + r"\.\.\.\) .* see docs/errors\.md, Micro-batches save no memory$",
        ),
        (
            _fused_normalization,
            r'FusedBatchNormV3 .* batch_norm="micro_batch" splits FusedBatchNormV3: each',
        ),
        (_behind_a_mean, r"PartitionedCall \(it combines the examples\)$"),
        (_centered, r"mean of type Mean \(it combines the examples\)$"),
        (
            lambda: _of_ragged(lambda words: words.to_tensor(), _ragged()),
            r"RaggedTensorToTensor \(it is as wide as the longest row\)$",
        ),
    ],
)
def test_a_warning_tells_the_share_of_layers_that_are_not_split(caplog, make, cause):
    step, arguments = make()
    microbatch_step(step, 4)(*arguments)
    said = r"\d\d% of the activations are computed on the whole batch, .*"
    assert re.search(said + cause, caplog.text, re.MULTILINE)


def _chosen_words(number):
    """A masked language model."""
    kernels = _weights(6, 5), _weights(5, 11)

    def step(x, ids):
        with tf.GradientTape() as tape:
            chosen = ids % 3 == 1
            hidden = tf.tanh(x @ kernels[0])[:, None] + tf.ones([3, 1], x.dtype)
            hidden = tf.boolean_mask(hidden, chosen)
            loss = _crossentropy(tf.boolean_mask(ids, chosen), hidden @ kernels[1])
            loss /= tf.cast(tf.shape(hidden)[0], x.dtype)
        return loss, tape.gradient(loss, kernels)

    return microbatch_step(step, number) if number else step


def test_layers_behind_chosen_words_are_split(caplog):
    caplog.set_level("DEBUG", "tensorflow.estimator_accum")
    results, expected = (
        tf.nest.flatten(_chosen_words(number)(_X, _IDS)) for number in (4, None)
    )
    share, *_ = re.findall(r"micro-batches: (\S+)% of the activations", caplog.text)
    assert float(share) < 1
    assert "the model runs once" in caplog.text
    for ours, whole in zip(results, expected, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-12, atol=1e-14)


def test_entries_of_a_sparse_tensor_may_be_in_any_order():
    kernel, places = _weights(1, 1), np.argwhere(_IDS > 4)
    shuffled = np.random.RandomState(0).permutation(places)
    words = tf.SparseTensor(shuffled, 1.0 * shuffled[:, 0], _IDS.shape)

    def step(words):
        predicted = tf.tanh(words.values[:, None] @ kernel)[:, 0]
        numbers = tf.range(tf.size(predicted, tf.int64))
        return tf.reduce_sum(predicted * tf.cast(numbers, tf.float64))

    for number in (1, 4):
        loss = microbatch_step(step, number)(words)
        np.testing.assert_allclose(loss, tf.function(step)(words), rtol=1e-12)


@pytest.mark.parametrize("way", [None, "operation", "generator", "variable"])
def test_views_that_are_joined_are_split_until_they_are_combined(caplog, way):
    caplog.set_level("DEBUG", "tensorflow.estimator_accum")
    kernels = _weights(6, 400), _weights(400, 3)
    generator, seed = tf.random.Generator.from_seed(1), tf.Variable([1, 2])
    draw = {
        None: lambda shape: 1.0,
        "operation": tf.random.uniform,
        "generator": generator.uniform,
        "variable": lambda shape: tf.random.stateless_uniform(shape, seed),
    }[way]

    def step(x):
        with tf.GradientTape() as tape:
            hidden, n = tf.tanh(tf.concat([x, -x], 0) @ kernels[0]), tf.shape(x)[0]
            hidden = tf.where(draw(tf.shape(hidden)) < 0.5, 0.0 * hidden, 2 * hidden)
            z = tf.math.l2_normalize(hidden @ kernels[1], 1)
            logits = 5 * z @ tf.transpose(z) - 1e9 * tf.eye(2 * n, dtype=tf.float64)
            places = tf.concat([tf.range(n) + n, tf.range(n)], 0)
            loss = _crossentropy(places, logits)
        return loss, tape.gradient(loss, kernels)

    results = microbatch_step(step, 4)(_X)
    share, *_ = re.findall(r"micro-batches: (\S+)% of the activations", caplog.text)
    assert float(share) < 15  # the logits
    assert re.search("see transpose of type Transpose .*, concat_1", caplog.text)
    if way is None:
        for ours, whole in zip(*map(tf.nest.flatten, (results, step(_X))), strict=True):
            np.testing.assert_allclose(ours, whole, rtol=1e-12, atol=1e-14)


def test_no_step_is_the_window_of_a_train_op_that_is_made_later():
    kernel = _weights(6, 3)
    microbatch_step(lambda x: _gradient(kernel, x), 4)(_X)
    assert current_batch() is None


def test_several_threads_may_call_a_step():
    total, kernel = tf.Variable(np.float64(0)), _weights(6, 3)

    def step(x):
        gradient = _gradient(kernel, x)
        total.assign_add(tf.reduce_sum(x))
        return gradient

    step = microbatch_step(step, 4)
    expected = step(_X)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for gradient in pool.map(step, [_X] * 8):
            np.testing.assert_array_equal(gradient, expected)
    np.testing.assert_allclose(total, 9 * _X.sum(), rtol=1e-13)


@pytest.mark.parametrize(
    ("make", "runs"),
    [
        (
            _contrast,
            "4 micro-batches; the model runs twice: its loss or a layer compares examples",
        ),
        (
            _critic_and_generator,
            "4 micro-batches; the model runs 3 times for 3 updates",
        ),
    ],
)
def test_the_first_step_says_how_often_and_why_the_model_runs(capsys, make, runs):
    step, _, arguments = make()
    microbatch_step(step, 4)(*arguments)
    line = f"at step 1 of {step.__name__}: 23 = at most 6 examples x {runs}"
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("micro_batches", "rows", "split"),
    [("auto", 23, "23 examples"), (4, 1, "1 example")],
)
def test_a_batch_of_one_micro_batch_is_said_to_be_unsplit(
    capsys, micro_batches, rows, split
):
    kernel = _weights(6, 3)
    microbatch_step(lambda x: _gradient(kernel, x), micro_batches)(_X[:rows])
    said = f"at step 1 of <lambda>: {rows} = {split} x 1 micro-batch; the model runs as"
    assert said in capsys.readouterr().err


def test_a_first_batch_of_one_example_does_not_hide_how_others_are_split(capsys):
    kernel = _weights(6, 3)
    step = microbatch_step(functools.partial(_gradient, kernel), 4)
    for size in (1, 23, 1, 23):
        step(_X[:size])
    lines = re.findall("at step (.*) of _gradient: (.*) = ", capsys.readouterr().err)
    assert lines == [("1", "1"), ("2", "23")]


@pytest.mark.parametrize(("secs", "number"), [(-1, 2), (3600, 0)])
def test_each_trace_that_takes_long_is_said(capsys, monkeypatch, secs, number):
    monkeypatch.setattr("estimator_accum.microbatch.step._LONG_SECS", secs)
    kernel = _weights(6, 3)
    step = microbatch_step(lambda x, factor: factor * _gradient(kernel, x), 2)
    for factor in (1.0, 1.0, 2.0):  # two signatures
        step(_X, factor)
    assert capsys.readouterr().err.count("the step was traced in") == number


def test_a_step_that_each_batch_traces_anew_is_said_to_be(caplog):
    step = microbatch_step(lambda x, rate: rate * x, 2)
    for rate in range(4):
        step(_X, float(rate))
    assert "was traced for" not in caplog.text
    for rate in range(4, 6):
        step(_X, float(rate))
    assert caplog.text.count("the step was traced for 5 of 5 batches") == 1


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: 5,
            "Received: 5. Pass the function that computes gradients and .* them",
        ),
        (lambda: _Trainer, "Received: <class .* Pass the function that computes grad"),
        (lambda: tf.keras.layers.Dense(1), "Received: <.* For `fit` there is estim"),
        (
            lambda: tf.keras.Sequential(),
            "Received: <.* For `fit` there is estimator_ac",
        ),
        (
            lambda: tf.function(tf.keras.Sequential()),
            "Received: <.* For `fit` there is estimator_ac",
        ),
        (
            lambda: tf.function(
                functools.partial(tf.keras.Sequential(), training=True)
            ),
            "Received: .* For `fit` there is estimator_ac",
        ),
    ],
)
def test_anything_but_a_function_of_a_batch_is_refused(make, sentence):
    with pytest.raises(TypeError, match=f"`step` must be a function .* {sentence}"):
        microbatch_step(make(), 2)


def test_an_object_of_keras_that_trains_where_it_is_called_is_a_step():
    class Trainer(tf.keras.Model):
        def __call__(self, x):
            return _gradient(kernel, x)

    kernel = _weights(6, 3)
    whole = _gradient(kernel, _X)
    np.testing.assert_allclose(microbatch_step(Trainer(), 4)(_X), whole, rtol=1e-12)


def test_a_step_that_xla_compiles_is_said_not_to_be(caplog):
    step = tf.function(lambda x: 2 * x, jit_compile=True)
    microbatch_step(step, 1)
    assert not caplog.messages
    microbatch_step(step, 2)
    assert "XLA does not compile a step in micro-batches" in caplog.text


def test_a_step_may_run_its_replicas():
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    assert of_replicas.difference(strategy) < _LIMIT


def test_a_replica_that_has_a_thread_of_its_own_has_seeds_of_its_micro_batches():
    strategy = tf.distribute.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        kernel = tf.Variable(np.ones((6, 1)))

    def replica(x):
        seed = micro_batch_seed("noise")
        noise = tf.random.stateless_normal(tf.shape(x), seed, dtype=tf.float64)
        kernel.assign_sub(_gradient(kernel, x + noise))
        return noise

    with strategy.scope():
        step = microbatch_step(lambda x: strategy.run(replica, (x,)), 2)
        noise = step(_X).numpy()
    assert len(np.unique(noise)) == noise.size


def test_a_step_inside_of_strategy_run_is_refused():
    step = microbatch_step(lambda x: x, 2)
    with pytest.raises(RuntimeError, match="Call strategy.run inside of the step"):
        tf.distribute.MirroredStrategy(["cpu:0"]).run(step, (_X,))
    tf.distribute.OneDeviceStrategy("/cpu:0").run(step, (_X,))


def test_gradients_of_the_scope_of_a_strategy_are_refused():
    step, _, arguments = _statistics()
    refused = pytest.raises(ValueError, match="must be computed in a replica")
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope(), refused:
        microbatch_step(step, 4)(*arguments)


@pytest.mark.slow
def test_each_replica_has_micro_batches_of_its_own(tmp_path):
    report = strategy_program.result("step", "mirrored", tmp_path)
    assert report["difference"] < _LIMIT
    sentence = "Received: number of batches 1, number of replicas 2"
    assert sentence in report["refusal"]


_OF_REPLICAS = [
    _chain_of_noise,
    _contrast,
    _predictor_and_corrector,
    _adversarial_words,
    _both_losses_first,
    _normalized_targets,
    _masked_words,
    _codebook,
    _two_views,
    _statistics,
]


@pytest.mark.daily
@pytest.mark.slow
def test_steps_in_replicas_train_as_on_their_batches_at_once(tmp_path):
    names = [make.__name__ for make in _OF_REPLICAS]
    report = strategy_program.result("steps", "mirrored", tmp_path, *names)
    assert [*report] == names
    assert max(report.values()) < 10 * _LIMIT, report


def _exact_step():
    """Two updates by sums that floating-point numbers hold exactly, in any order."""
    critic, generator = (tf.Variable(np.ones((2, 2)) * n) for n in (1, 2))
    counter = tf.Variable(0)

    def step(x):
        counter.assign_add(1)
        for variable, other in ((critic, generator), (generator, critic)):
            with tf.GradientTape() as tape:
                rows = tf.cast(x, tf.float64) @ variable
                loss = tf.reduce_sum(rows) + tf.reduce_sum(tf.transpose(rows) @ rows)
                loss += tf.reduce_sum(rows @ other)
            variable.assign_sub(2.0**-9 * tf.round(tape.gradient(loss, variable)))
        return loss

    return step, [critic, generator, counter], (np.arange(32).reshape(16, 2) % 5 - 2,)


def test_the_spot_check_feeds_values_of_functions_as_they_are(monkeypatch):
    words, kernel = _weights(7, 4), _weights(4, 1)
    run, returned, through_numpy = executors.Functions.run, set(), set()

    def noting(functions, fetches, feeds=None):
        feeds = feeds or {}
        arrays = {n for n, value in feeds.items() if isinstance(value, np.ndarray)}
        through_numpy.update(arrays & returned)
        tensors = tf.nest.flatten(fetches, expand_composites=True)
        returned.update(tensor.name for tensor in tensors)
        if isinstance(fetches, dict):
            returned.update(fetches)  # of the spot check, the examples by name
        return run(functions, fetches, feeds)

    monkeypatch.setattr(executors.Functions, "run", noting)

    def step(ids):
        with tf.GradientTape() as tape:
            rows = tf.nn.dropout(tf.gather(words, ids), 0.5) @ kernel
            loss = tf.reduce_logsumexp(rows)
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))

    microbatch_step(step, 3)(tf.range(16) % 7)
    assert returned
    assert not through_numpy


def test_a_step_that_runs_out_of_memory_anywhere_trains_bit_by_bit(memory):
    step, variables, arguments = _exact_step()
    begun = [variable.numpy() for variable in variables]
    expected = [tf.function(step)(*arguments), *(v.numpy() for v in variables)]
    ours, count = microbatch_step(step), 0
    for number in itertools.count():
        if count == 100:
            break
        for variable, value in zip(variables, begun, strict=True):
            variable.assign(value)
        memory.begin(2 + number % 2, {number // 2 % 15})
        values = [ours(*arguments), *variables]
        count += memory.count.value > 3
        assert count > number // 2  # at least each second time
        for one, other in zip(values, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_only_the_last_signature_keeps_a_batch_and_sums():
    kernel = _weights(6, 3)

    def step(x):
        with tf.GradientTape() as tape:
            rows = tf.cast(x, tf.float64) @ kernel
            loss = tf.reduce_mean((rows - tf.reduce_mean(rows, 0)) ** 2)
        _descend(tape, loss, [kernel])

    ours, batches = microbatch_step(step, 2), [_X, _X.astype(np.float32)]
    for last in (0, 1, 0):
        ours(batches[last])
        is_held = []
        for trace in ours._traces.values():
            batch, rows = (
                tf.raw_ops.VarHandleOp(**slot)
                for slot in executors.slots_of(trace._graph)
                if slot["shared_name"].endswith((b"component_0", b"outputs"))
            )
            is_held.append(bool(tf.raw_ops.VarIsInitializedOp(resource=batch)))
            assert tf.raw_ops.VarIsInitializedOp(resource=rows) == is_held[-1]
            (total,) = trace._phases[0].replicas[0].total.handles
            (handle,) = (out for out, t in trace._graph.captures if t is total)
            total = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64)
            assert (total.shape == [6, 3]) == is_held[-1]
        assert [i for i, held in enumerate(is_held) if held] == [last]


@pytest.mark.parametrize("is_general", [False, True])
def test_a_model_that_is_an_argument_lives_no_longer_than_outside(is_general):
    class Model:
        def __init__(self):
            self.kernel = _weights(6, 3)

    def step(model, x):
        return _gradient(model.kernel, x)

    if is_general:
        step = tf.function(step, reduce_retracing=True)
    ours, gone = microbatch_step(step, 2), []
    for _ in range(2):
        model = Model()
        gone.append(weakref.ref(model))
        for _ in range(2):
            ours(model, _X)
    assert len(ours._traces) == 1
    assert len(ours._general) == is_general
    gc.collect()
    assert [model() is None for model in gone] == [True, False]


def test_slots_live_as_long_as_the_step():
    step, _, arguments = _contrast()
    ours = microbatch_step(step, 2)
    ours(*arguments)
    (trace,) = ours._traces.values()
    names = [slot["shared_name"] for slot in executors.slots_of(trace._graph)]
    del trace, ours, step
    gc.collect()
    microbatch_step(lambda x: x, 2)(_X)  # the next call frees them
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=None, shared_name=names[0])
    assert not tf.raw_ops.VarIsInitializedOp(resource=handle)


def test_a_device_that_cannot_have_a_slot_is_passed_over(monkeypatch):
    slot = {"dtype": tf.float64, "shape": [], "shared_name": "slot_of_one_device"}
    handle = tf.raw_ops.VarHandleOp(**slot)
    tf.raw_ops.AssignVariableOp(resource=handle, value=np.float64(1))
    devices = {"CPU": "CPU:0", "GPU": "GPU:7"}
    list_devices = {k: [types.SimpleNamespace(name=n)] for k, n in devices.items()}
    monkeypatch.setattr(tf.config, "list_logical_devices", list_devices.get)
    monkeypatch.setattr(executors, "UNUSED", [slot])
    is_soft = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(False)
    try:
        executors.destroy_unused_slots()
    finally:
        tf.config.set_soft_device_placement(is_soft)
    assert not tf.raw_ops.VarIsInitializedOp(resource=handle)


def test_two_threads_may_free_slots(monkeypatch):
    class Emptied(list):
        def __bool__(self):  # before another thread takes the last one
            return True

    slot = {"dtype": tf.float64, "shape": [], "shared_name": "slot_of_two_threads"}
    handle = tf.raw_ops.VarHandleOp(**slot)
    tf.raw_ops.AssignVariableOp(resource=handle, value=np.float64(1))
    monkeypatch.setattr(executors, "UNUSED", Emptied([slot]))
    executors.destroy_unused_slots()
    assert not tf.raw_ops.VarIsInitializedOp(resource=handle)


def _static_sizes():
    """Reads the number of examples in each way that Python has."""
    kernels, network = _network(6, 3)

    def step(x, labels):
        with tf.GradientTape() as tape:
            z = network(x + tf.zeros(x.shape, tf.float64))
            z.set_shape(x.shape[:1] + [3])
            loss = tf.reduce_sum(z * tf.ones([z.shape[0], 3], tf.float64))
            if x.shape[0] == 23 and z.get_shape().as_list() == [23, 3]:
                loss += _crossentropy(labels, z) / (x.shape[0] or 1)
            for i in range(len(labels)):
                loss += z[i, 0] * i
            _, width = tf.TensorSpec.from_tensor(z).shape
            loss *= tf.get_static_value(tf.shape(z))[0] / x.shape.num_elements() * width
        _descend(tape, loss, kernels, 1e-3)
        return loss, x.shape.rank, tf.boolean_mask(z, labels > 0).shape[0] or -1

    return step, kernels, (_X, _CLASSES)


def test_static_sizes_are_those_of_the_batch():
    whole = _run(_static_sizes, tf.function)
    # The last one of 12 micro-batches is one example.
    ours = _run(_static_sizes, lambda step: microbatch_step(step, 12))
    for one, other in zip(whole, ours, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13, atol=_LIMIT)


_TABLE, _STEPS_OF_TIME = np.random.RandomState(1).randn(2, 23, 6)


def _values_of_its_size(combine=None, is_trained=False):
    """Scales each example at random, as stochastic depth, and makes other values."""
    kernels, network = _network(10, 23)
    state, deeper = tf.Variable([1, 2]), _weights(23, 23)
    table = tf.Variable(_TABLE) if is_trained else tf.constant(_TABLE)
    trained = [*kernels, deeper, *([table] if is_trained else [])]

    def step(x):
        n = x.shape[0]
        with tf.GradientTape() as tape:
            x = tf.concat([x + table, tf.zeros([n, 4], tf.float64)], 1)
            h = tf.tanh(network(x)) * _TABLE[:, 1]  # of as many units as examples
            kept = 0.6 + tf.random.stateless_uniform([n, 1], state, dtype=tf.float64)
            h += (h @ deeper) / 0.6 * tf.floor(kept)
            h = tf.where(_TABLE[:, :1] > 0, h, 2 * h)
            h = tf.transpose(tf.transpose(h) + tf.stack([kept[:, 0]] * 23))
            times = h[:, :, None] + _STEPS_OF_TIME  # as many as examples
            pairs = tf.repeat(h, 2, 0) * tf.ones([2 * n, 1], tf.float64)
            loss = tf.reduce_mean(tf.reduce_sum(times**2, [1, 2]))
            loss += tf.reduce_mean(pairs**2)
            if combine is not None:
                loss += combine(h)
        state.assign_add([0, 1])
        _descend(tape, loss, trained, 1e-3)
        return loss, h, kept

    return step, [*trained, state], (_X,)


def _assert_equal_to_the_unsplit(make, number):
    whole = _run(make, tf.function)
    ours = _run(make, lambda step: microbatch_step(step, number))
    for one, other in zip(whole, ours, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_values_of_the_size_of_the_batch_are_all_of_it_where_examples_are_combined():
    def contrast(h):
        logits = h @ tf.transpose(h) - 3 * tf.eye(23, dtype=tf.float64)
        return _crossentropy(tf.range(23), logits * (1 - tf.eye(23, dtype=tf.float64)))

    make = functools.partial(_values_of_its_size, contrast)
    _assert_equal_to_the_unsplit(make, 4)


def _reshapes_of_its_size(mixes=False):
    """Reads the batch's size for heads, tokens, time-major steps and a class token."""
    kernels, network = _network(10, 23)
    token, inner = _weights(1, 6), _weights(3, 3)
    trained = [*kernels, token, inner]

    def step(x):
        n = x.shape[0]
        with tf.GradientTape() as tape:
            x = tf.concat([x, tf.tile(token[:, :2], [n, 1])], 1)
            x = tf.concat([x, tf.broadcast_to(token[:, :2], [n, 2])], 1)
            h = tf.tanh(network(x))  # of as many units as examples
            inputs = tf.reshape(x[:, :6], [n, tf.shape(x)[1] // 5, 3])
            tokens = tf.tanh(tf.reshape(inputs, [n * 2, 3]) @ inner)
            heads = tf.transpose(tf.reshape(tokens, [n, -1, 3]), [1, 0, 2])
            steps = tf.reshape(tf.tanh(heads), [2, n, 3, 1])
            loss = tf.reduce_mean(steps**2) + tf.reduce_mean(h**2)
            if mixes:
                mixed = tf.reshape(tf.transpose(h), [n * 23])
                loss += tf.reduce_mean(mixed * mixed[::-1])
        _descend(tape, loss, trained, 1e-2)
        return loss, h, heads

    return step, trained, (_X,)


def _generator_of_its_size(call=lambda function, z: function(z)):
    """Draws a generator's noise for as many examples as the batch has."""
    _dense_of_keras()  # makes its variables
    kernels, network = _network(6, 1)
    generator, make = _network(2, 6)
    state = tf.Variable([1, 2])

    def step(x):
        z = tf.random.stateless_normal([x.shape[0], 2], state, dtype=tf.float64)
        with tf.GradientTape(persistent=True) as tape:
            fake = network(call(make, z))
            loss = tf.reduce_mean(tf.nn.softplus(fake) + tf.nn.softplus(-network(x)))
            other = -tf.reduce_mean(fake)
        _descend(tape, other, generator)
        _descend(tape, loss, kernels)
        state.assign_add([0, 1])
        return loss, other

    return step, [*kernels, *generator, state], (_X,)


def _transposed_convolution(function, z):
    kernel = tf.eye(2, dtype=z.dtype)[None, None]
    sizes = [z.shape[0], 1, 1, 2]
    images = tf.nn.conv2d_transpose(tf.reshape(z, sizes), kernel, sizes, 1)
    return function(tf.reshape(images, [-1, 2]))


@functools.cache
def _dense_of_keras():
    keras = importlib.import_module("keras")
    layer = keras.layers.Dense(2, kernel_initializer="ones", dtype="float64")
    layer.build([None, 1, 2])
    return layer


def _layer_of_keras(function, z):
    """Calls a layer that may set the static shape of its outputs."""
    return function(_dense_of_keras()(z[:, None])[:, 0])


_GENERATORS = {
    "of_values": _values_of_its_size,
    "of_reshapes": _reshapes_of_its_size,
    "plain": _generator_of_its_size,
    "convolution": functools.partial(_generator_of_its_size, _transposed_convolution),
    "keras": functools.partial(_generator_of_its_size, _layer_of_keras),
}
_DAILY = {*itertools.product(_GENERATORS, [3])} - {("of_values", 3)}


@pytest.mark.parametrize(
    ("make", "number"), rows(itertools.product(_GENERATORS, [3, 4]), _DAILY)
)
def test_what_reads_the_size_of_the_batch_is_split_with_it(caplog, make, number):
    caplog.set_level("DEBUG", "tensorflow.estimator_accum")
    _assert_equal_to_the_unsplit(_GENERATORS[make], number)
    shares = re.findall(r"micro-batches: (\S+)% of the activations", caplog.text)
    assert max(map(float, shares)) < 1
    assert "unsplit" not in caplog.text


def test_a_gradient_of_random_numbers_alone_is_said_to_be_unsplit(caplog):
    def call(function, z):
        return tf.function(function)(z)

    make = functools.partial(_generator_of_its_size, call)
    _assert_equal_to_the_unsplit(make, 4)
    assert "is computed unsplit: it depends on random numbers" in caplog.text


def test_a_reshape_that_mixes_examples_is_that_of_the_batch():
    make = functools.partial(_reshapes_of_its_size, mixes=True)
    _assert_equal_to_the_unsplit(make, 4)


def test_a_table_of_trained_rows_has_the_gradient_of_the_batch():
    make = functools.partial(_values_of_its_size, is_trained=True)
    _assert_equal_to_the_unsplit(make, 4)


def test_a_batch_that_is_retried_has_the_same_values_of_its_size(memory):
    memory.after = {0, 1}
    _assert_equal_to_the_unsplit(_values_of_its_size, "auto")
    assert memory.count.value == 4


def test_only_a_step_that_reads_sizes_is_traced_for_each():
    kernel, traces = _weights(6, 3), []

    def step(x, is_read):
        traces.append(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ kernel)
            loss /= x.shape[0] if is_read else x.shape[1]
        _descend(tape, loss, [kernel])
        return loss

    ours, whole = microbatch_step(step, 2), tf.function(step)
    for is_read, number in ((False, 1), (True, 2)):
        for n in (23, 11):
            value = kernel.numpy()
            loss = ours(_X[:n], is_read)
            kernel.assign(value)
            traced = len(traces)
            np.testing.assert_allclose(loss, whole(_X[:n], is_read), rtol=_LIMIT)
            del traces[traced:]
        assert len(traces) == number
        traces.clear()


def test_a_step_that_reduces_retracing_shares_a_trace_among_sizes():
    kernel, sizes = _weights(2, 3), []

    def step(x, labels=None):
        sizes.append([*x.shape])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(x[..., :2] @ kernel, 1) ** 2)
        _descend(tape, loss, [kernel])
        return loss

    ours = microbatch_step(tf.function(step, reduce_retracing=True), 2)
    whole = tf.function(step)
    shapes = [(8, 3, 2), (6, 3, 2), (5, 3, 2), (8, 4, 2), (7, 5, 2), (8, 3, 2)]
    for shape in shapes:
        x, value = _X.ravel()[: np.prod(shape)].reshape(shape), kernel.numpy()
        loss, after = ours(x), kernel.numpy()
        kernel.assign(value)
        traced = len(sizes)
        np.testing.assert_allclose(loss, whole(x), rtol=_LIMIT)
        np.testing.assert_allclose(kernel, after, rtol=_LIMIT)
        del sizes[traced:]
    assert sizes == [[8, 3, 2], [None, 3, 2], [None, None, 2]]
    # An argument more is another signature.
    ours(x, x)
    assert sizes[3:] == [[8, 3, 2]]


def test_a_batch_of_a_size_that_has_a_trace_of_its_own_runs_in_that():
    def step(x):
        return tf.reduce_sum(x) / (x.shape[0] or 1)

    whole = tf.function(step, reduce_retracing=True)
    ours = microbatch_step(tf.function(step, reduce_retracing=True), 2)
    for number in (8, 5, 6, 8, 5):
        x = tf.constant(_X[:number])
        np.testing.assert_allclose(ours(x), whole(x), rtol=_LIMIT)


def test_sizes_of_a_signature_are_those_of_its_function():
    kernel = _weights(6, 3)

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float64)])
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ kernel)
        _descend(tape, loss, [kernel])
        return tf.zeros([]) if x.shape[0] is None else x

    assert microbatch_step(step, 2)(_X).shape == []
    with pytest.raises(
        TypeError, match="`input_signature` of its tf.function. Received"
    ):
        microbatch_step(step, 2)(_Y)


@pytest.mark.parametrize("is_slice", [False, True])
def test_a_shape_that_is_set_is_read_afterwards(is_slice):
    def step(x):
        columns = tf.constant(5) + tf.cast(x[0, 0] * 0, tf.int32)
        crop = tf.function(lambda x, n: x[:, :n])
        part = x[:, :columns] if is_slice else crop(x, columns)
        part.set_shape([None, 5])
        return part.shape.as_list()

    assert [*map(int, microbatch_step(step, 4)(_X))] == [23, 5]


def test_a_check_that_the_loss_waits_for_begins_no_phase():
    kernels, network = _network(6, 1)

    def step(x):
        with tf.GradientTape() as tape:
            check = tf.debugging.assert_less(tf.norm(x, axis=1), np.float64(99))
            with tf.control_dependencies([check]):  # constants wait for it, too
                loss = tf.reduce_mean(2 * network(x) ** 2)
        _descend(tape, loss, kernels)
        return loss

    split = microbatch_step(step, 4)
    split(_X)
    (trace,) = split._traces.values()
    assert len(trace._phases) == 1
    with pytest.raises(tf.errors.InvalidArgumentError):
        split(_X * 1000)


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_change_waits_for_a_group_of_checks(is_inside):
    kernels, network = _network(6, 1)
    count = tf.Variable(0.0)

    def step(x):
        with tf.GradientTape() as tape:
            norms = tf.cast(tf.norm(x, axis=1), tf.float32)
            # TensorFlow knows the rank, so its check is empty.
            checks = (
                tf.debugging.assert_rank(x, 2),
                tf.debugging.assert_less(norms, 99.0),
            )
            with tf.control_dependencies([tf.group(*checks)]):
                count.assign_add(1.0)
                if is_inside:
                    loss = tf.reduce_mean(network(x) ** 2)
            if not is_inside:
                loss = tf.reduce_mean(network(x) ** 2)
        _descend(tape, loss, kernels)
        return loss

    split = microbatch_step(step, 4)
    split(_X)
    (trace,) = split._traces.values()
    (phase,) = trace._phases
    (change,) = (op for op in phase.changes if op.type == "AssignAddVariableOp")
    # A run could not tell: without an order, either may be first.
    assert {"If", "StatelessIf"} & {op.type for op in ancestors([change])}


class _OrbitTrainer:
    """Trains by the calls of Orbit's StandardTrainer without its functions and loops."""

    def __init__(self, step, batches):
        self._step, self._batches, self._iterator = step, batches, None

    def train(self, num_steps):
        self._iterator = self._iterator or iter(self._batches)
        step = 0
        with tf.experimental.async_scope():
            while step < num_steps:
                self.train_step(self._iterator)
                step += 1

    def train_step(self, iterator):
        self._step(*next(iterator))


class _AgentsLearner:
    """Trains by the calls of TF-Agents' Learner."""

    def __init__(self, agent, batches):
        self._agent, self._iterator = agent, iter(batches)
        self._agent.train = tf.autograph.experimental.do_not_convert(agent.train)

    @tf.function
    def train(self, iterations):
        loss = self._single(self._iterator)
        for _ in tf.range(iterations - 1):
            tf.autograph.experimental.set_loop_options(parallel_iterations=10)
            loss = self._single(self._iterator)
        return loss

    def _single(self, iterator):
        return tf.distribute.get_strategy().run(self._agent.train, args=next(iterator))


@pytest.mark.parametrize("loop", [_OrbitTrainer, _AgentsLearner])
@pytest.mark.parametrize("number", [4, "auto"])
def test_a_step_runs_in_the_train_loops_of_libraries(loop, number):
    def trained(split):
        step, variables, data = _contrast()
        batches = tf.data.Dataset.from_tensor_slices(data).batch(8).repeat()
        if loop is _OrbitTrainer:
            loop(split(step), batches).train(tf.constant(5))
        else:
            agent = types.SimpleNamespace(train=lambda x, y: step(x, y)["loss"])
            learner = loop(agent, batches)
            agent.train = split(agent.train)
            learner.train(tf.constant(5))
        return [variable.numpy() for variable in variables]

    expected = trained(tf.function)
    tf.config.run_functions_eagerly(loop is _AgentsLearner)
    try:
        ours = trained(lambda step: microbatch_step(step, number))
    finally:
        tf.config.run_functions_eagerly(False)
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=_LIMIT, atol=_LIMIT)


def test_a_size_from_a_loop_is_that_of_the_unsplit_batch():
    def step(x):
        branch = tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: 2 * x)
        loop = tf.while_loop(lambda y: False, lambda y: 2 * y, [branch])[0]
        folded = tf.foldr(lambda total, column: total + column, tf.transpose(loop))
        return branch.shape[0], loop.shape[0], folded.shape[0]

    assert [int(n) for n in microbatch_step(step, 2)(_X)] == [len(_X)] * 3


def test_a_size_that_a_loop_changes_is_unknown():
    def step(x):
        shapes = tf.TensorShape([]), tf.TensorShape([None, 6])
        longer = tf.while_loop(
            lambda i, y: i < 1,
            lambda i, y: (i + 1, tf.concat([y, y], 0)),
            (0, x),
            shapes,
        )[1]
        assert longer.shape[0] is None
        return tf.reduce_sum(x, 1)

    microbatch_step(step, 2)(_X)


def test_a_signature_has_types_of_any_number_of_arguments():
    types = [tf.TensorSpec([None, n], tf.float64) for n in (6, 2)]

    @tf.function(input_signature=types)
    def step(*batch):
        return tf.concat(batch, 1)

    np.testing.assert_array_equal(
        microbatch_step(step, 4)(_X, _Y), np.concatenate([_X, _Y], 1)
    )


@tf.function
def _flat(x):
    n, *sizes = x.shape
    return tf.reshape(x, [-1, np.prod(sizes)]), n


def test_a_function_may_unpack_the_shape_of_a_batch_whose_size_it_does_not_use():
    def step(x):
        return tf.reduce_sum(_flat.python_function(x)[0], 1) + tf.reduce_sum(
            tf.function(lambda x: _flat.python_function(x)[0])(x), 1
        )

    x = _X[:, None]
    ours = microbatch_step(step, 2)(x)
    np.testing.assert_allclose(ours, step(x), rtol=_LIMIT, atol=_LIMIT)

    def uses(x):
        return tf.function(lambda x: x / _flat.python_function(x)[1])(x)

    with pytest.raises(
        ValueError, match="where it is not static|is computed and sparse"
    ):
        microbatch_step(uses, 2)(x)


def test_a_step_is_traced_for_each_structure_of_its_arguments():
    ours = microbatch_step(
        lambda x, *others: tf.reduce_sum(x[0]) + isinstance(x, tuple) + len(others), 2
    )
    total = _X.sum()
    for arguments, added in (([_X],), 0), (((_X,),), 1), (([_X], []), 1):
        np.testing.assert_allclose(ours(*arguments), total + added, rtol=_LIMIT)


def _words_looked_up_once(move):
    table = tf.Variable(np.linspace(-1, 1, 16).reshape(8, 2))
    words = tf.sparse.from_dense(1 + np.arange(69).reshape(23, 3) % 5)

    def step(words):
        rows, places = tf.unique(words.values)
        with tf.GradientTape() as tape:
            embedded = tf.gather(tf.gather(table, move(rows)), places)
            examples = words.indices[:, 0]
            sums = tf.math.unsorted_segment_sum(
                embedded, examples, words.dense_shape[0]
            )
            loss = tf.reduce_mean(sums**2)
        gradient = tape.gradient(loss, table)
        (gradient,), norm = tf.clip_by_global_norm([gradient], 0.3)
        table.scatter_sub(gradient)
        return loss, norm

    return step, [table], (words,)


@pytest.mark.parametrize("move", [lambda rows: rows, lambda rows: 7 - (rows + 1)])
def test_rows_that_are_looked_up_once_have_one_slice_each(move):
    whole, ours = (
        _run(functools.partial(_words_looked_up_once, move), change)
        for change in (tf.function, lambda step: microbatch_step(step, 4))
    )
    for one, other in zip(whole, ours, strict=True):
        np.testing.assert_allclose(one, other, rtol=_LIMIT)


def _gradient_of_looked_up(table, ids):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, ids) ** 2)
    return tape.gradient(loss, table)


def _summed_by_row(gradient):
    rows, places = tf.unique(gradient.indices)
    total = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return total, rows


@pytest.mark.parametrize(
    "result_of",
    [
        lambda gradient: gradient,
        lambda gradient: -2.0 * gradient.values,
        lambda gradient: gradient.indices,
        _summed_by_row,
    ],
)
def test_slices_that_are_results_are_those_of_the_batch(result_of):
    table = _weights(11, 2)

    def step(ids):
        return result_of(_gradient_of_looked_up(table, ids))

    whole, ours = (
        tf.nest.flatten(function(_IDS[:, 0]), expand_composites=True)
        for function in (tf.function(step), microbatch_step(step, 4))
    )
    for one, other in zip(whole, ours, strict=True):
        np.testing.assert_array_equal(one, other)


def test_places_that_are_computed_from_rows_looked_up_once_are_refused():
    step, _, arguments = _words_looked_up_once(lambda rows: rows * 3 % 7)
    with pytest.raises(ValueError, match="computes from those of tf.unique"):
        microbatch_step(step, 4)(*arguments)


def test_a_step_may_make_variables_at_its_first_call():
    def make():
        kernels, network = _network(6, 3)
        variables = []

        def step(x):
            if not variables:
                variables.append(tf.Variable(tf.ones([], tf.float64)))
            variables[0].assign_add(1)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(network(x) ** 2) * variables[0]
            _descend(tape, loss, kernels)
            return loss

        return step, kernels, (_X,)

    for one, other in zip(
        _run(make, tf.function),
        _run(make, lambda step: microbatch_step(step, 4)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=_LIMIT)


def test_a_first_call_that_makes_variables_is_traced_again_as_of_a_tf_function():
    def values(wrap):
        calls, state = [], {}

        def step(x):
            calls.append(None)
            if not state:
                state["is_made"] = True
                state["factor"] = tf.Variable(tf.constant(2.0, tf.float64))
                state["sum"] = tf.Variable(lambda: tf.zeros([], tf.float64))
                state["sum"].assign(7.0)  # in the first trace alone
            state["sum"].assign_add(state["factor"] * len(calls))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(x @ kernel) * state["sum"]
            _descend(tape, loss, [kernel])
            return loss

        kernel = _weights(6, 3)
        step = wrap(step)
        losses = [step(tf.constant(_X)) for _ in range(2)]
        return [*losses, kernel, state["sum"], len(calls)]

    for one, other in zip(
        values(tf.function), values(lambda step: microbatch_step(step, 4)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=_LIMIT)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: microbatch_step(3), TypeError, "`step` must be a function"),
        (lambda: microbatch_step(print, 0), ValueError, "`micro_batches` must be an"),
        (
            lambda: microbatch_step(print, "all"),
            TypeError,
            "`micro_batches` must be an",
        ),
        (
            lambda: microbatch_step(lambda x: x, 2)(None),
            ValueError,
            "must take a batch. Received: arguments without",
        ),
        (
            lambda: microbatch_step(lambda x, y: x, 2)(_X, types.SimpleNamespace()),
            TypeError,
            "must have a hash, .* Received: y of type SimpleNamespace",
        ),
        (
            lambda: tf.function(microbatch_step(lambda x: x, 2))(_X),
            RuntimeError,
            "called outside of tf.function.*use_tf_while_loop=False.*run_functions_eag",
        ),
        (
            lambda: microbatch_step(lambda x, y: x, 2)(_X, _Y[:5]),
            ValueError,
            "same number of examples.* x has 23, y has 5",
        ),
    ],
)
def test_what_is_no_step_of_a_batch_is_refused(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (lambda x: tf.clip_by_norm(None, 1.0) + x, "None values not supported"),
        (lambda x: x @ tf.ones([99, 1], x.dtype), "must be equal|incompatible"),
    ],
)
def test_an_error_that_the_plain_step_has_too_is_the_users_own(step, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        microbatch_step(step, 2)(_X)
    assert "tf.shape" not in str(caught.value)
