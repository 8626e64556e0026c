"""Seeds of micro-batches: no two are equal."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    micro_batch_seed,
    microbatch_model_fn,
)
from estimator_accum.seed import seed_of_draw
from tests.helpers.models.interfaces import sgd, start_session
from tests.helpers.models.microbatch_runs import input_fn_of, spec_of
from tests.helpers.models.replicas import TWO_CPUS, two_replicas
from tests.helpers.tables import first

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


def test_a_graph_without_a_seed_draws_other_numbers_at_each_start():
    first, second = (_seeds(None, steps=range(3)) for _ in range(2))
    assert len({*first, *second}) == 6
    numbers = [[number for _, number in seeds] for seeds in (first, second)]
    assert numbers == [[0, 1, 2]] * 2


def test_an_operation_with_a_seed_of_its_own_draws_the_same_at_each_start():
    seeds = {}
    for op_seed in (None, 5):
        for graph_seed in (None, None, 1, 1):
            with tf.Graph().as_default(), start_session() as session:
                v1.set_random_seed(graph_seed)
                v1.train.get_or_create_global_step().load(0, session)
                drawn = tf.random.uniform([3], seed=op_seed, name="drawn").op
                seed = seed_of_draw(drawn, is_shared=True)
                seeds.setdefault((op_seed, graph_seed), []).append(
                    tuple(session.run(seed))
                )
    numbers = {key: len(set(values)) for key, values in seeds.items()}
    assert numbers == {(None, None): 2, (None, 1): 1, (5, None): 1, (5, 1): 1}


@pytest.mark.parametrize("moves", [True, False])
def test_micro_batches_of_one_batch_have_seeds_of_their_own(moves):
    seeds = set()

    def note(seed):
        seeds.add(tuple(seed))
        return np.float32(1)

    def model_fn(features, labels, mode):
        one = tf.numpy_function(note, [micro_batch_seed("a")], tf.float32, False)
        x = v1.get_variable("x", initializer=1.0)
        loss = tf.reduce_mean(one * x * features["x"])
        step = v1.train.get_global_step() if moves else None
        train_op = AccumulatingOptimizer(sgd(), 1).minimize(loss, step)
        return spec_of(mode, loss, train_op)

    config = tf.estimator.RunConfig(tf_random_seed=1)
    estimator = tf.estimator.Estimator(microbatch_model_fn(model_fn, 4), config=config)
    estimator.train(input_fn_of(3 * 1000, 1000))
    assert len(seeds) == 12
    # Of batches that move global_step, the first number is the name's alone.
    assert len({named for named, _ in seeds}) == (1 if moves else 3)


_MOVES = {
    "by the optimizer": False,
    "by nothing": True,
    "by an assignment": False,
    "to a constant": True,
    "by the other optimizer": True,
    "by the other optimizer, in the same run": False,
    "with the update": True,
}
_FIRST = {*itertools.product(_MOVES, [True])} - {("by the optimizer", True)}
_FIRST |= {
    (move, False) for move in ("by the optimizer", "by nothing", "to a constant")
}


@pytest.mark.parametrize(
    ("move", "is_reference"), first(itertools.product(_MOVES, [True, False]), _FIRST)
)
def test_a_step_that_nothing_moves_is_warned_of(
    move, is_reference, fresh_graph, caplog
):
    is_in_branch = move == "with the update"  # which takes no reference
    v1.get_variable_scope().set_use_resource(is_in_branch or not is_reference)
    step = v1.train.get_or_create_global_step()
    x = v1.get_variable("x", initializer=1.0, use_resource=True)
    loss = x * tf.random.stateless_uniform([], micro_batch_seed("a"))
    moved = {"a": None, "b": None}
    if move == "by the optimizer":
        moved = {"a": step, "b": step}
    if move.startswith("by the other optimizer"):
        moved["b"] = step

    def after_update_ops():
        return [step.assign_add(1)] if is_in_branch else []

    options = {"after_update_ops": after_update_ops}
    train_ops = [
        AccumulatingOptimizer(sgd(), 2, name=name, **options).minimize(loss, counter)
        for name, counter in moved.items()
    ]
    if move.endswith("in the same run"):
        train_ops = [tf.group(train_ops)]
    if move == "by an assignment":
        v1.assign(step, step + 1)
    if move == "to a constant":
        v1.assign(step, 3)
    with start_session() as session:
        session.run(train_ops[0])
    words = (
        "global_step:0 must move with every micro-step, since micro_batch_seed counts"
    )
    assert caplog.text.count(words) == _MOVES[move]
    assert caplog.text.count("Received: the train op a, which") == _MOVES[move]


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
