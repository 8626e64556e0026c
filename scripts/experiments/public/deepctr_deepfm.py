"""shenweichen/DeepCTR, DeepFM: TensorFlow's own old Keras, in a loop with a tape."""

import keras_bench
import numpy as np
import tensorflow as tf
from tensorflow.python.keras import layers as keras_layers

from estimator_accum import microbatch_step

keras_layers.LSTM = tf.compat.v1.keras.layers.LSTM

from deepctr.feature_column import DenseFeat, SparseFeat
from deepctr.models import DeepFM

tf.keras.utils.set_random_seed(1)
columns = [SparseFeat("user", 50, 8), SparseFeat("item", 30, 8), DenseFeat("price", 3)]
model = DeepFM(columns, columns, dnn_hidden_units=(16, 8))
optimizer = tf.keras.optimizers.Adam(0.01)


def step(features, labels):
    with tf.GradientTape() as tape:
        losses = tf.keras.losses.binary_crossentropy(labels, model(features))
        loss = tf.reduce_mean(losses) + tf.add_n(model.losses)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss


def fit(batches, count):
    train_step = microbatch_step(step, count)
    for batch in batches:
        train_step(*batch)


price = keras_bench.normal(3)
users, items = np.abs(keras_bench.normal(2) * 5).astype(int).T
features = {"user": users, "item": items, "price": price}
labels = (price[:, :1] > 0).astype("f")
keras_bench.train(model.trainable_variables, optimizer, (features, labels), fit)
