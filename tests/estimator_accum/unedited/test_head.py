"""The head of a cut batch: declarations, random numbers, look-ups, refusals."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import AccumulatingOptimizer, per_example
from tests.helpers.models import model_fns
from tests.helpers.models.examples import make_dataset
from tests.helpers.models.interception import build, cut, train
from tests.helpers.models.microbatch_runs import spec_of
from tests.helpers.models.toy_models import relative_difference

v1 = tf.compat.v1
_X = np.random.default_rng(0).normal(size=(18, 4)).astype(np.float32)
_Y = np.arange(18, dtype=np.float32)
_BATCH = ({"x": _X}, _Y)


def _model_fn(loss_of, make_optimizer=v1.train.GradientDescentOptimizer):
    """Returns a model_fn with the loss `loss_of(x, labels, weights)`."""

    def model_fn(features, labels, mode):
        weights = v1.get_variable("weights", initializer=np.ones([4, 1], np.float32))
        loss = loss_of(features["x"], labels, weights)
        step = v1.train.get_or_create_global_step()
        return spec_of(mode, loss, make_optimizer(0.1).minimize(loss, step))

    return model_fn


def _accumulating(rate):
    return AccumulatingOptimizer(v1.train.GradientDescentOptimizer(rate), 1)


def _errors(x, labels, weights):
    return (tf.matmul(x, weights)[:, 0] - labels) ** 2


_SUMS = {
    "sum": lambda *tensors: tf.reduce_sum(_errors(*tensors)),
    "sum and penalty": lambda x, y, w: (
        0.5 * tf.reduce_sum(_errors(x, y, w)) + tf.nn.l2_loss(w)
    ),
    "losses": lambda x, y, w: v1.losses.mean_squared_error(
        y, tf.matmul(x, w)[:, 0], reduction=v1.losses.Reduction.SUM
    ),
    "weights of the input pipeline": lambda x, y, w: tf.einsum(
        "b,b->", _errors(x, y, w), y
    ),
    "scan": lambda *tensors: tf.scan(tf.add, _errors(*tensors))[-1],
}


@pytest.mark.parametrize("name", _SUMS)
def test_a_sum_that_is_declared_as_a_mean_is_refused(name):
    sentence = (
        r"must be declared as a sum\. Received: .*Pass reduction='sum'.* If it has weights "
        r"that the input pipeline normalizes, declare reduction='sum'"
    )
    with pytest.raises(ValueError, match=sentence):
        build(_model_fn(_SUMS[name], _accumulating), _BATCH)
    build(_model_fn(_SUMS[name], _accumulating), _BATCH, reduction="sum")


def test_a_sum_beside_a_mean_is_refused():
    def loss_of(x, labels, weights):
        return tf.reduce_mean(_errors(x, labels, weights)) + tf.nn.l2_loss(x @ weights)

    with pytest.raises(ValueError, match="all be sums.*adds a sum over the examples"):
        build(_model_fn(loss_of, _accumulating), _BATCH)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda *tensors: tf.reduce_mean(_errors(*tensors)),
        lambda *tensors: tf.reduce_mean(_errors(*tensors)) + tf.nn.l2_loss(tensors[2]),
        lambda x, y, w: tf.reduce_sum(_errors(x, y, w)) / tf.reduce_sum(y),
        lambda x, y, w: tf.reduce_sum(tf.reduce_mean(tf.matmul(x, w), 0)),
    ],
)
def test_what_is_no_sum_may_be_declared_as_a_mean(loss_of):
    build(_model_fn(loss_of, _accumulating), _BATCH)


def _by_python(function):
    def loss_of(x, labels, weights):
        rows = tf.numpy_function(function, [x], tf.float32)
        rows = per_example(tf.ensure_shape(rows, [None, 4]))
        return tf.reduce_mean(_errors(rows, labels, weights))

    return _model_fn(loss_of)


def test_a_python_function_that_is_declared_per_example_gets_micro_batches():
    sizes = []

    def square(x):
        sizes.append(len(x))
        return x**2

    theirs, _ = train(_by_python(lambda x: x**2), _BATCH)
    ours, _ = train(cut(_by_python(square)), _BATCH)
    assert relative_difference(ours, theirs) <= 2e-6
    assert sizes[-4:] == [5, 5, 5, 3]


def test_a_model_fn_is_called_once():
    calls = []

    def loss_of(*tensors):
        calls.append("loss_of")
        return tf.reduce_mean(_errors(*tensors))

    train(cut(_model_fn(loss_of)), _BATCH)
    assert calls == ["loss_of"]


def test_a_declaration_that_is_wrong_is_refused_before_the_first_update():
    model_fn = _by_python(lambda x: x - x.mean(0))
    with pytest.raises(ValueError, match=r"whose rows for 5 examples are others than"):
        train(cut(model_fn), _BATCH)


def test_a_scalar_has_no_example():
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match="along its first axi"),
    ):
        per_example(tf.constant(1.0))


def test_a_row_that_is_looked_up_in_another_example_stops_the_training():
    """As a place in a text that is longer than the text: the keys saw good ones."""

    def loss_of(x, labels, weights):
        flat = tf.reshape(x, [-1])
        places = tf.cast(labels, tf.int32) % 4
        places += 4 * tf.cast(tf.equal(labels, 12.0), tf.int32)
        chosen = tf.gather(flat, places + tf.range(tf.shape(x)[0]) * 4)
        return tf.reduce_mean((chosen * weights[0, 0] - 1.0) ** 2)

    with pytest.raises(ValueError, match="in its own example, .*Received: "):
        train(cut(_model_fn(loss_of)), _BATCH)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: tf.random.uniform([], 1.0, 2.0),
        lambda: 1.0 + tf.abs(tf.random.normal([1])),
    ],
)
def test_a_random_number_without_examples_is_one_number_for_the_batch(draw):
    """Such as the share of a mixture: then the loss is linear in it."""

    def loss_of(x, labels, weights):
        return tf.reduce_mean(tf.matmul(draw() * tf.ones_like(x), weights))

    values, (loss,) = train(cut(_model_fn(loss_of)), _BATCH)
    # loss = number * 4, and each weight's gradient is the number.
    moved = (1.0 - values["weights"]) / 0.1
    np.testing.assert_allclose(moved, np.full([4, 1], loss / 4), rtol=1e-5)


def test_what_the_head_draws_is_drawn_once():
    def loss_of(x, labels, weights):
        products = tf.matmul(x, weights)[:, 0]
        ranked = tf.sort(products)  # combines examples: what follows is the head
        drawn = tf.random.uniform(tf.shape(ranked), 1.0, 2.0)
        return (
            tf.reduce_sum(drawn * tf.stop_gradient(ranked * 0.0 + 1.0)) * weights[0, 0]
        )

    values, (loss,) = train(cut(_model_fn(loss_of)), _BATCH)
    moved = (1.0 - values["weights"][0, 0]) / 0.1
    np.testing.assert_allclose(moved, loss, rtol=1e-5)


def test_the_forward_pass_must_not_read_what_it_changes():
    def loss_of(x, labels, weights):
        seen = v1.get_variable("seen", initializer=0.0, trainable=False)
        with tf.control_dependencies([seen.assign(tf.reduce_mean(x))]):
            return tf.reduce_mean(_errors(x * seen.read_value(), labels, weights))

    with pytest.raises(
        ValueError, match=r"Received: (seen|.*of type AssignVariableOp)"
    ):
        build(_model_fn(loss_of), _BATCH)


def test_what_waits_for_the_update_makes_no_second_one():
    """A number that the train op needs of the batch, and is computed behind the update."""
    model_fn = model_fns.model_fn_of(model_fns.EXACT["codebook"][0])
    theirs, _ = train(model_fn, lambda: make_dataset(["x"]), 2)
    ours, _ = train(cut(model_fn), lambda: make_dataset(["x"]), 2)
    assert relative_difference(ours, theirs) <= 1e-9
