"""Fingerprints of gradients or rows find differences above rounding."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.microbatch.own_optimizer.fingerprints import (
    of_gradient,
    of_rows,
    ratio_to_rounding,
    rounding_of,
)
from tests.helpers.processes import running
from tests.helpers.tables import rows

v1 = tf.compat.v1
_random = np.random.default_rng(0)
_SHAPE = 1500, 64  # of a gradient
_X, _D = (_random.normal(size=(256, n)) for n in _SHAPE)


def _run(fetches):
    with v1.Session() as session:
        return session.run(fetches)


def _sums(dtype):
    """Returns the gradient of a layer, and those of two parts of its batch."""
    x, d = tf.constant(_X, dtype), tf.constant(_D, dtype)
    parts = slice(0, 100), slice(100, 256)
    return [tf.matmul(x[p], d[p], transpose_a=True) for p in (slice(0, 256), *parts)]


def _are_sums(gradients, dtype) -> bool:
    """Returns whether the first gradient is the sum of the others."""
    whole, *parts = _run([of_gradient(gradient) for gradient in gradients])
    bound = rounding_of(dtype) * sum(part.size for part in parts)
    total = sum(part.products.astype(np.float64) for part in parts)
    return ratio_to_rounding(whole.products - total, whole.numbers, bound) <= 1


def _changed(place, change):
    def fault(gradient):
        is_there = np.zeros(_SHAPE, bool)
        is_there[place] = True
        return tf.where(is_there, change(gradient), gradient)

    return fault


_FAULTS = {
    "an element has the other sign": _changed((700, 7), lambda g: -g),
    "a row is missing": _changed(1234, lambda g: 0 * g),
    "a row is 1% too large": _changed(3, lambda g: 1.01 * g),
    "the last row is that before": _changed(1499, lambda g: tf.roll(g, 1, 0)),
    "a column is missing": _changed((slice(None), 5), lambda g: 0 * g),
    "two rows are exchanged": lambda g: tf.gather(g, [1, 0, *range(2, 1500)]),
    "all is 0.1% too large": lambda g: g * 1.001,
    "all has the other sign": lambda g: -g,
}


@pytest.mark.parametrize("fault", _FAULTS)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_wrong_gradient_is_found(fault, is_sparse):
    with tf.Graph().as_default():
        whole, *parts = _sums(tf.float32)
        gradients = [_FAULTS[fault](whole), *parts]
        if is_sparse:
            rows = tf.range(_SHAPE[0]) * 7919 % 10**6
            gradients = [tf.IndexedSlices(gradient, rows) for gradient in gradients]
        assert not _are_sums(gradients, tf.float32)


_SIZES = _SHAPE, (1500,), (1024, 2), (1,), (0, 3)
_DAILY = {*itertools.product(_SIZES, ["float16"])} - {((1024, 2), "float16")}


@pytest.mark.parametrize(
    ("size", "dtype"),
    rows(
        itertools.product(_SIZES, ["float16", "bfloat16", "float32", "float64"]), _DAILY
    ),
)
def test_what_rounding_does_is_right(dtype, size):
    with tf.Graph().as_default():
        kind = tf.as_dtype(dtype)
        number = int(np.prod(size))
        gradients = [
            tf.reshape(tf.reshape(total, [-1])[:number], size) for total in _sums(kind)
        ]
        assert _are_sums(gradients, kind)
        assert number == 0 or not _are_sums([-gradients[0], *gradients[1:]], kind)


def test_slices_count_in_any_order_and_by_their_row():
    with tf.Graph().as_default():
        values, rows = tf.constant(_X[:, :3], tf.float32), np.arange(256) // 2 * 5000
        one = tf.IndexedSlices(values, rows)
        order = _random.permutation(256)
        other = tf.IndexedSlices(tf.gather(values, order), rows[order])
        summed = tf.reduce_sum(tf.reshape(values, [128, 2, 3]), 1)
        joined = tf.IndexedSlices(summed, rows[::2])
        moved = tf.IndexedSlices(values, rows + 1024 * (rows == 5000))
        assert _are_sums([one, other], tf.float32)
        assert _are_sums([one, joined], tf.float32)
        assert not _are_sums([one, moved], tf.float32)


def test_no_more_than_one_number_for_a_hundred_leaves_the_session():
    with tf.Graph().as_default():
        whole, *_ = _sums(tf.float32)
        arrays = tf.nest.flatten(_run(of_gradient(whole)))
        assert (
            sum(np.size(array) for array in arrays) < whole.shape.num_elements() / 100
        )


_ROWS = {
    "first": (_X[:8, :6].reshape(8, 2, 3), 0),
    "second": (_X[:5, :24].reshape(5, 8, 3), 1),
    "last": (_X[:8, :5].T, 1),
    "vector": (_X[:8, 0], 0),
    "several for each example": (_X[:24, :3], 0),
    "numbers": (np.arange(24).reshape(8, 3), 0),
    "texts": (np.arange(24).astype("S").reshape(8, 3), 0),
    "flags": (_X[:8, :4] > 0, 0),
    "complex": (_X[:8, :4] + 1j * _X[8:16, :4], 0),
    "infinite": (np.where(_X[:8, :4] > 0, _X[:8, :4], -np.inf), 0),
}


@pytest.mark.parametrize("name", _ROWS)
def test_rows_are_compared_in_their_order(name):
    value, axis = _ROWS[name]
    with tf.Graph().as_default():
        every = np.split(np.arange(value.shape[axis]), 4)
        joined = [np.take(value, places, axis) for places in every]
        fingerprints = [of_rows(tf.constant(array), axis) for array in (value, *joined)]
        whole, *parts = _run(fingerprints)
        products = np.concatenate([part.products for part in parts])
        np.testing.assert_allclose(products, whole.products, rtol=1e-12, atol=1e-12)
        assert not np.allclose(products[::-1], whole.products)
        assert {tuple(part.others) for part in parts} == {tuple(whole.others)}


_OPTIMIZED = """
import tensorflow as tf
from estimator_accum.microbatch.own_optimizer.fingerprints import of_rows
for shape in [None], [None, 3], [None, 2, 3]:
    of_tensor = tf.function(lambda rows: of_rows(rows, 0), [tf.TensorSpec(shape)])
    print(int(of_tensor(tf.ones([4, *shape[1:]])).numbers))
"""


@pytest.mark.once
@pytest.mark.usefixtures("real_starts")
def test_tensorflow_optimizes_fingerprints_without_an_error():
    done = running.run("-c", _OPTIMIZED, TF_CPP_MIN_LOG_LEVEL="0")
    assert done.stdout.split() == ["1", "3", "3"]
    assert " failed: " not in done.stderr
