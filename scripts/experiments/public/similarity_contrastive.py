"""tensorflow/similarity, ContrastiveModel: SimCLR, a train_step of two views."""

import sys
from unittest import mock

import keras_bench
import tensorflow as tf

from estimator_accum.keras import microbatch

# Of plots, tables, data sets and searches, which are not used.
for name in (
    *("bokeh", "bokeh.models", "bokeh.plotting", "distinctipy", "faiss", "matplotlib"),
    *("matplotlib.pyplot", "nmslib", "tabulate", "tensorflow_datasets", "tqdm"),
    *("tqdm.auto", "umap"),
):
    sys.modules[name] = mock.MagicMock(__version__="0")

from tensorflow_similarity.losses import SimCLRLoss
from tensorflow_similarity.models import create_contrastive_model

tf.keras.utils.set_random_seed(1)
layers = tf.keras.layers


def network(inputs: int, *units: int) -> tf.keras.Model:
    first = layers.Input([inputs])
    outputs = layers.Dense(units[0], "tanh")(first)
    return tf.keras.Model(first, layers.Dense(units[1])(outputs))


model = create_contrastive_model(
    backbone=network(12, 16, 12), projector=network(12, 8, 8), algorithm="simclr"
)
model.compile(tf.keras.optimizers.Adam(0.01), loss=SimCLRLoss())
views = keras_bench.normal(12)
keras_bench.train(
    model.trainable_variables,
    model.optimizer,
    (views, views + 0.3 * keras_bench.normal(3)[:, [0, 1, 2] * 4]),
    lambda batches, count: microbatch(model, count).fit(batches, verbose=2),
)
