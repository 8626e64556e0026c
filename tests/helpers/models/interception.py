"""Trains a model_fn with its gradients intercepted or not, without files.

A model_fn here is what a script without this library has: its own optimizer.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from estimator_accum import microbatch_model_fn, per_example
from tests.helpers.models.little_memory import Memory

v1 = tf.compat.v1
TRAIN = tf.estimator.ModeKeys.TRAIN
# Small graphs are faster as they are: the session would optimize them for seconds.
AS_IT_IS = v1.ConfigProto()
AS_IT_IS.graph_options.rewrite_options.disable_meta_optimizer = True


def cut(model_fn: Callable, micro_batches=4, **options) -> Callable:
    return microbatch_model_fn(model_fn, micro_batches, **options)


def train(
    model_fn: Callable, batches, updates: int = 1, fetch: str | None = None
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Returns the variables after training, and the loss of each update.

    Args:
        model_fn: The model_fn, as Estimator gets it.
        batches: (features, labels) as arrays, the same batch for every update; or an
            input_fn.
        updates: Number of batches.
        fetch: Collection whose tensors are returned in place of the losses.
    """
    with tf.Graph().as_default():
        v1.set_random_seed(7)
        v1.train.get_or_create_global_step()
        spec = model_fn(*tensors_of(batches), mode=TRAIN)
        tensors = spec.loss if fetch is None else v1.get_collection(fetch)
        fetched = []
        hooks = [*spec.training_hooks]
        with v1.train.SingularMonitoredSession(hooks, config=AS_IT_IS) as session:
            for _ in range(updates):
                fetched.append(session.run([spec.train_op, tensors])[1])
            session = session.raw_session()
            variables = {v.op.name: v for v in v1.global_variables()}
            return session.run(variables), fetched


def tensors_of(batches):
    if callable(batches):
        return v1.data.make_one_shot_iterator(batches()).get_next()
    return tf.nest.map_structure(tf.constant, batches)


def build(model_fn: Callable, batches, **options):
    """Returns the spec of `cut(model_fn)`, in a graph of its own."""
    with tf.Graph().as_default():
        v1.train.get_or_create_global_step()
        return cut(model_fn, **options)(*tensors_of(batches), mode=TRAIN)


def short_of_memory(model_fn: Callable, rows: int) -> Callable:
    """Returns `model_fn` on a machine with memory for `rows` examples at once."""

    memory = Memory(lambda examples: examples <= rows)

    def limited(features, labels, mode):
        return model_fn(features, per_example(memory.allocate(labels)), mode)

    return limited
