"""tensorflow/tensor2tensor, its Adafactor with default arguments, on an embedding."""

import bench
import made_data
import removed
import tensorflow as tf

v1 = tf.compat.v1
output_dir = bench.begin()
# Two packages that other optimizers of its need.
removed.add_module("tensorflow_addons")
removed.add_module("tf_slim")

from tensor2tensor.utils import adafactor


def model_fn(features, labels, mode):
    """Classifies by the mean of embedded words."""
    table = v1.get_variable("table", [105, 32])
    words = tf.reduce_mean(tf.gather(table, features), 1)
    hidden = v1.layers.dense(words, 64, tf.nn.relu)
    logits = v1.layers.dense(hidden, 2)
    loss = v1.losses.sparse_softmax_cross_entropy(labels, logits)
    optimizer = adafactor.AdafactorOptimizer()
    train_op = optimizer.minimize(loss, v1.train.get_global_step())
    return v1.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def input_fn():
    """Returns words [B, T] and labels [B]."""
    examples = made_data.classification({"batch_size": bench.BATCH})
    return examples.map(lambda example: (example["input_ids"], example["label"]))


estimator = v1.estimator.Estimator(model_fn, str(output_dir))
estimator.train(input_fn, max_steps=bench.UPDATES)
