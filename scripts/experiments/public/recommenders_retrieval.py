"""tensorflow/recommenders, Retrieval: a loss over all pairs of a batch, in `fit`."""

import keras_bench
import tensorflow as tf
import tensorflow_recommenders as tfrs

from estimator_accum.keras import microbatch

tf.keras.utils.set_random_seed(1)
layers = tf.keras.layers


class TwoTowers(tfrs.Model):
    """A network of queries, and one of candidates."""

    def __init__(self):
        super().__init__()
        self.query = tf.keras.Sequential(
            [layers.Dense(16, "relu", input_shape=[12]), layers.Dense(8)]
        )
        self.candidate = tf.keras.Sequential(
            # A bias would add one number to all scores of a query: no gradient.
            [layers.Dense(8, use_bias=False, input_shape=[6], kernel_regularizer="l2")]
        )
        self.task = tfrs.tasks.Retrieval()

    def compute_loss(self, inputs, training=False):
        del training
        query, candidate = self.query(inputs["query"]), self.candidate(inputs["item"])
        return self.task(query, candidate, compute_metrics=False)


model = TwoTowers()
model.compile(tf.keras.optimizers.Adagrad(0.05))
keras_bench.train(
    model.trainable_variables,
    model.optimizer,
    {"query": keras_bench.normal(12), "item": keras_bench.normal(6)},
    lambda batches, count: microbatch(model, count).fit(batches, verbose=2),
)
