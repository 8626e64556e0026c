"""Seeds of micro-batches: what they depend on, and that no two are equal."""

import pytest
import tensorflow as tf

from estimator_accum import micro_batch_seed
from estimator_accum.microbatch._batch import WholeBatch
from tests.helpers.models.interfaces import start_session

v1 = tf.compat.v1


def _seeds(graph_seed=1, name="a", steps=(0,), with_other_operations=False):
    with tf.Graph().as_default():
        v1.set_random_seed(graph_seed)
        step = v1.train.get_or_create_global_step()
        if with_other_operations:
            tf.random.uniform([3])
        seed = micro_batch_seed(name)
        with start_session() as session:
            found = []
            for value in steps:
                step.load(value, session)
                found.append(tuple(session.run(seed)))
            return found


def test_a_seed_depends_on_graph_seed_name_and_step_alone():
    (seed,) = _seeds()
    assert _seeds(with_other_operations=True) == [seed]
    others = [*_seeds(graph_seed=2), *_seeds(name="b"), *_seeds(steps=range(1, 5))]
    assert len({seed, *others}) == 7


def test_micro_batches_of_one_batch_have_seeds_of_their_own():
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step()
        batch = WholeBatch({"features": tf.zeros([4])}, "mean")
        with batch.as_current():
            seed = micro_batch_seed("a")
        with start_session() as session:
            found = set()
            for value in (0, 1, 2):
                step.load(value, session)
                for begin in (0, 1, 1000, 2**24 - 1):
                    found.add(tuple(session.run(seed, {batch.begin: begin})))
    assert len(found) == 12


def test_replicas_have_seeds_of_their_own():
    with tf.Graph().as_default():
        strategy = tf.distribute.MirroredStrategy(
            ["/cpu:0", "/cpu:1"],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
        with strategy.scope():
            step = v1.train.get_or_create_global_step()
            seeds = strategy.extended.call_for_each_replica(
                lambda: micro_batch_seed("a")
            )
            seeds = strategy.experimental_local_results(seeds)
        config = v1.ConfigProto(device_count={"CPU": 2}, allow_soft_placement=True)
        with start_session(config) as session:
            found = []
            for _ in range(3):
                found += map(tuple, session.run(seeds))
                session.run(step.assign_add(1))
    assert len(set(found)) == 6


def test_a_graph_without_a_global_step_is_refused():
    with tf.Graph().as_default(), pytest.raises(ValueError, match="from a global step"):
        micro_batch_seed("a")
