"""A training step of TensorFlow 2 that runs its replicas."""

import functools
import itertools
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from estimator_accum import microbatch_step
from tests.helpers.models.memory_errors import memory_errors


def difference(strategy) -> float:
    """Returns the largest difference of a step's values, at once and in micro-batches.

    Memory runs out after any micro-batch of any pass, see `each_number`.
    """
    return _difference(functools.partial(_values, strategy))


def differences(strategy, makers: Iterable[Callable]) -> dict[str, float]:
    """Returns that of steps which run in each replica, by the names of their makers.

    Args:
        strategy: The strategy, of two replicas.
        makers: Return a step, its variables, which replicas average, and arguments.
    """
    return {
        make.__name__: _difference(functools.partial(_values_of, strategy, make))
        for make in makers
    }


def _difference(values_of: Callable) -> float:
    with memory_errors() as errors:
        ours = values_of(microbatch_step, errors.each_number())
    whole = values_of(tf.function, range(errors.batches))
    pairs = zip(whole, ours, strict=True)
    return max(float(np.max(np.abs(one - other))) for one, other in pairs)


def _values_of(strategy, make, wrap, numbers: Iterable) -> list[np.ndarray]:
    """Returns variables after the same batch for each of `numbers`, and results."""

    def averaged(next_creator, **options):
        ways, value = tf.VariableAggregation, np.asarray(options["initial_value"])
        is_float = np.issubdtype(value.dtype, np.floating)
        options["aggregation"] = ways.MEAN if is_float else ways.ONLY_FIRST_REPLICA
        return next_creator(**options)

    with strategy.scope():
        with tf.variable_creator_scope(averaged):
            step, variables, arguments = make()
        step = wrap(functools.partial(_in_replicas, strategy, step))
        data = tf.data.Dataset.from_tensor_slices(arguments).repeat(2).batch(43)
        batch = next(iter(strategy.experimental_distribute_dataset(data)))
        results = [step(*batch) for _ in numbers]
        flat = [result for result in tf.nest.flatten(results) if result is not None]
        parts = [p for r in flat for p in strategy.experimental_local_results(r)]
    return [np.asarray(tf.convert_to_tensor(t), float) for t in (*parts, *variables)]


def _in_replicas(strategy, step, *batch):
    return strategy.run(step, batch)


def _values(strategy, wrap, numbers: Iterable) -> list[np.ndarray]:
    """Returns losses and variables after one of three batches for each of `numbers`."""
    random = np.random.default_rng(0)
    x, labels = random.normal(size=[69, 6]), random.integers(0, 3, 69)
    with strategy.scope():
        variables = [tf.Variable(random.normal(size=[n, 3])) for n in (6, 3)]
        variables.append(tf.Variable(np.float64(0.5)))
        average = tf.Variable(np.float64(0))

    def replica(x, labels):
        kernel, table, temperature = variables
        with tf.GradientTape() as tape:
            logits = x @ kernel + tf.gather(table, labels)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            pairs = tf.tanh(logits @ tf.transpose(logits)) / temperature
            loss = tf.reduce_sum(losses) / 23 + tf.reduce_mean(pairs**2)
        context = tf.distribute.get_replica_context()
        gradients = [*map(tf.convert_to_tensor, tape.gradient(loss, variables))]
        gradients = context.all_reduce("SUM", gradients)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
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
