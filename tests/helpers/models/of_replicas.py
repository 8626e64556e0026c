"""A training step of TensorFlow 2 that runs its replicas."""

import itertools
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from estimator_accum import microbatch_step
from tests.helpers.models.memory_errors import memory_errors


def difference(strategy) -> float:
    """Returns the largest difference of a step's values, at once and in micro-batches.

    Memory runs out after any micro-batch of any pass, see `each_number`.
    """
    with memory_errors() as errors:
        ours = _values(strategy, microbatch_step, errors.each_number())
    whole = _values(strategy, tf.function, range(errors.batches))
    pairs = zip(whole, ours, strict=True)
    return max(float(np.max(np.abs(one - other))) for one, other in pairs)


def _values(strategy, wrap, numbers: Iterable) -> list[np.ndarray]:
    """Returns losses and variables after one of three batches for each of `numbers`."""
    random = np.random.default_rng(0)
    x, labels = random.normal(size=[69, 6]), random.integers(0, 3, 69)
    with strategy.scope():
        variables = [tf.Variable(random.normal(size=[n, 3])) for n in (6, 3)]
        average = tf.Variable(np.float64(0))

    def replica(x, labels):
        kernel, table = variables
        with tf.GradientTape() as tape:
            logits = x @ kernel + tf.gather(table, labels)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_sum(losses) / 23
        context = tf.distribute.get_replica_context()
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, variables))
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(context.all_reduce("SUM", gradient))
        return loss

    def step(x, labels):
        loss = strategy.reduce("SUM", strategy.run(replica, (x, labels)), None)
        average.assign(0.5 * average + loss)
        return loss

    step = wrap(step)
    data = tf.data.Dataset.from_tensor_slices((x, labels)).batch(23)
    with strategy.scope():
        batches = strategy.experimental_distribute_dataset(data)
        pairs = zip(numbers, itertools.cycle(batches))
        losses = [step(*batch).numpy() for _, batch in pairs]
    return [*losses, *(v.numpy() for v in (*variables, average))]


def refusal(strategy) -> str:
    """Returns the message on a batch that is not distributed."""
    with strategy.scope():
        kernel = tf.Variable(1.0)

    def replica(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * kernel)
        return tape.gradient(loss, kernel)

    step = microbatch_step(lambda x: strategy.run(replica, (x,)), 2)
    try:
        with strategy.scope():
            step(tf.ones([4]))
    except ValueError as error:
        return str(error)
    return ""
