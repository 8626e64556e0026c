"""Model_fns that read the number of examples from a static shape.

n = the static number of examples, or 1 where it is None.
"""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import make_accumulating_train_op, microbatch_model_fn
from tests.helpers.models.interception import build, cut, train

pytestmark = pytest.mark.usefixtures("graph_optimizer")
v1 = tf.compat.v1
_X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
_BATCH = _X, np.ones([8, 1], np.float32)
_SENTENCE = "must be read from tf.shape: .* Received: 8 examples of features, and "


def _by_plain_optimizer(loss):
    optimizer = v1.train.GradientDescentOptimizer(0.1)
    return optimizer.minimize(loss, v1.train.get_global_step())


def _by_this_library(loss):
    return make_accumulating_train_op(loss, v1.train.GradientDescentOptimizer(0.1), 1)


def _model_fn(loss_fn, train_op=_by_plain_optimizer):
    """Returns a model_fn of `loss_fn(errors, features, n)`."""

    def model_fn(features, labels, mode, params=None):
        kernel = v1.get_variable("kernel", [3, 1], initializer=v1.ones_initializer())
        errors = tf.square(tf.matmul(features, kernel) - labels)
        loss = loss_fn(errors, features, features.shape[0] or 1)
        if not isinstance(loss, tuple):
            loss = loss, loss  # the reported one, and that of the optimizer
        return tf.estimator.EstimatorSpec(
            mode, loss=loss[0], train_op=train_op(loss[1])
        )

    return model_fn


def _gradient_penalty(errors, x):
    (gradient,) = tf.gradients(tf.reduce_mean(x**3 * errors), [x])
    return tf.reduce_mean(errors) + tf.reduce_sum(tf.square(gradient))


def _recurrent(x):
    cell = v1.nn.rnn_cell.BasicRNNCell(3)
    return v1.nn.dynamic_rnn(cell, x[..., None], dtype=tf.float32)[0]


_WRONG = {
    "quotient": lambda e, x, n: tf.reduce_sum(e) / n,
    "factor": lambda e, x, n: tf.reduce_sum(e) * (1 / n),
    "root": lambda e, x, n: tf.reduce_sum(e) / np.sqrt(n).astype("f"),
    "cast": lambda e, x, n: tf.reduce_sum(e) / tf.cast(n, tf.float32),
    "ones": lambda e, x, n: tf.reduce_sum(e) / tf.reduce_sum(tf.ones([n])),
    "filled": lambda e, x, n: tf.reduce_sum(e) / tf.reduce_sum(tf.fill([n], 0.5)),
    "numbers": lambda e, x, n: (
        tf.reduce_sum(e) + tf.reduce_sum(tf.cast(tf.range(n), tf.float32))
    ),
    "repeated": lambda e, x, n: (
        tf.reduce_mean(e) + tf.reduce_sum(tf.tile(tf.reduce_mean(e)[None], [n]))
    ),
    "elements": lambda e, x, n: tf.reduce_sum(e) / (x.shape.num_elements() or 1),
    "branch": lambda e, x, n: tf.reduce_mean(e) * (0.5 if x.shape[0] is None else 1),
    "a number that is there anyway": lambda e, x, n: tf.reduce_sum(8 * e) / n,
    "of the optimizer": lambda e, x, n: (tf.reduce_mean(e), tf.reduce_mean(e) / n),
    "in a function": lambda e, x, n: tf.function(lambda e: tf.reduce_sum(e) / n)(e),
}
_RIGHT = {
    "mean": lambda e, x, n: tf.reduce_mean(e),
    "tf.shape": lambda e, x, n: tf.reduce_mean(
        e / tf.cast(tf.shape(x)[0], tf.float32) + e
    ),
    "tf.size": lambda e, x, n: tf.reduce_mean(e / tf.cast(tf.size(e), tf.float32) + e),
    "like others": lambda e, x, n: tf.reduce_mean(
        tf.reshape(e, [-1, 1]) * tf.zeros_like(e) + e * tf.ones_like(x)
    ),
    "tf.losses": lambda e, x, n: v1.losses.mean_squared_error(
        e, tf.ones_like(e), tf.ones_like(e) * 3
    ),
    "tensordot": lambda e, x, n: tf.reduce_mean(
        e * tf.tensordot(tf.stack([x, x], 1), tf.ones([3, 4]), 1)[:, 0]
    ),
    "repeated": lambda e, x, n: tf.reduce_mean(
        tf.tile(e, [1, 3]) + tf.one_hot(tf.argmax(x, 1), 3)
    ),
    "recurrent": lambda e, x, n: tf.reduce_mean(_recurrent(x) * e[..., None]),
    "gradient of a mean": lambda e, x, n: _gradient_penalty(e, x),
    "NumPy's random numbers": lambda e, x, n: tf.reduce_mean(
        e * np.random.normal(size=[1]).astype("f")
    ),
}


@pytest.mark.parametrize("name", _WRONG)
def test_a_number_of_examples_that_python_reads_is_refused(name):
    of_library = ("of the optimizer", "in a function")
    train_op = _by_this_library if name in of_library else _by_plain_optimizer
    with pytest.raises(ValueError, match=f"{_SENTENCE}the model_fn's other numbers"):
        build(_model_fn(_WRONG[name], train_op), _BATCH)


@pytest.mark.parametrize("name", _RIGHT)
def test_any_other_loss_is_trained(name, caplog):
    of_library = ("tf.losses", "gradient of a mean")
    train_op = _by_this_library if name in of_library else _by_plain_optimizer
    build(_model_fn(_RIGHT[name], train_op), _BATCH)
    assert "is not known" not in caplog.text


def test_a_batch_of_unknown_size_has_no_static_size_in_plain_training_either():
    def input_fn():
        return tf.data.Dataset.from_tensor_slices(_BATCH).batch(8)

    build(_model_fn(lambda e, x, n: tf.reduce_mean(e) / n), input_fn)


@pytest.mark.parametrize("mode", ["eval", "infer"])
def test_evaluations_and_predictions_do_not_read_it_either(mode):
    def model_fn(features, labels, mode):
        scores = tf.reduce_sum(features, 1) / (features.shape[0] or 1)
        metrics = {"score": v1.metrics.mean(scores)}
        if mode == "infer":
            return tf.estimator.EstimatorSpec(mode, predictions=scores)
        loss = tf.reduce_mean(labels)
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    with tf.Graph().as_default(), pytest.raises(ValueError, match=_SENTENCE):
        batch = map(tf.constant, _BATCH)
        microbatch_model_fn(model_fn)(*batch, mode=mode)


def test_other_parts_of_a_batch_have_static_sizes_too():
    def model_fn(features, labels, mode):
        rows = [features[name].shape[0] or 1 for name in ("words", "ids")]
        loss = v1.get_variable("w", []) * tf.reduce_mean(labels) / sum(rows)
        train_op = _by_plain_optimizer(loss)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    features = {
        "words": tf.ragged.constant([[1], [2, 3]]),
        "ids": tf.sparse.from_dense([[1, 0], [0, 2]]),
    }
    for name, value in features.items():
        with tf.Graph().as_default(), pytest.raises(ValueError, match="numbers"):
            v1.train.get_or_create_global_step()
            parts = tf.nest.map_structure(tf.constant, value, expand_composites=True)
            both = dict.fromkeys(features, tf.zeros([2, 1])) | {name: parts}
            cut(model_fn)(both, tf.zeros([2]), mode="train")


def test_a_second_call_leaves_the_parameters_and_random_numbers_alone():
    def model_fn(features, labels, mode, params):
        assert params.pop("rate") == 0.1
        return _model_fn(_RIGHT["NumPy's random numbers"])(features, labels, mode)

    def weights(model_fn):
        np.random.seed(3)
        return train(
            lambda *batch, mode: model_fn(*batch, mode=mode, params={"rate": 0.1}),
            _BATCH,
        )[0]

    ours, plain = weights(cut(model_fn)), weights(model_fn)
    np.testing.assert_allclose(ours["kernel"], plain["kernel"], 1e-6)


def test_a_model_fn_that_is_another_one_in_each_call_is_warned_of(caplog):
    numbers = iter(range(2, 9))
    build(_model_fn(lambda e, x, n: tf.reduce_mean(e) * next(numbers)), _BATCH)
    assert "computes with other numbers in each call (2.0, 3.0), so" in caplog.text


def test_a_model_fn_that_cannot_be_called_again_is_warned_of(caplog):
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        scale = tf.constant(2.0)  # of this graph
        model_fn = _model_fn(lambda e, x, n: scale * tf.reduce_mean(e))
        cut(model_fn)(*map(tf.constant, _BATCH), mode="train")
    assert "cannot be called for a batch of static size, so" in caplog.text


def _read_rows(features):
    return tf.zeros([features.shape[0], 4])


def _compute_with_rows(features):
    return tf.zeros([features.shape[0] * 1, 4])


def _fill_a_shape(features):
    return tf.zeros(features.shape)[:, :1] + tf.zeros([1, 4])


def _tile(features):
    return tf.tile(tf.zeros([1, 4]), [features.shape[0], 1])


def _unstack(features):
    return tf.concat(tf.unstack(features[:, None]), 0)


def _with_state(start):
    """Returns a model_fn whose first state is `start(features)`."""
    return _model_fn(lambda e, x, n: tf.reduce_mean(tf.square(e + start(x))))


@pytest.mark.parametrize(
    "start", [_read_rows, _compute_with_rows, _fill_a_shape, _tile, _unstack]
)
def test_a_model_fn_that_needs_the_static_batch_size_is_told_of_tf_shape(start):
    with pytest.raises(ValueError, match=_SENTENCE):
        build(_with_state(start), _BATCH)


def test_a_model_fn_may_read_the_number_of_examples_from_tf_shape():
    model_fn = _with_state(lambda features: tf.zeros([tf.shape(features)[0], 4]))
    ours, _ = train(cut(model_fn), _BATCH, 3)
    theirs, _ = train(_with_state(_read_rows), _BATCH, 3)
    np.testing.assert_allclose(ours["kernel"], theirs["kernel"], 1e-6)


def test_another_error_of_a_model_fn_stays_as_it_is():
    def fail(features):
        raise ValueError("no hidden layers")

    with pytest.raises(ValueError, match="^no hidden layers$"):
        build(_with_state(fail), _BATCH)
