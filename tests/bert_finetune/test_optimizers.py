"""The optimizers of --optimizer."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune.optimization import AdamWeightDecayOptimizer
from bert_finetune.optimizers import (
    AdafactorOptimizer,
    LambOptimizer,
    depth,
    make_optimizer,
)
from bert_finetune.settings import OPTIMIZERS
from estimator_accum import make_accumulating_train_op
from tests.helpers.models.replicas import TWO_CPUS, two_replicas
from tests.helpers.oracles import numpy_reference

v1 = tf.compat.v1
_RATE = 0.01
_ORACLES = {
    "adamw": numpy_reference.AdamW,
    "lamb": numpy_reference.Lamb,
    "adafactor": lambda rate, _: numpy_reference.Adafactor(rate),
    "sgd": lambda rate, _: numpy_reference.Momentum(rate),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("name", "shape", "decay", "share"),
    [
        ("bert/encoder/layer_1/output/dense/kernel", [4, 3], 0.01, 0.9),
        ("bert/encoder/layer_0/output/dense/bias", [4], 0.0, 0.81),
        ("bert/embeddings/word_embeddings", [4, 3], 0.01, 0.729),
        ("output_bias", [2], 0.0, 1.0),
        ("output_weights", [1, 3], 0.01, 1.0),
    ],
)
def test_updates_equal_the_numpy_oracle_at_the_layers_rate(
    settings, optimizer, name, shape, decay, share
):
    random = np.random.default_rng(0)
    gradients = random.normal(size=[12, *shape])
    gradients[3] = 0
    start = random.normal(size=shape)
    oracle = _ORACLES[optimizer](share * _RATE, decay)
    expected = start
    settings = dataclasses.replace(
        settings, optimizer=optimizer, layerwise_lr_decay=0.9
    )
    with tf.Graph().as_default(), v1.Session() as session:
        gradient = v1.placeholder(tf.float64, shape)
        variable = v1.get_variable(name, initializer=start)
        rate = tf.constant(_RATE, tf.float64)
        train_op = make_accumulating_train_op(
            tf.reduce_sum(gradient * variable), make_optimizer(settings, rate, 2), 1
        )
        session.run(v1.global_variables_initializer())
        for value in gradients:
            session.run(train_op, {gradient: value})
            expected = oracle.step(expected, value)
            np.testing.assert_allclose(
                session.run(variable), expected, rtol=1e-7, atol=1e-8
            )


def test_depth_is_counted_from_the_head():
    names = ["output_weights", "bert/pooler/dense/kernel", "bert/encoder/layer_11/x"]
    names += ["bert/encoder/layer_0/x/replica_1", "bert/embeddings/LayerNorm/beta"]
    assert [depth(name, 12) for name in names] == [0, 0, 1, 12, 13]


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdamWeightDecayOptimizer(0.1),
        lambda: LambOptimizer(0.1, tf.constant(3)),
        lambda: AdafactorOptimizer(0.1, tf.constant(3)),
    ],
)
def test_a_gathered_table_is_updated_as_if_its_gradient_were_dense(make):
    def train(look_up):
        with tf.Graph().as_default(), v1.Session() as session:
            table = v1.get_variable("table", initializer=np.ones([5, 2], np.float32))
            ids = v1.placeholder(tf.int32, [None])
            optimizer = make()
            train_op = optimizer.minimize(tf.reduce_sum(look_up(table, ids) ** 2))
            session.run(v1.global_variables_initializer())
            for batch in ([0, 1, 1], [2], [0, 3]):
                session.run(train_op, {ids: batch})
            return session.run([table, *optimizer.variables()])

    sparse = train(tf.gather)
    dense = train(lambda table, ids: tf.matmul(tf.one_hot(ids, 5), table))
    for ours, theirs in zip(sparse, dense, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


_GRADIENTS = np.random.default_rng(1).normal(size=[12, 4, 3]).astype(np.float32)


def _train(settings, optimizer, steps, gradients, folder=None, strategy=None):
    """Returns x after windows of `steps`; saved and restored after 5 micro-steps."""
    settings = dataclasses.replace(settings, optimizer=optimizer)
    with tf.Graph().as_default():
        gradient = v1.placeholder(tf.float32, [None, 4, 3])

        def replica():
            context = tf.distribute.get_replica_context()
            mine = gradient[context.replica_id_in_sync_group]
            start = np.arange(12, dtype=np.float32).reshape([4, 3])
            x = v1.get_variable("x", initializer=start)
            ours = make_optimizer(settings, tf.constant(_RATE), 1)
            return make_accumulating_train_op(tf.reduce_sum(mine * x), ours, steps)

        if strategy is None:
            train_op = replica()
        else:
            with strategy.scope():
                train_ops = strategy.extended.call_for_each_replica(replica)
                train_op = strategy.group(train_ops)
        initialize = v1.global_variables_initializer()
        saver = v1.train.Saver()
        x = next(v for v in v1.global_variables() if v.op.name == "x")
        session = v1.Session(config=TWO_CPUS)
        session.run(initialize)
        for number, value in enumerate(gradients):
            session.run(train_op, {gradient: value})
            if folder is not None and number == 4:
                path = saver.save(session, str(folder / "model"))
                session.close()
                session = v1.Session()
                saver.restore(session, path)
        with session:
            return session.run(x)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_window_is_the_big_batch_and_resumes_in_its_middle(
    settings, optimizer, tmp_path
):
    windows = _GRADIENTS.reshape([6, 2, 4, 3]).mean(1)
    expected = _train(settings, optimizer, 1, windows[:, np.newaxis])
    micro_steps = _GRADIENTS[:, np.newaxis]
    ours = _train(settings, optimizer, 2, micro_steps)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    resumed = _train(settings, optimizer, 2, micro_steps, tmp_path)
    np.testing.assert_array_equal(resumed, ours)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_replicas_train_like_one(settings, optimizer):
    expected = _train(settings, optimizer, 2, _GRADIENTS[:6, np.newaxis])
    pairs = np.stack([_GRADIENTS[:6:2], _GRADIENTS[1:6:2]], axis=1)
    ours = _train(settings, optimizer, 1, pairs, strategy=two_replicas())
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
