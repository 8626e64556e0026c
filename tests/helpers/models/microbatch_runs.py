"""Estimators that train with `microbatch_model_fn` or without it, to be compared."""

import numpy as np
import tensorflow as tf

from estimator_accum import (
    AccumulatingOptimizer,
    make_accumulating_train_op,
    microbatch_model_fn,
)

v1 = tf.compat.v1

WIDTH = 5
OPTIMIZERS = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(0.1),
    "adam": lambda: v1.train.AdamOptimizer(0.01),
    "momentum": lambda: v1.train.MomentumOptimizer(0.05, 0.9),
    "adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "ftrl": lambda: v1.train.FtrlOptimizer(0.1),
}


def make_data(examples: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=[examples, WIDTH]).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True)) + 0.1 * random.normal(size=[examples, 1])
    return x, y.astype(np.float32)


def input_fn_of(examples: int, batch_size: int):
    """Returns an input_fn of batches in order, the last one short."""

    def input_fn():
        x, y = make_data(examples)
        return tf.data.Dataset.from_tensor_slices(({"x": x}, y)).batch(batch_size)

    return input_fn


INPUT = input_fn_of(examples=5 * 16 + 7, batch_size=16)


def save_step(folder) -> None:
    """Writes the checkpoint of a training that has ended at its first step."""
    with tf.Graph().as_default() as graph, v1.Session() as session:
        step = v1.train.create_global_step(graph)
        session.run(step.initializer)
        session.run(v1.assign(step, 1))
        v1.train.Saver().save(session, str(folder / "model.ckpt"))


def hidden_layer(x: tf.Tensor) -> tf.Tensor:
    start = np.linspace(-1, 1, WIDTH * 8).reshape(WIDTH, 8).astype(np.float32)
    kernel = v1.get_variable("hidden", initializer=start)
    return tf.tanh(tf.matmul(x, kernel))


def embedding_layer(x: tf.Tensor) -> tf.Tensor:
    """Returns rows of a table; many are looked up repeatedly, many never."""
    start = np.linspace(-1, 1, 20 * 8).reshape(20, 8).astype(np.float32)
    table = v1.get_variable("table", initializer=start)
    ids = tf.cast(tf.abs(x) * 5, tf.int64) % 20
    return tf.reduce_mean(tf.gather(table, ids), 1)


def output_layer(hidden: tf.Tensor) -> tf.Tensor:
    start = np.linspace(1, -1, 8).reshape(8, 1).astype(np.float32)
    return tf.matmul(hidden, v1.get_variable("output", initializer=start))


def loss_of(features, labels) -> tf.Tensor:
    predicted = output_layer(hidden_layer(features["x"]))
    return tf.reduce_mean(tf.square(predicted - labels))


def words_input_fn():
    """Returns three batches of numbers, words and classes, the last one short."""
    x, y = make_data(39)
    words = np.array([f"word {abs(int(n * 9)) % 11}" for n in y[:, 0]])
    features, labels = {"x": x, "word": words}, (y[:, 0] > 0).astype(np.int64)
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(16)


def word_columns():
    """Returns the columns of the numbers, the words, and the words' embedding."""
    numeric = tf.feature_column.numeric_column("x", [WIDTH])
    words = tf.feature_column.categorical_column_with_hash_bucket("word", 20)
    start = v1.constant_initializer(0.1)
    embedded = tf.feature_column.embedding_column(words, 3, initializer=start)
    return numeric, words, embedded


def make_model_fn(make_train_op, body=hidden_layer):
    """Returns a regression model_fn whose train op is `make_train_op(loss)`."""

    def model_fn(features, labels, mode):
        predicted = output_layer(body(features["x"]))
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, predictions=predicted)
        loss = tf.reduce_mean(tf.square(predicted - labels))
        train_op = None
        if mode == tf.estimator.ModeKeys.TRAIN:
            train_op = make_train_op(loss)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def spec_of(mode, loss, train_op, **more):
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, **more)


def plain(optimizer):
    """Returns a function that makes the train op without this library."""
    return lambda loss: OPTIMIZERS[optimizer]().minimize(
        loss, v1.train.get_or_create_global_step()
    )


def by_train_op(optimizer, **options):
    return lambda loss: make_accumulating_train_op(
        loss, OPTIMIZERS[optimizer](), 1, **options
    )


def by_optimizer(optimizer, **options):
    return lambda loss: AccumulatingOptimizer(
        OPTIMIZERS[optimizer](), 1, **options
    ).minimize(loss, v1.train.get_or_create_global_step())


class Fetch(v1.train.SessionRunHook):
    """Records the value of a collection's tensor in every run of the train op."""

    def __init__(self, collection):
        self.values = []
        self._collection = collection

    def begin(self):
        (self._tensor,) = v1.get_collection(self._collection)

    def before_run(self, run_context):
        return v1.train.SessionRunArgs(self._tensor)

    def after_run(self, run_context, run_values):
        self.values.append(run_values.results)


def train(model_fn, folder, input_fn, hooks=(), max_steps=None):
    """Trains to the end of the data; returns every saved variable."""
    config = tf.estimator.RunConfig(
        str(folder), tf_random_seed=7, log_step_count_steps=None, save_summary_steps=1
    )
    estimator = tf.estimator.Estimator(model_fn, config=config)
    estimator.train(input_fn, hooks=list(hooks), max_steps=max_steps)
    return variables_of(estimator)


def variables_of(estimator) -> dict[str, np.ndarray]:
    return {
        name: estimator.get_variable_value(name)
        for name in estimator.get_variable_names()
    }


def train_in_micro_batches(
    model_fn, folder, input_fn, micro_batches, hooks=(), max_steps=None, **options
):
    model_fn = microbatch_model_fn(model_fn, micro_batches, **options)
    return train(model_fn, folder, input_fn, hooks, max_steps)


def difference(ours: dict, theirs: dict) -> float:
    """Returns the largest difference of any variable that a plain run saves."""
    return max(np.max(np.abs(ours[name] - value)) for name, value in theirs.items())
