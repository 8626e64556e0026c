"""A script in the style of TensorFlow 1: flags, app.run, no v2 behavior."""

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.compat.v1.estimator import ModeKeys
from tensorflow.estimator import Estimator, RunConfig

tf.disable_v2_behavior()
tf.flags.DEFINE_string("model_dir", None, "Where to.")
tf.flags.DEFINE_integer("steps", 50, "How long.")
FLAGS = tf.flags.FLAGS
INPUTS = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]


def model_fn(features, labels, mode):
    predicted = tf.layers.dense(features["x"], 1, name="dense")
    loss = tf.losses.mean_squared_error(labels, predicted)
    if mode == ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode, loss=loss)
    train_op = tf.train.GradientDescentOptimizer(0.3).minimize(
        loss, global_step=tf.train.get_global_step()
    )
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def main(argv):
    assert argv[1:] == [], argv
    input_fn = tf.estimator.inputs.numpy_input_fn(
        {"x": INPUTS}, 2 * INPUTS, batch_size=16, num_epochs=None, shuffle=False
    )
    estimator = Estimator(model_fn, FLAGS.model_dir, RunConfig(tf_random_seed=1))
    estimator.train(input_fn, steps=FLAGS.steps)
    metrics = estimator.evaluate(input_fn, steps=4)
    assert metrics["loss"] < 0.01, metrics
    assert metrics["global_step"] == FLAGS.steps
    tf.logging.info("done")
    print("loss", metrics["loss"])


if __name__ == "__main__":
    tf.app.run()
