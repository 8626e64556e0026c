"""tensorflow/neural-structured-learning: a loss of inputs moved by their gradients."""

import keras_bench
import neural_structured_learning as nsl
import numpy as np
import tensorflow as tf

from estimator_accum.keras import microbatch

tf.keras.utils.set_random_seed(1)
layers = tf.keras.layers
network = tf.keras.Sequential(
    [
        layers.Input([12], name="feature"),
        layers.Dense(16, "tanh"),
        layers.Dense(3, "softmax"),
    ]
)
config = nsl.configs.make_adv_reg_config(multiplier=0.2, adv_step_size=0.05)
model = nsl.keras.AdversarialRegularization(network, adv_config=config)
model.compile(
    tf.keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", ["accuracy"]
)
features = keras_bench.normal(12)
keras_bench.train(
    network.trainable_variables,
    model.optimizer,
    {"feature": features, "label": np.argmax(features[:, :3], 1)},
    lambda batches, count: microbatch(model, count).fit(batches, verbose=2),
)
