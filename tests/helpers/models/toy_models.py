"""Small models that several tests of the core share."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from estimator_accum import get_or_create_update_step, make_accumulating_train_op
from scripts.experiments import optimizer_table

v1 = tf.compat.v1

OPTIMIZERS = optimizer_table.V1_OPTIMIZERS  # name -> optimizer(rate, update_step)
ROWS, WIDTH = 11, 3


class Batch(NamedTuple):
    """inputs [B, WIDTH], ids [B, 2] of embedding rows, targets [B]."""

    inputs: np.ndarray
    ids: np.ndarray
    targets: np.ndarray


def make_batches(count: int, size: int) -> list[Batch]:
    """Returns batches that each look up some rows, repeatedly, but never row 0."""
    random = np.random.default_rng(0)
    return [
        Batch(
            random.normal(size=[size, WIDTH]),
            1 + random.integers(0, ROWS - 1, [size, 1]).repeat(2, axis=1) % (2 + i % 9),
            random.normal(size=size),
        )
        for i in range(count)
    ]


def split(batch: Batch, parts: int) -> list[Batch]:
    cut = [np.array_split(field, parts) for field in batch]
    return [Batch(*fields) for fields in zip(*cut, strict=True)]


class Model(NamedTuple):
    """A regression on dense inputs and an embedding, in the default graph."""

    feeds: Batch
    loss: tf.Tensor
    dense: tf.Variable
    embedding: tf.Variable


def make_model(dtype=tf.float32) -> Model:
    feeds = Batch(
        v1.placeholder(dtype, [None, WIDTH]),
        v1.placeholder(tf.int64, [None, 2]),
        v1.placeholder(dtype, [None]),
    )
    start = np.linspace(-1, 1, WIDTH), np.linspace(-1, 1, ROWS * 2).reshape(ROWS, 2)
    dense = v1.get_variable("dense", initializer=tf.constant(start[0], dtype))
    embedding = v1.get_variable("embedding", initializer=tf.constant(start[1], dtype))
    predicted = tf.linalg.matvec(feeds.inputs, dense)
    predicted += tf.reduce_sum(tf.gather(embedding, feeds.ids), [1, 2])
    loss = tf.reduce_mean(tf.square(predicted - feeds.targets))
    return Model(feeds, loss, dense, embedding)


def train_plain(
    make_optimizer,
    batches,
    dtype=tf.float32,
    clip_norm=None,
    decay=0.0,
    sparse_norm="rows",
):
    """Trains on big batches without this library; returns all values by name."""

    def make_train_op(model):
        step = v1.train.get_or_create_global_step()
        rate = 0.05 / (1.0 + decay * tf.cast(step, dtype))
        optimizer = make_optimizer(rate, step)
        pairs = optimizer.compute_gradients(model.loss)
        if clip_norm is not None:
            gradients, variables = zip(*pairs, strict=True)
            norm = None
            if sparse_norm == "rows":  # sums the slices of a row
                norm = tf.linalg.global_norm([*map(tf.convert_to_tensor, gradients)])
            gradients, _ = tf.clip_by_global_norm(gradients, clip_norm, use_norm=norm)
            pairs = zip(gradients, variables, strict=True)
        return optimizer.apply_gradients(pairs, global_step=step)

    return train(make_train_op, batches, dtype)


def train_accumulating(
    make_optimizer, batches, steps, dtype=tf.float32, decay=0.0, **options
):
    """Trains on the batches cut into `steps` micro-batches; returns values by name."""

    def make_train_op(model):
        update_step = get_or_create_update_step()
        rate = 0.05 / (1.0 + decay * tf.cast(update_step, dtype))
        return make_accumulating_train_op(
            model.loss, make_optimizer(rate, update_step), steps, **options
        )

    micro_batches = [part for batch in batches for part in split(batch, steps)]
    return train(make_train_op, micro_batches, dtype)


def train(make_train_op, batches, dtype=tf.float32):
    """Trains the model by `make_train_op(model)`; returns values by name."""
    with tf.Graph().as_default(), v1.Session() as session:
        model = make_model(dtype)
        train_op = make_train_op(model)
        session.run(v1.global_variables_initializer())
        for batch in batches:
            session.run(train_op, dict(zip(model.feeds, batch, strict=True)))
        variables = v1.global_variables()
        values = session.run(variables)
    return {v.op.name: value for v, value in zip(variables, values, strict=True)}


def relative_difference(ours: dict, theirs: dict, names=None) -> float:
    """Returns the largest difference of a variable, relative to its largest value.

    Without `names`, both must have the same variables, and all are compared.
    """
    if names is None:
        assert ours.keys() == theirs.keys()
        names = theirs
    return max(
        np.max(np.abs(ours[name] - theirs[name]))
        / max(np.max(np.abs(theirs[name])), 1e-30)
        for name in names
    )
