"""A custom model_fn: train, resume from the checkpoint, evaluate, predict."""

import sys

import numpy as np
import tensorflow as tf

INPUTS = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]


def input_fn():
    data = ({"x": INPUTS}, 3 * INPUTS[:, 0] + 1)
    return tf.data.Dataset.from_tensor_slices(data).batch(16)


def model_fn(features, labels, mode):
    slope = tf.compat.v1.get_variable("slope", [1], initializer=tf.zeros_initializer())
    bias = tf.compat.v1.get_variable("bias", [], initializer=tf.zeros_initializer())
    predicted = tf.linalg.matvec(features["x"], slope) + bias
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"y": predicted})
    loss = tf.compat.v1.losses.mean_squared_error(labels, predicted)
    tf.summary.scalar("bias", bias)
    if mode == tf.estimator.ModeKeys.EVAL:
        error = tf.compat.v1.metrics.mean_absolute_error(labels, predicted)
        keras_error = tf.keras.metrics.MeanAbsoluteError()
        keras_error.update_state(labels, predicted)
        return tf.estimator.EstimatorSpec(
            mode,
            loss=loss,
            eval_metric_ops={"error": error, "keras_error": keras_error},
        )
    optimizer = tf.compat.v1.train.AdamOptimizer(0.1)
    train_op = optimizer.minimize(
        loss, global_step=tf.compat.v1.train.get_or_create_global_step()
    )
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


estimator = tf.estimator.Estimator(model_fn, sys.argv[1])
estimator.train(input_fn)  # 4 steps
estimator = tf.estimator.Estimator(model_fn, sys.argv[1])
estimator.train(lambda: input_fn().repeat(), max_steps=200)
metrics = estimator.evaluate(input_fn)
assert metrics["global_step"] == 200, metrics
assert metrics["loss"] < 0.01, metrics
assert abs(metrics["error"] - metrics["keras_error"]) < 1e-6, metrics
predicted = [float(row["y"]) for row in estimator.predict(input_fn)]
np.testing.assert_allclose(predicted, 3 * INPUTS[:, 0] + 1, atol=0.3)
print("loss", metrics["loss"])
