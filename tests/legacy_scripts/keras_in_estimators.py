"""Keras layers in a model_fn; a Keras model as an Estimator."""

import sys

import numpy as np
import tensorflow as tf
from tensorflow.keras.layers import Dense, Input

INPUTS = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]


def input_fn():
    data = (INPUTS, 2 * INPUTS)
    return tf.data.Dataset.from_tensor_slices(data).repeat().batch(16)


def model_fn(features, labels, mode):
    hidden = Dense(4, "relu", kernel_initializer="ones")(features)
    loss = tf.reduce_mean(tf.square(tf.compat.v1.layers.dense(hidden, 1) - labels))
    optimizer = tf.keras.optimizers.legacy.Adam(0.01)
    optimizer.iterations = tf.compat.v1.train.get_or_create_global_step()
    variables = tf.compat.v1.trainable_variables()
    train_op = optimizer.get_updates(loss, variables)[0]
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


estimator = tf.estimator.Estimator(model_fn, sys.argv[1] + "/layers")
estimator.train(input_fn, steps=10)
assert estimator.get_variable_value("dense/kernel").shape == (1, 4)
assert estimator.get_variable_value("global_step") == 10

inputs = Input([1], name="x")
model = tf.keras.Model(inputs, Dense(1)(inputs))
model.compile(tf.keras.optimizers.legacy.SGD(0.1), "mse")
estimator = tf.keras.estimator.model_to_estimator(model, model_dir=sys.argv[1] + "/k")
estimator.train(lambda: input_fn().map(lambda x, y: ({"x": x}, y)), steps=200)
metrics = estimator.evaluate(
    lambda: input_fn().map(lambda x, y: ({"x": x}, y)), steps=4
)
assert metrics["loss"] < 0.1, metrics
print("loss", metrics["loss"])
