"""Gradient accumulation by this project, in a model_fn."""

import sys

import numpy as np
import tensorflow as tf

from estimator_accum import (
    get_or_create_update_step,
    make_accumulating_train_op,
    make_accumulation_hooks,
)


def input_fn():
    x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices(({"x": x}, 2 * x)).repeat().batch(4)


def model_fn(features, labels, mode):
    slope = tf.compat.v1.get_variable("slope", [1, 1])
    loss = tf.reduce_mean(tf.square(tf.matmul(features["x"], slope) - labels))
    rate = tf.compat.v1.train.cosine_decay(0.3, get_or_create_update_step(), 1000)
    optimizer = tf.compat.v1.train.AdamOptimizer(rate)
    train_op = make_accumulating_train_op(
        loss, optimizer, gradient_accumulation_steps=4, clip_norm=1.0
    )
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, training_hooks=make_accumulation_hooks()
    )


estimator = tf.estimator.Estimator(model_fn, sys.argv[1])
estimator.train(input_fn, steps=150)
estimator.train(input_fn, steps=50)
assert estimator.get_variable_value("update_step") == 50
slope = float(estimator.get_variable_value("slope")[0, 0])
assert abs(slope - 2) < 0.2, slope
print("slope", slope)
