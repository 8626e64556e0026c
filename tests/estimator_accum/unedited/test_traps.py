"""Model_fns that a cut batch once trained with other weights, without a word.

Batches of 16 examples and of one, cut in 4. A trap is a function of the batch
that returns the loss, and perhaps the gradient that is applied.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.helpers.models.interception import build
from tests.helpers.oracles.exactness import assert_exact

v1 = tf.compat.v1
_numbers = np.random.default_rng(0)
_BATCHES = [
    (_numbers.normal(size=(n, 3)), _numbers.normal(size=n)) for n in (16, 1, 16)
]
_TRAPS = {}


def _trap(make):
    _TRAPS[make.__name__[1:]] = make
    return make


def _weights():
    return v1.get_variable(
        "weights", [3, 2], tf.float64, tf.random_normal_initializer(seed=1)
    )


def _predicted(x, weights):
    return tf.reduce_sum(tf.tanh(tf.matmul(x, weights)), 1)


def _mean(x, y, weights):
    return tf.reduce_mean((_predicted(x, weights) - y) ** 2)


def _counter():
    return v1.get_variable(
        "counter", [], tf.float64, tf.zeros_initializer(), trainable=False
    )


@_trap
def _function_with_rows(x, y):
    weights = _weights()
    squares = tf.function(lambda x, y: (_predicted(x, weights) - y) ** 2)
    return tf.reduce_mean(squares(x, y))


@_trap
def _one_of_several_results(x, y):
    weights = _weights()
    hidden, twice = tf.identity_n([tf.tanh(tf.matmul(x, weights)), weights * 2])
    return tf.reduce_mean(hidden) ** 2 + tf.reduce_sum(twice**2) + 0 * tf.reduce_sum(y)


@_trap
def _direct_gradients(x, y):
    """A variable of the head, beside a shape that is not known."""
    weights, factor = _weights(), v1.get_variable("factor", initializer=np.float64(2))
    hidden = tf.tanh(tf.matmul(x, weights))[:, : tf.cast(tf.size(y) * 0 + 2, tf.int32)]
    mean = tf.reduce_sum(hidden) / tf.cast(tf.size(hidden), tf.float64)
    return (factor * mean - tf.reduce_mean(y)) ** 2


@_trap
def _counted_before_the_loss(x, y):
    loss = _mean(x, y, _weights())
    with tf.control_dependencies([_counter().assign_add(1.0)]):
        return tf.identity(loss)


@_trap
def _averaged_before_the_loss(x, y):
    weights, counter = _weights(), _counter()
    loss, largest = _mean(x, y, weights), tf.reduce_max(_predicted(x, weights))
    with tf.control_dependencies([counter.assign(0.9 * counter + 0.1 * largest)]):
        return tf.identity(loss)


@_trap
def _unknown_widths(x, y):
    """One of two lengths that are not known is 1."""
    weights, mask = _weights(), x[:, : tf.cast(tf.size(y) * 0 + 3, tf.int32)]
    narrow = _predicted(x, weights)[:, None][:, : tf.cast(tf.size(y) * 0 + 1, tf.int32)]
    chosen = tf.where(mask > 0, narrow, tf.zeros_like(narrow))
    return tf.reduce_mean((chosen - y[:, None]) ** 2)


@_trap
def _watched_by_a_tape_that_starts_anew(x, y):
    """The gradient waits for both reads: none may come after the update."""
    weights = _weights()
    with tf.GradientTape() as tape:
        before = tf.reduce_mean(_predicted(x, weights)) ** 2
        tape.reset()
        with tf.control_dependencies([before]):
            loss = _mean(x, y, weights) + before
    return loss, tape.gradient(loss, weights)


@_trap
def _one_seed_of_two_draws(x, y):
    """As images and their masks are flipped: both draws are the same numbers."""
    predicted = _predicted(x, _weights())
    of_all, of_rows = (
        tf.random.uniform(shape, dtype=tf.float64, seed=7)
        - tf.random.uniform(shape, dtype=tf.float64, seed=7)
        for shape in ([], tf.shape(y))
    )
    return tf.sqrt(tf.reduce_mean((predicted * (1 + of_all + of_rows) - y) ** 2))


def _normalized(z):
    """Returns rows that combine the examples, as batch normalization does."""
    mean, variance = tf.nn.moments(z, [0])
    return tf.nn.relu((z - mean) * tf.math.rsqrt(variance + 0.01))


@_trap
def _two_tapes_over_one_normalization(x, y):
    weights = _weights()
    with tf.GradientTape() as one, tf.GradientTape() as other:
        hidden = _normalized(tf.matmul(x, weights))
        loss = tf.reduce_mean((hidden[:, 0] - y) ** 2)
        second = tf.reduce_mean((hidden[:, 1] - y**2) ** 2)
    return loss, one.gradient(loss, weights) - 3 * other.gradient(second, weights)


@_trap
def _tensors_that_no_tape_watches(x, y):
    """Their gradients are None, or zeros, and stay so behind a function's call."""
    weights = _weights()
    scaled, of_rows = 2 * weights, tf.function(lambda x: tf.tanh(tf.matmul(x, weights)))
    before = of_rows(-x)
    with tf.GradientTape(persistent=True) as tape:
        hidden = _normalized(tf.matmul(x, scaled) + of_rows(x) * before)
        loss = tf.reduce_mean((hidden[:, 0] - y) ** 2)
    assert tape.gradient(loss, {"none": [scaled, x]}) == {"none": [None, None]}
    zeros = tape.gradient(loss, [x, weights], unconnected_gradients="zero")
    return loss, zeros[1] + tf.reduce_sum(zeros[0])


@_trap
def _watched_later_than_computed(x, y):
    weights, shift = _weights(), v1.get_variable("shift", initializer=np.ones(2))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([weights, {"shift": shift}])
        hidden = tf.matmul(x, weights)
        with tape.stop_recording():
            chosen = 2 * hidden
        tape.watch(chosen)
        loss = tf.reduce_mean((_normalized(chosen + hidden)[:, 0] - y) ** 2)
    of_weights, of_chosen, none = tape.gradient(loss, [weights, chosen, shift])
    assert none is None
    return loss, of_weights * (1 + tf.reduce_sum(of_chosen**2))


@_trap
def _a_jacobian_of_each_example(x, y):
    weights = _weights()
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            tape.watch(x)
            hidden = tf.tanh(tf.matmul(x, weights))
        jacobian = tape.batch_jacobian(hidden, x)
        loss = tf.reduce_mean(jacobian**2) + tf.reduce_mean((hidden[:, 0] - y) ** 2)
    return loss, outer.gradient(loss, weights)


@_trap
def _a_penalty_of_slopes_through_padding(x, y):
    padded = tf.pad(x, [[0, 0], [1, 1]])
    y_hat = _predicted(padded[:, 1:-1], _weights())
    (slopes,) = tf.gradients(tf.tanh(y_hat), x)
    return tf.reduce_mean((y_hat - y) ** 2) + tf.reduce_mean(tf.norm(slopes, axis=1))


@_trap
def _gradients_of_python_functions(x, y):
    """Each gradient reads the record of its own function's run."""

    def python(function, values, shape):
        return tf.ensure_shape(tf.py_function(function, [values], tf.float64), shape)

    centered = python(
        lambda z: z - tf.reduce_mean(z, 0), _predicted(x, _weights()), [None]
    )
    return python(lambda z: tf.reduce_mean(tf.tanh(z) ** 2), centered - y, [])


@_trap
def _two_calls_of_a_function(x, y):
    """One of the two has a gradient, and then the other."""
    weights = _weights()
    of_rows = tf.function(lambda x: _predicted(x, weights))
    target = tf.stop_gradient(of_rows(-x))
    loss = tf.reduce_mean((of_rows(x) - y - target) ** 2)
    (gradient,) = tf.gradients(loss, weights)
    (other,) = tf.gradients(tf.reduce_mean((target + of_rows(2 * x)) ** 2), weights)
    return loss, gradient + other


@_trap
def _slopes_of_rows(x, y):
    weights = _weights()
    y_hat = _predicted(x, weights)
    (gradient,) = tf.gradients(y_hat, weights, grad_ys=y_hat - y)
    return tf.reduce_mean(y_hat), gradient


def _share(weights):
    """Returns gradients up to a factor, which examples share."""

    def of(loss):
        (gradient,) = tf.gradients(loss, weights)
        return 0 * loss, gradient / gradient[0, 0]

    return of


def _draw():
    return 1 + tf.random.uniform([], dtype=tf.float64)


def _is_training():
    return v1.placeholder_with_default(True, [])


@_trap
def _draw_in_a_function(x, y):
    weights = _weights()
    y_hat = tf.function(lambda x: tf.matmul(x, weights) * _draw())(x)
    return _share(weights)(tf.reduce_mean(y_hat * y[:, None]))


@_trap
def _draw_in_a_function_of_nothing(x, y):
    weights = _weights()
    y_hat = tf.matmul(x, weights) * tf.function(_draw)()
    return _share(weights)(tf.reduce_mean(y_hat * y[:, None]))


@_trap
def _draw_in_a_branch(x, y):
    weights = _weights()
    y_hat = tf.matmul(x, weights)
    y_hat = tf.cond(_is_training(), lambda: y_hat * _draw(), lambda: y_hat)
    return _share(weights)(tf.reduce_mean(y_hat * y[:, None]))


@_trap
def _draw_in_a_loop(x, y):
    weights = _weights()
    _, y_hat = tf.while_loop(
        lambda i, _: i < 2,
        lambda i, value: (i + 1, value * _draw()),
        (0, tf.matmul(x, weights)),
    )
    return _share(weights)(tf.reduce_mean(y_hat * y[:, None]))


@_trap
def _recomputed(x, y):
    weights = _weights()
    squares = tf.recompute_grad(lambda z: (tf.reduce_sum(tf.tanh(z), 1) - y) ** 2)
    return tf.reduce_mean(squares(tf.matmul(x, weights)))


def _slices(x, y):
    """Returns a loss of looked up rows, and its gradient."""
    weights = _weights()
    rows = tf.gather(weights, tf.cast(x[:, :2] > 0, tf.int32))
    loss = tf.reduce_mean((rows[:, 0, 0] - y) ** 2)
    return loss, tf.gradients(loss, weights)[0]


@_trap
def _divided_by_the_number_of_slices(x, y):
    loss, gradient = _slices(x, y)
    values = gradient.values / tf.cast(tf.size(gradient.indices), tf.float64)
    return loss, tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def _summed(gradient, change):
    """Returns the sum of each row's slices, changed by a function."""
    rows, places = tf.unique(gradient.indices)
    total = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(change(total, places), rows, gradient.dense_shape)


@_trap
def _averaged_over_the_look_ups_of_a_row(x, y):
    def average(total, places):
        ones = tf.ones_like(places, tf.float64)
        number = tf.math.unsorted_segment_sum(ones, places, tf.shape(total)[0])
        return total / tf.sqrt(number)[:, None]

    loss, gradient = _slices(x, y)
    return loss, _summed(gradient, average)


@_trap
def _added_in_the_order_of_the_look_ups(x, y):
    loss, gradient = _slices(x, y)
    return loss, _summed(gradient, lambda total, places: tf.cumsum(total))


@_trap
def _of_unknown_length(x, y):
    weights, limit = _weights(), v1.placeholder_with_default([[1.0]], [None, None])
    y_hat = _predicted(x, weights)[:, None] * tf.cast(limit, tf.float64)
    return tf.reduce_mean((y_hat - y[:, None]) ** 2)


def _model_fn(make):
    def model_fn(features, labels, mode):
        result = make(features, labels)
        loss, gradient = result if isinstance(result, tuple) else (result, None)
        sgd, step = v1.train.GradientDescentOptimizer(0.1), v1.train.get_global_step()
        if gradient is None:
            train_op = sgd.minimize(loss, step)
        else:
            pairs = [(gradient, v1.trainable_variables()[0])]
            train_op = sgd.apply_gradients(pairs, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def _input_fn():
    first, *others = map(tf.data.Dataset.from_tensors, _BATCHES)
    for other in others:
        first = first.concatenate(other)
    return first


@pytest.mark.parametrize("name", _TRAPS)
def test_a_cut_batch_trains_as_the_batch_at_once(name):
    assert_exact(_model_fn(_TRAPS[name]), _input_fn, 4, updates=len(_BATCHES))


def test_a_static_number_of_examples_is_refused():
    def make(features, labels):
        features.set_shape([16, 3])
        return _mean(features, labels, _weights())

    with pytest.raises(ValueError, match=r"no static number .*\(16, 3\)\. Call `T"):
        build(_model_fn(make), _BATCHES[0])
