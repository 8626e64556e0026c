"""Seeds of micro-batches: no two are equal."""

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import micro_batch_seed, microbatch_model_fn
from tests.helpers.models.interfaces import start_session
from tests.helpers.models.microbatch_runs import by_train_op, input_fn_of, spec_of
from tests.helpers.models.replicas import TWO_CPUS, two_replicas

v1 = tf.compat.v1


def _seeds(graph_seed=1, name="a", steps=(0,), with_other_operations=False):
    with tf.Graph().as_default():
        v1.set_random_seed(graph_seed)
        step = v1.train.get_or_create_global_step()
        if with_other_operations:
            tf.random.uniform([3])
        seed = micro_batch_seed(name)
        with start_session() as session:
            seeds = []
            for value in steps:
                step.load(value, session)
                seeds.append(tuple(session.run(seed)))
            return seeds


def test_a_seed_depends_on_graph_seed_name_and_step_alone():
    (seed,) = _seeds()
    assert _seeds(with_other_operations=True) == [seed]
    others = [*_seeds(graph_seed=2), *_seeds(name="b"), *_seeds(steps=range(1, 5))]
    assert len({seed, *others}) == 7


def test_micro_batches_of_one_batch_have_seeds_of_their_own():
    seeds = set()

    def note(seed):
        seeds.add(tuple(seed))
        return np.float32(1)

    def model_fn(features, labels, mode):
        one = tf.numpy_function(note, [micro_batch_seed("a")], tf.float32, False)
        x = v1.get_variable("x", initializer=1.0)
        loss = tf.reduce_mean(one * x * features["x"])
        return spec_of(mode, loss, by_train_op("sgd")(loss))

    estimator = tf.estimator.Estimator(microbatch_model_fn(model_fn, 4))
    estimator.train(input_fn_of(3 * 1000, 1000))
    assert len(seeds) == 12


def test_replicas_have_seeds_of_their_own():
    with tf.Graph().as_default():
        strategy = two_replicas()
        with strategy.scope():
            step = v1.train.get_or_create_global_step()
            seeds = strategy.extended.call_for_each_replica(
                lambda: micro_batch_seed("a")
            )
            seeds = strategy.experimental_local_results(seeds)
        with start_session(TWO_CPUS) as session:
            pairs = []
            for _ in range(3):
                pairs += map(tuple, session.run(seeds))
                session.run(step.assign_add(1))
    assert len(set(pairs)) == 6


def test_a_graph_without_a_global_step_is_refused():
    with tf.Graph().as_default(), pytest.raises(ValueError, match="from a global step"):
        micro_batch_seed("a")
