"""One task of a TF_CONFIG cluster under MultiWorkerMirroredStrategy."""

import json
import os
import sys
import time

import numpy as np
import tensorflow as tf

tf.compat.v1.disable_eager_execution()  # an evaluator copies the strategy
TASK = json.loads(os.environ["TF_CONFIG"])["task"]


def input_fn(epochs=None):
    x = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    dataset = tf.data.Dataset.from_tensor_slices(({"x": x}, 2 * x))
    return dataset.repeat(epochs).batch(8)


def model_fn(features, labels, mode):
    slope = tf.compat.v1.get_variable("slope", [1, 1])
    loss = tf.reduce_mean(tf.square(tf.matmul(features["x"], slope) - labels))
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode, loss=loss)
    train_op = tf.compat.v1.train.GradientDescentOptimizer(0.2).minimize(
        loss, tf.compat.v1.train.get_or_create_global_step()
    )
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


estimator = tf.estimator.Estimator(
    model_fn,
    config=tf.estimator.RunConfig(
        sys.argv[1],
        train_distribute=tf.distribute.MultiWorkerMirroredStrategy(),
        save_checkpoints_steps=50,
        experimental_max_worker_delay_secs=0,
    ),
)
tf.estimator.train_and_evaluate(
    estimator,
    tf.estimator.TrainSpec(input_fn, max_steps=100),
    tf.estimator.EvalSpec(lambda: input_fn(1), start_delay_secs=1, throttle_secs=1),
)
if TASK["type"] == "evaluator":
    assert os.path.isdir(sys.argv[1] + "/eval")
else:
    while estimator.get_variable_value("global_step") < 100:
        time.sleep(0.1)  # the task that saves may be slower than this one
    slope = float(estimator.get_variable_value("slope")[0, 0])
    assert abs(slope - 2) < 0.01, slope
    print("slope", slope)
