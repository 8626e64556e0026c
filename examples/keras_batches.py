"""Trains a Keras model on batches of 256, whole or in micro-batches of 32."""

import keras
import numpy as np

from estimator_accum.keras import microbatch

x = np.random.default_rng(0).normal(size=[2048, 4]).astype("float32")
y = x[:, :1] * x[:, 1:2]


def train(micro_batches):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    hidden = layers.Dense(32, activation="relu")
    model = keras.Sequential([hidden, layers.LayerNormalization(), layers.Dense(1)])
    model = microbatch(model, micro_batches)  # the one line; 1 leaves batches whole
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    history = model.fit(x, y, batch_size=256, epochs=10, verbose=0).history
    return model.get_weights(), history["mae"][-1]


whole, error = train(micro_batches=1)
ours, our_error = train(micro_batches=8)
difference = max(np.abs(a - b).max() for a, b in zip(ours, whole))
print(f"mean absolute error {error:.3f} unsplit, {our_error:.3f} in 8 micro-batches")
print(f"largest difference of a weight: {difference:.1e}")
