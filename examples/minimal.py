"""Gets the weights of batches of 32 from micro-batches of 8."""

import numpy as np
import tensorflow as tf

from estimator_accum import make_accumulating_train_op, make_accumulation_hooks
from estimator_accum.compat import enable_estimator

enable_estimator()  # for TensorFlow 2.16 and later; does nothing on 2.15


def model_fn(features, labels, mode, params):
    start = tf.keras.initializers.GlorotUniform(seed=0)
    dense = tf.keras.layers.Dense
    hidden = dense(16, activation="relu", kernel_initializer=start)(features)
    predictions = dense(1, kernel_initializer=start)(hidden)
    loss = tf.reduce_mean((predictions - labels) ** 2)
    train_op = make_accumulating_train_op(  # was: optimizer.minimize(loss, ...)
        loss,
        tf.compat.v1.train.AdamOptimizer(0.01),
        gradient_accumulation_steps=params["steps"],
    )
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, training_hooks=make_accumulation_hooks()
    )


def train(batch_size, steps):
    def input_fn():
        x = np.random.default_rng(0).normal(size=[320, 4]).astype(np.float32)
        examples = tf.data.Dataset.from_tensor_slices((x, x[:, :1] * x[:, 1:2]))
        return examples.repeat(10).batch(batch_size)

    estimator = tf.estimator.Estimator(model_fn, params={"steps": steps})
    estimator.train(input_fn)
    return estimator.get_variable_value("dense/kernel")


small, large = train(batch_size=8, steps=4), train(batch_size=32, steps=1)
print(f"largest difference of a weight: {np.abs(small - large).max():.1e}")
