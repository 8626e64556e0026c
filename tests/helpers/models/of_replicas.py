"""A training step of TensorFlow 2 that runs its replicas."""

import numpy as np
import tensorflow as tf

from estimator_accum import microbatch_step


def difference(strategy) -> float:
    """Returns the largest difference of a step's values, at once and in 3 parts."""
    whole, ours = _values(strategy, tf.function), _values(strategy, microbatch_step)
    pairs = zip(whole, ours, strict=True)
    return max(float(np.max(np.abs(one - other))) for one, other in pairs)


def _values(strategy, wrap) -> list[np.ndarray]:
    """Returns losses and variables of three updates."""
    random = np.random.default_rng(0)
    x, labels = random.normal(size=[69, 6]), random.integers(0, 3, 69)
    with strategy.scope():
        kernel = tf.Variable(random.normal(size=[6, 3]))
        average = tf.Variable(np.float64(0))

    def replica(x, labels):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x @ kernel)
            loss = tf.reduce_sum(losses) / 23
        gradient = tape.gradient(loss, kernel)
        context = tf.distribute.get_replica_context()
        kernel.assign_sub(context.all_reduce("SUM", gradient))
        return loss

    def step(x, labels):
        loss = strategy.reduce("SUM", strategy.run(replica, (x, labels)), None)
        average.assign(0.5 * average + loss)
        return loss

    step = wrap(step) if wrap is tf.function else wrap(step, 3)
    data = tf.data.Dataset.from_tensor_slices((x, labels)).batch(23)
    with strategy.scope():
        batches = strategy.experimental_distribute_dataset(data)
        losses = [step(*batch).numpy() for batch in batches]
    return [*losses, kernel.numpy(), average.numpy()]


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
