"""The spot check lets rounding alone, in any precision of products.

python -m pytest tests/estimator_accum/unedited/test_rounded_products.py -s --looks=1000
"""

import collections
import contextlib
import functools
import itertools
import resource

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune.bert_config import BertConfig
from estimator_accum.microbatch.own_optimizer import derivation, spot_check
from estimator_accum.microbatch.own_optimizer.late_products import (
    factors_of_late_products,
)
from tests.helpers.models import original_bert
from tests.helpers.models.interception import cut, train
from tests.helpers.oracles.rounded_products import DIGITS, round_products
from tests.helpers.tables import rows

v1 = tf.compat.v1
_EXAMPLES, _UPDATES = 32, 2


def _dense(x, units, name, activation=tf.nn.relu):
    start = v1.initializers.he_normal(seed=len(name))
    return v1.layers.dense(x, units, activation, kernel_initializer=start, name=name)


def _deep(x, _):
    for i in range(24):
        x = _dense(x, 32, f"layer_{i}")
    return x


@tf.custom_gradient
def _steps(x):
    return tf.round(4 * tf.minimum(x, 4.0)) / 4, lambda d: d


def _quantized(x, _):
    """Activations of 4 bits, whose steps no gradient sees."""
    for i in range(4):
        x = _dense(x, 32, f"layer_{i}")
        x = _steps(x)
    return x


def _best(x, _):
    """The best 4 of 32 units, and the places of the best one."""
    x = _dense(x, 32, "first")
    threshold = tf.nn.top_k(x, 4).values[:, -1:]
    return _dense(x * tf.cast(x >= threshold, x.dtype), 32, "second")


def _vgg(x, _):
    x = tf.reshape(x, [-1, 8, 8, 1])
    for i, filters in enumerate([8, 8, 16, 16]):
        start = v1.initializers.he_normal(seed=i)
        kernel = v1.get_variable(
            f"kernel_{i}", [3, 3, x.shape[-1], filters], None, start
        )
        x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
        if i % 2:
            x = tf.nn.max_pool2d(x, 2, 2, "VALID")
    return tf.reshape(x, [-1, 2 * 2 * 16])


def _factors(x, _):
    """Weights that are products of two factors, as merged LoRA's."""
    for i in range(3):
        start = v1.initializers.random_normal(0, 0.3, seed=i)
        one, two = (v1.get_variable(f"{i}_{j}", [64, 64], None, start) for j in "ab")
        x = tf.nn.relu(x @ (one @ two) / 5)
    return x


def _bert(layers, width, heads):
    config = BertConfig(
        vocab_size=100,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=16,
    )

    def pooled(_, ids):
        mask, segments = tf.ones_like(ids), tf.zeros_like(ids)
        return original_bert.pooled_output(
            config, ids, mask, segments, is_training=True
        )

    return pooled


_NETWORKS = {
    "BERT": _bert(1, 32, 2),
    "24 layers": _deep,
    "quantized": _quantized,
    "best units": _best,
    "VGG": _vgg,
    "weights of factors": _factors,
}
_LARGE = {"BERT": _bert(4, 512, 8)}


def _model_fn(network, digits):
    def model_fn(features, labels, mode):
        logits = _dense(network(features["x"], features["ids"]), 10, "out", None)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=labels, logits=logits
        )
        loss, step = tf.reduce_mean(losses), v1.train.get_or_create_global_step()
        train_op = v1.train.GradientDescentOptimizer(0.01).minimize(loss, step)
        best = tf.reduce_mean(tf.cast(tf.argmax(logits, 1), tf.float32))
        average = v1.get_variable("average", [], initializer=tf.zeros_initializer())
        with tf.control_dependencies([train_op]):
            train_op = average.assign(best)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    def rounded(features, labels, mode):
        spec = cut(model_fn)(features, labels, mode)
        assert round_products(v1.get_default_graph(), digits) > 2
        return spec

    return rounded


def _batches():
    def input_fn():
        random = np.random.default_rng(0)
        for _ in range(_UPDATES):
            x = random.normal(size=[_EXAMPLES, 64]).astype(np.float32)
            ids = random.integers(0, 100, [_EXAMPLES, 16]).astype(np.int32)
            yield {"x": x, "ids": ids}, random.integers(0, 10, _EXAMPLES)

    shapes = {"x": [_EXAMPLES, 64], "ids": [_EXAMPLES, 16]}, [_EXAMPLES]
    types = {"x": tf.float32, "ids": tf.int32}, tf.int64
    return tf.data.Dataset.from_generator(input_fn, types, shapes)


class _Cost:
    """CPU seconds of all looks, and the growth of the process's peak by them [KiB]."""

    def __init__(self):
        self.cpu_secs, self.peak_kib = 0.0, 0

    @contextlib.contextmanager
    def adding(self):
        begin = resource.getrusage(resource.RUSAGE_SELF)
        yield
        end = resource.getrusage(resource.RUSAGE_SELF)
        self.cpu_secs += end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
        self.peak_kib += end.ru_maxrss - begin.ru_maxrss


def _look_often(monkeypatch, number: int) -> _Cost:
    """Lets the spot check look at several examples of each batch; returns the cost."""
    run, cost = spot_check.SpotCheck.run, _Cost()

    def looks(self, session, rows, size, last, *more):
        with cost.adding():
            for i in range(number):
                run(self, session, rows, size, number * last + i, *more)

    monkeypatch.setattr(spot_check.SpotCheck, "run", looks)
    return cost


_ROWS = {*itertools.product(_NETWORKS, DIGITS)}
# Those in bfloat16 alone fail if a bound is too small, and quantized ones in TF32.
_FIRST = {(name, "bfloat16") for name in _NETWORKS} | {("BERT", "another order")}
_FIRST |= {(name, "TF32") for name in ("quantized", "weights of factors")}


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "precision"), rows(sorted(_ROWS), daily=_ROWS - _FIRST)
)
def test_rounding_is_let_alone(name, precision, monkeypatch, request):
    looks = request.config.getoption("--looks")
    network = _NETWORKS[name] if looks < 100 else {**_NETWORKS, **_LARGE}[name]
    cost = _look_often(monkeypatch, looks // _UPDATES)
    ratios, failed, judge = collections.Counter(), [], spot_check._judge

    def noting(ratio, sentence, tensor, difference):
        kind = "groups" if " than " in difference or "groups" in difference else "four"
        kind += " rows" if sentence == spot_check._NO_ROWS else " gradients"
        ratios[kind] = max(ratios[kind], ratio)
        if ratio > 1:
            failed.append((kind, tensor))
        judge(ratio, sentence, tensor, difference)

    monkeypatch.setattr(spot_check, "_judge", noting)
    train(_model_fn(network, DIGITS[precision]), _batches, _UPDATES)
    worst = ", ".join(f"{kind} {ratio:.2g}" for kind, ratio in ratios.items())
    print(f"\n{name}, {precision}: {looks} looks, {len(failed)} repeated; {worst}")
    secs, mib = cost.cpu_secs / looks, cost.peak_kib / 1024
    print(f"a look: {secs:.3f} CPU seconds; all of them: {mib:.0f} MiB of the peak")
    assert {"four rows", "four gradients", "groups rows"} <= {*ratios}


def _size(x):
    return tf.cast(tf.shape(x)[0], x.dtype)


# Gradients of weights and of rows: functions of rows, of these and of what arrives.
_WRONG = {
    "mean": lambda x, dw, dx: (dw / _size(x), dx),
    "same in each": lambda x, dw, dx: (dw + 1e-3, dx),
    "clipped": lambda x, dw, dx: (tf.clip_by_norm(dw, 0.5), dx),
    "without its mean": lambda x, dw, dx: (dw, dx - 0.1 * tf.reduce_mean(dx, 0)),
    # Of one unit: the largest of all is nearly 1, whatever the examples.
    "scaled by the largest": lambda x, dw, dx: (dw, dx / (2 + tf.reduce_max(x[:, 0]))),
}


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "precision", "factors"),
    rows(
        [(name, "TF32", factors) for name in _WRONG for factors in (1, 2)]
        + [(name, "bfloat16", 1) for name in _WRONG if name != "mean"]
        + [("right", precision, 1) for precision in DIGITS],
        {
            *itertools.product(
                _WRONG.keys() - {"mean", "same in each"}, ["TF32"], [1, 2]
            )
        },
    ),
)
def test_examples_that_are_combined_are_found_in_any_precision(
    name, precision, factors, monkeypatch
):
    monkeypatch.setattr(derivation, "check_own_gradients", lambda *_: None)
    change = _WRONG.get(name, lambda x, dw, dx: (dw, dx))

    @tf.custom_gradient
    def product(x, weights):
        def gradients(d):
            dw = tf.matmul(x, d, transpose_a=True)
            return change(x, dw, tf.matmul(d, weights, transpose_b=True))[::-1]

        return tf.matmul(x, weights), gradients

    def network(x, _):
        x = _dense(x, 32, "first", tf.tanh)
        weights = [v1.get_variable(f"weights_{i}", [32, 32]) for i in range(factors)]
        return tf.tanh(product(x, functools.reduce(tf.matmul, weights)))

    is_right = contextlib.nullcontext()
    is_refused = pytest.raises(ValueError, match="must add up to the batch's")
    with is_right if name == "right" else is_refused:
        train(_model_fn(network, DIGITS[precision]), _batches, 1)


@pytest.mark.once
def test_products_of_sums_in_a_loop_of_tensorflow_1_are_let_alone():
    def model_fn(features, labels, mode):
        one, two = (v1.get_variable(name, [3, 3]) for name in "ab")
        rounds = (lambda i, _: i < 2), (lambda i, x: (i + 1, tf.tanh(x @ (one @ two))))
        loss = tf.reduce_mean(tf.while_loop(*rounds, (0, features))[1])
        step = v1.train.get_global_step()
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    def input_fn():
        return tf.data.Dataset.from_tensors((tf.ones([8, 3]), tf.ones([8])))

    v1.disable_control_flow_v2()
    try:
        ours, theirs = (train(f, input_fn)[0] for f in (cut(model_fn), model_fn))
    finally:
        v1.enable_control_flow_v2()
    np.testing.assert_allclose(ours["a"], theirs["a"], rtol=1e-5)


def _loop(layer):
    def twice(x, *weights):
        rounds = (lambda i, _: i < 2), (lambda i, x: (i + 1, layer(x, *weights)))
        return tf.while_loop(*rounds, (0, x))[1]

    return twice


def _branch(layer):
    return lambda x, *weights: tf.cond(
        tf.reduce_sum(x) > 0, lambda: layer(x, *weights), lambda: x
    )


@pytest.mark.once
@pytest.mark.parametrize(
    ("through", "number"),
    [
        (lambda layer: layer, 1),
        (tf.function, 0),
        (lambda layer: tf.function(_loop(layer)), 0),
        (lambda layer: tf.function(_branch(layer)), 0),
    ],
    ids=["as it is", "function", "loop", "branch"],
)
def test_products_of_sums_are_found(through, number):
    """A sum within a function is no tensor of the graph, so no factor is named."""

    def gradients(layer, *weights):
        return tf.gradients(through(layer)(x, *weights), weights)

    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None, 4])
        one, two = (v1.get_variable(name, [4, 4]) for name in "ab")
        late = gradients(lambda x, one, two: tf.tanh(x @ (2 * (one @ two))), one, two)
        early = gradients(lambda x, one: tf.tanh(x @ (2 * one)), one)
        assert factors_of_late_products(early) is None
        assert [len(factors_of_late_products([g])) for g in late] == [number, number]
