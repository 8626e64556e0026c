"""The weights are those of the big batch, for every optimizer of tf.compat.v1.train."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import get_or_create_update_step, make_accumulating_train_op
from tests.helpers.models.interfaces import after_each, sgd
from tests.helpers.models.toy_models import (
    OPTIMIZERS,
    make_batches,
    make_model,
    relative_difference,
    train_accumulating,
    train_plain,
)
from tests.helpers.oracles import numpy_reference

pytestmark = pytest.mark.usefixtures("graph_optimizer")
v1 = tf.compat.v1
UPDATES = 30


@pytest.mark.parametrize(
    ("name", "dtype", "steps", "clip_norm", "decay"),
    [(name, tf.float64, 3, 0.5, 0.1) for name in OPTIMIZERS]
    + [("Adam", tf.float32, 2, None, 0.0), ("AdagradDA", tf.float32, 3, 0.5, 0.1)],
)
def test_weights_and_slots_are_the_big_batchs(name, dtype, steps, clip_norm, decay):
    batches = make_batches(UPDATES, 6)
    settings = {"dtype": dtype, "clip_norm": clip_norm, "decay": decay}
    plain = train_plain(OPTIMIZERS[name], batches, **settings)
    ours = train_accumulating(OPTIMIZERS[name], batches, steps, **settings)
    trained = [key for key in plain if key != "global_step"]  # slots and beta powers
    tolerance = 2e-5 if dtype == tf.float32 else 1e-12
    assert relative_difference(ours, plain, trained) < tolerance
    assert ours["update_step"] == UPDATES
    assert ours["global_step"] == UPDATES * steps


@pytest.mark.core
@pytest.mark.parametrize("name", ["Adam", "AdagradDA", "Momentum"])
def test_one_step_windows_are_the_plain_optimizer_bit_for_bit(name):
    batches = make_batches(10, 6)
    plain = train_plain(OPTIMIZERS[name], batches, decay=0.1)
    ours = train_accumulating(OPTIMIZERS[name], batches, 1, decay=0.1)
    assert ours.pop("update_step") == 10
    assert plain.keys() == ours.keys()
    for key, value in plain.items():
        np.testing.assert_array_equal(ours[key], value, err_msg=key)


@pytest.mark.parametrize("clip_norm", [0.5, 1e9])
def test_one_step_windows_with_clipping_are_clip_by_global_norm_bit_for_bit(clip_norm):
    batches = make_batches(10, 6)
    make_optimizer = OPTIMIZERS["Adam"]
    plain = train_plain(make_optimizer, batches, clip_norm=clip_norm)
    ours = train_accumulating(make_optimizer, batches, 1, clip_norm=clip_norm)
    np.testing.assert_array_equal(ours["dense"], plain["dense"])
    # The true norm sums a row's duplicates in another order.
    assert relative_difference(ours, plain, ["embedding"]) < 1e-6


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        # Settings that are exact in float32, to which TensorFlow converts them.
        ("SGD", (0.125,)),
        *[("Momentum", (0.125, 0.75)), ("Adam", (0.125, 0.75, 0.875, 2**-20))],
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_updates_equal_the_numpy_oracle(name, settings):
    oracle = getattr(numpy_reference, name)(*settings)
    theirs = "GradientDescent" if name == "SGD" else name
    optimizer = getattr(v1.train, f"{theirs}Optimizer")
    random = np.random.default_rng(1)
    gradients = random.normal(size=[UPDATES, 4, 5])
    with tf.Graph().as_default():
        gradient = v1.placeholder(tf.float64, [5])
        variable = v1.get_variable("x", initializer=np.zeros(5))
        loss = tf.reduce_sum(variable * gradient)
        train_op = make_accumulating_train_op(loss, optimizer(*settings), 4, 0.75)
        feeds = [{gradient: value} for window in gradients for value in window]
        ours = after_each(train_op, feeds, variable)[3::4]
    # TensorFlow keeps Adam's beta powers in float32.
    rtol = 1e-7 if name == "Adam" else 1e-12
    expected = np.zeros(5)
    for window, values in zip(gradients, ours, strict=True):
        clipped, _ = numpy_reference.clip_by_global_norm([window.mean(0)], 0.75)
        expected = oracle.step(expected, clipped[0])
        np.testing.assert_allclose(values, expected, rtol=rtol)


def test_unequal_weights_give_the_weighted_mean_where_the_mean_of_means_does_not():
    """A masked loss: micro-batches of 1, 5 and 2 examples against one batch of 8."""
    batch = make_batches(1, 8)[0]
    plain = train_plain(OPTIMIZERS["GradientDescent"], [batch])

    def train(is_weighted):
        with tf.Graph().as_default():
            model = make_model()
            size = tf.shape(model.feeds.targets)[0] if is_weighted else None
            train_op = make_accumulating_train_op(model.loss, sgd(0.05), 3, weight=size)
            parts = np.split(np.arange(8), [1, 6])
            fields = [[field[part] for field in batch] for part in parts]
            feeds = [dict(zip(model.feeds, batch, strict=True)) for batch in fields]
            return {"dense": after_each(train_op, feeds, model.dense)[-1]}

    assert relative_difference(train(True), plain, ["dense"]) < 1e-6
    assert relative_difference(train(False), plain, ["dense"]) > 1e-3


def test_windows_grow_with_a_callable_of_the_update_step():
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [])
        variable = v1.get_variable("x", initializer=0.0)
        train_op = make_accumulating_train_op(
            variable * x, sgd(), lambda updates: 1 + tf.cast(updates, tf.int32)
        )
        feeds = [{x: value} for value in range(1, 11)]
        seen = after_each(train_op, feeds, [get_or_create_update_step(), variable])
    windows = [(1,), (2, 3), (4, 5, 6), (7, 8, 9, 10)]
    expected, variable = [], 0.0
    for updates, window in enumerate(windows):
        expected += [[updates, variable]] * (len(window) - 1)
        variable -= float(np.mean(window))
        expected.append([updates + 1, variable])
    assert seen == expected
