"""Refusals of a cut batch: the remedy that a message names trains as the plain model_fn."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    get_or_create_update_step,
    make_accumulating_train_op,
    whole_batch_loss,
)
from tests.helpers.models.interception import cut, train

v1 = tf.compat.v1
pytestmark = pytest.mark.once
_X = np.random.default_rng(0).normal(size=[16, 3]).astype(np.float32)
_BATCH = (
    {"x": _X, "ids": np.arange(16) % 5},
    _X[:, :1] - _X[:, 1:2],
)
_CASES = {}


def _case(sentence):
    def add(model):
        _CASES[model.__name__[1:]] = model, sentence
        return model

    return add


def _variable(name, shape, start=1.0):
    return v1.get_variable(name, shape, initializer=v1.constant_initializer(start))


def _sgd(rate=0.1):
    return v1.train.GradientDescentOptimizer(rate)


def _minimize(loss, rate=0.1):
    return _sgd(rate).minimize(loss, v1.train.get_global_step())


def _declared(loss, rate=0.1):
    return make_accumulating_train_op(loss, _sgd(rate), 1)


def _loss(features, labels):
    predicted = tf.matmul(features["x"], _variable("weights", [3, 1]))
    return tf.reduce_mean(tf.square(predicted - labels))


@_case("must not depend on one micro-batch: .*from get_or_create_update_step")
def _rate_of_the_batch(features, labels, is_mended, is_plain):
    loss = _loss(features, labels)
    step = v1.train.get_global_step() if is_plain else get_or_create_update_step()
    number = step if is_mended else tf.reduce_sum(features["ids"])
    rate = 0.1 / (1.0 + tf.cast(number, tf.float32))
    return loss, (_minimize if is_plain else _declared)(loss, rate)


@_case("must not wait for the update.*Group it with the train op")
def _wait_for_the_declared_update(features, labels, is_mended, is_plain):
    count = _variable("count", [], 0.0)
    loss = _loss(features, labels)
    train_op = (_minimize if is_plain else _declared)(loss)
    with tf.control_dependencies([] if is_mended else [train_op]):
        counted = count.assign_add(tf.reduce_sum(features["x"]))
    return loss, tf.group(train_op, counted)


@_case("must not communicate.* Use batch normalization that is not synchronized")
def _mean_over_replicas(features, labels, is_mended, is_plain):
    loss = _loss(features, labels)
    if not is_mended:  # as a synchronized layer computes on several replicas
        mean = tf.reduce_mean(features["x"])
        keys = {
            "group_size": 2,
            "group_key": 1,
            "instance_key": 1,
            "subdiv_offsets": [0],
        }
        kinds = {"merge_op": "Add", "final_op": "Id"}
        loss += tf.raw_ops.CollectiveReduce(input=mean, **keys, **kinds)
    return loss, (_minimize if is_plain else _declared)(loss)


@_case("must not be read by the forward pass after.* Change it after the update")
def _counter_in_the_forward_pass(features, labels, is_mended, is_plain):
    count = v1.get_variable("count", [], tf.float32, v1.zeros_initializer())
    number = count.read_value() if is_mended else count.assign_add(1.0)
    loss = _loss(features, labels) * (1.0 + number)
    train_op = _minimize(loss)
    if is_mended:
        with tf.control_dependencies([train_op]):
            train_op = tf.group(train_op, count.assign_add(1.0))
    return loss, train_op


@_case("must be initialized without the batch.* Initialize it from other values")
def _start_from_the_batch(features, labels, is_mended, is_plain):
    start = tf.zeros([3, 1]) if is_mended else tf.reshape(features["x"][0], [3, 1])
    scale = v1.get_variable("scale", initializer=start)
    predicted = tf.matmul(features["x"], scale)
    loss = tf.reduce_mean(tf.square(predicted - labels))
    return loss, _minimize(loss)


@_case("by this library or by optimizers of its own.* Wrap all optimizers")
def _two_kinds_of_optimizers(features, labels, is_mended, is_plain):
    loss, bias = _loss(features, labels), _variable("bias", [])
    second = tf.reduce_mean(tf.square(labels - bias))

    def wrap(optimizer):
        return optimizer if is_plain else AccumulatingOptimizer(optimizer, 1)

    weights = v1.trainable_variables()[0]
    first_op = wrap(_sgd()).minimize(loss, v1.train.get_global_step(), [weights])
    other = wrap(_sgd()) if is_mended else _sgd()
    return loss, tf.group(first_op, other.minimize(second, var_list=[bias]))


@_case("must have an entry.* Call tf.nn.safe_embedding_lookup_sparse in place of")
def _last_example_without_words(features, labels, is_mended, is_plain):
    safe = tf.nn.safe_embedding_lookup_sparse
    lookup = safe if is_mended else tf.nn.embedding_lookup_sparse
    table = v1.get_variable("table", initializer=_X[:7])
    words = tf.sparse.from_dense(features["ids"][:, None])  # those that are not 0
    predicted = tf.reduce_sum(lookup(table, words, None, combiner="mean"), 1)
    loss = tf.reduce_mean(tf.square(predicted - labels[:, 0]))
    return loss, _minimize(loss)


@_case("made inside of tf.cond.* Make the loss outside")
def _loss_in_a_branch(features, labels, is_mended, is_plain):
    loss, step = _loss(features, labels), v1.train.get_global_step()
    weights = v1.trainable_variables()[0]

    def gradient(scale):
        return tf.gradients(scale * loss, weights)[0]

    early = step < 2
    if is_mended:
        scaled = gradient(tf.cond(early, lambda: 1.0, lambda: 2.0))
    else:
        scaled = tf.cond(early, lambda: gradient(1.0), lambda: gradient(2.0))
    return loss, _sgd().apply_gradients([(scaled, weights)], step)


@_case("must not look up rows of a trainable variable.* pass them in `outputs`")
def _lookups_in_a_loss_of_the_batch(features, labels, is_mended, is_plain):
    table = _variable("table", [5, 2], 0.5)
    weights = _variable("weights", [3, 2])
    scores, ids = tf.matmul(features["x"], weights), features["ids"]

    def combine(scores, ids):
        rows = ids if is_mended else tf.gather(table, ids)
        return tf.reduce_mean(tf.square(scores - tf.reduce_mean(scores, 0) - rows))

    outputs = scores, tf.gather(table, ids) if is_mended else ids
    if is_plain:
        return (loss := combine(*outputs)), _minimize(loss)
    loss = whole_batch_loss(outputs, lambda outputs: combine(*outputs))
    return loss, _declared(loss)


def _scores(features):
    return tf.matmul(features["x"], _variable("weights", [3, 2], 0.3))


def _contrast(scores, targets):
    """Returns a loss that compares all examples."""
    centered = scores - tf.reduce_mean(scores, 0)
    return tf.reduce_mean(tf.square(centered - targets))


def _of_batch(outputs, loss_fn, is_plain):
    if is_plain:
        return loss_fn(outputs)
    return whole_batch_loss(outputs, loss_fn)


def _trained(loss, is_plain, **options):
    if is_plain:
        return loss, _minimize(loss)
    return loss, make_accumulating_train_op(loss, _sgd(), 1, **options)


@_case("in the model_fn itself.* Call it with the results of that")
def _loss_of_the_batch_in_a_branch(features, labels, is_mended, is_plain):
    scores, early = _scores(features), v1.train.get_global_step() < 2

    def loss_of(outputs):
        return _of_batch(outputs, lambda both: _contrast(*both), is_plain)

    if is_mended:
        scores = tf.cond(early, lambda: scores, lambda: 2 * scores)
        return _trained(loss_of((scores, labels)), is_plain)
    loss = tf.cond(
        early, lambda: loss_of((scores, labels)), lambda: loss_of((2 * scores, labels))
    )
    return _trained(loss, is_plain)


@_case(
    "have one row for each example.*Let loss_fn use a tensor that belongs to no exam"
)
def _scalar_output(features, labels, is_mended, is_plain):
    scale = _variable("scale", [])
    outputs = [_scores(features), labels, *([] if is_mended else [scale * 1])]

    def loss_fn(outputs):
        return scale * _contrast(*outputs[:2]) + tf.square(scale)

    return _trained(_of_batch(outputs, loss_fn, is_plain), is_plain)


@_case("`outputs` must be real.*Pass its parts")
def _complex_output(features, labels, is_mended, is_plain):
    scores = _scores(features)
    waves = tf.complex(scores, scores[:, ::-1])
    parts = [tf.math.real(waves), tf.math.imag(waves)]

    def loss_fn(outputs):
        if is_mended:
            *parts, targets = outputs
            waves = tf.complex(*parts)
        else:
            waves, targets = outputs
        return _contrast(tf.abs(waves), targets)

    outputs = [*parts, labels] if is_mended else [waves, labels]
    return _trained(_of_batch(outputs, loss_fn, is_plain), is_plain)


@_case(
    "must not be computed from another whole_batch_loss.* Compute both losses in one"
)
def _loss_of_a_loss(features, labels, is_mended, is_plain):
    scores = _scores(features)
    if is_mended:
        loss = _of_batch(
            (scores, labels),
            lambda both: _contrast(both[0] * _contrast(*both), both[1]),
            is_plain,
        )
    else:
        first = _of_batch((scores, labels), lambda both: _contrast(*both), is_plain)
        second = scores * first, labels
        loss = _of_batch(second, lambda both: _contrast(*both), is_plain)
    return _trained(loss, is_plain)


@_case("must use no tensor of a micro-batch.*Pass it in `outputs`")
def _labels_from_outside(features, labels, is_mended, is_plain):
    def loss_fn(outputs):
        return _contrast(outputs[0], outputs[1] if is_mended else labels)

    loss = _of_batch((_scores(features), labels), loss_fn, is_plain)
    return _trained(loss, is_plain)


@_case("must change no variable.*Change variables in after_update_ops")
def _counter_in_a_loss_of_the_batch(features, labels, is_mended, is_plain):
    count = _variable("count", [], 0.0)

    def loss_fn(outputs):
        scale = 1.0 if is_mended else count.assign_add(1.0)
        return scale * _contrast(*outputs)

    loss = _of_batch((_scores(features), labels), loss_fn, is_plain)
    if is_plain:
        return loss, tf.group(_minimize(loss), count.assign_add(1.0))
    after = {"after_update_ops": lambda: [count.assign_add(1.0)]} if is_mended else {}
    return _trained(loss, is_plain, **after)


@_case("must be taken once.*Compute its users in loss_fn")
def _gradient_of_a_gradient(features, labels, is_mended, is_plain):
    scores = _scores(features)

    def penalized(scores, targets):
        loss = _contrast(scores, targets)
        (gradient,) = tf.gradients(loss, [scores])
        return loss + tf.reduce_sum(tf.square(gradient))

    if is_mended:
        outputs = scores, labels
        loss = _of_batch(outputs, lambda both: penalized(*both), is_plain)
    else:
        loss = _of_batch((scores, labels), lambda both: _contrast(*both), is_plain)
        (gradient,) = tf.gradients(loss, [scores])
        loss += tf.reduce_sum(tf.square(gradient))
    return _trained(loss, is_plain)


@_case("`outputs` must be Tensors.*Convert it, or leave it out")
def _output_of_another_type(features, labels, is_mended, is_plain):
    ids = tf.sparse.from_dense(features["ids"])
    if is_mended:
        ids = tf.sparse.to_dense(ids)
    outputs = _scores(features), labels, ids

    def loss_fn(outputs):
        numbers = tf.cast(outputs[2], tf.float32)
        return tf.reduce_mean(numbers) * _contrast(*outputs[:2])

    return _trained(_of_batch(outputs, loss_fn, is_plain), is_plain)


@_case("A trained variable must not be changed.* Put what changes it into the loss")
def _shift_of_a_trained_variable(features, labels, is_mended, is_plain):
    loss = _loss(features, labels)
    weights, push = v1.trainable_variables()[0], tf.reduce_mean(features["x"])
    if is_mended:
        loss += push * tf.reduce_sum(weights)
        return _trained(loss, is_plain)
    loss, train_op = _trained(loss, is_plain)
    return loss, tf.group(train_op, weights.assign_sub(0.1 * push * tf.ones([3, 1])))


@_case("no static number of examples.* Call `Tensor.set_shape` with None")
def _static_shape(features, labels, is_mended, is_plain):
    features["x"].set_shape([None if is_mended else 16, 3])
    loss = _loss(features, labels)
    return loss, _minimize(loss)


def _model_fn(name, is_mended, is_plain=False):
    def model_fn(features, labels, mode):
        model, _ = _CASES[name]
        loss, train_op = model(features, labels, is_mended, is_plain)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


@pytest.mark.parametrize("name", _CASES)
def test_a_refusal_names_a_remedy(name):
    with pytest.raises((TypeError, ValueError), match=f"(?s){_CASES[name][1]}"):
        train(cut(_model_fn(name, is_mended=False)), _BATCH)


@pytest.mark.parametrize("name", _CASES)
def test_the_remedy_of_a_refusal_trains_as_the_plain_model_fn(name):
    ours, losses = train(cut(_model_fn(name, is_mended=True)), _BATCH, 3)
    theirs, plain = train(_model_fn(name, is_mended=True, is_plain=True), _BATCH, 3)
    np.testing.assert_allclose(losses, plain, 1e-5)
    for variable, value in theirs.items():
        np.testing.assert_allclose(ours[variable], value, 1e-5, 1e-6)


_WEIGHTS = {
    "of no example": (
        lambda y: tf.linspace(0.5, 1.5, 16),
        "compute it from a feature that has a row for each, as tf.ones_like does",
        lambda y: tf.linspace(0.5, 1.5, 16) * tf.ones_like(y[:, 0]),
    ),
    "of another number": (
        lambda y: tf.constant([2.0]),
        "Repeat a value of the whole batch for each of its examples, or make it a scalar",
        lambda y: tf.constant(2.0),
    ),
    "repeated": (
        lambda y: tf.constant([2.0]),
        "Repeat a value of the whole batch for each of its examples",
        lambda y: tf.repeat(tf.constant([2.0]), tf.shape(y)[0]),
    ),
}


@pytest.mark.parametrize("name", _WEIGHTS)
def test_the_remedy_for_a_feature_of_the_whole_batch_trains_as_plain(name):
    refused, sentence, mended = _WEIGHTS[name]

    def input_fn_of(weights):
        def add(features, labels):
            return features | {"weights": weights(labels)}, labels

        def input_fn():
            data = tf.data.Dataset.from_tensor_slices(_BATCH).repeat().batch(16)
            return data.map(add)

        return input_fn

    def model_fn_of(minimize):
        def model_fn(features, labels, mode):
            predicted = tf.matmul(features["x"], _variable("weights", [3, 1]))
            errors = tf.square(predicted - labels)[:, 0]
            loss = tf.reduce_mean(features["weights"] * errors)
            train_op = minimize(loss)
            return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

        return model_fn

    ours = cut(model_fn_of(_declared))
    with pytest.raises(ValueError, match=sentence):
        train(ours, input_fn_of(refused), 1)
    theirs, _ = train(model_fn_of(_minimize), input_fn_of(mended), 3)
    weights, _ = train(ours, input_fn_of(mended), 3)
    np.testing.assert_allclose(weights["weights"], theirs["weights"], 1e-5, 1e-6)


_NORMALIZED = """
import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
v1.disable_eager_execution()
x = v1.placeholder(tf.float32, [None, 8, 8])
gamma, beta = (v1.get_variable(name, [8], use_resource=True) for name in ("g", "b"))
mean = tf.reduce_mean(2 * x, -1, keepdims=True)
variance = tf.reduce_mean(tf.math.squared_difference(2 * x, mean), -1, keepdims=True)
with v1.Session() as session:
    session.run(v1.global_variables_initializer())
    session.run({}, {{x: np.ones([1, 8, 8])}})
"""
_BY_HAND = "(2 * x - mean) * tf.math.rsqrt(variance + 1e-6) * gamma + beta"
_BY_TENSORFLOW = "tf.nn.batch_normalization(2 * x, mean, variance, beta, gamma, 1e-6)"


@pytest.mark.daily  # a process each
@pytest.mark.parametrize(
    ("result", "environment"),
    [(_BY_TENSORFLOW, {}), (_BY_HAND, {"TF_ENABLE_ONEDNN_OPTS": "0"})],
)
def test_a_layer_normalization_runs_by_the_remedies_of_the_page(result, environment):
    code = _NORMALIZED.format(result)
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, check=True
    )
