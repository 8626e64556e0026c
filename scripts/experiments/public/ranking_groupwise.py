"""tensorflow/ranking, groupwise scoring of lists: softmax loss, Adagrad."""

import sys
import types

import bench
import made_data
import removed
import tensorflow as tf

v1 = tf.compat.v1
output_dir = bench.begin()
# Keras layers, serving and BERT, which need packages of their own.
for name in ("tensorflow_ranking.extension", "tensorflow_ranking.python.keras"):
    sys.modules[name] = types.ModuleType(name)
removed.add_module("tensorflow_serving.apis.input_pb2")

import tensorflow_ranking as tfr


def score(context_features, group_features, mode, params, config):
    """Returns a score of each item of the group."""
    del context_features, mode, params, config
    x = v1.layers.flatten(group_features["x"])
    return v1.layers.dense(v1.layers.dense(x, 16, tf.nn.relu), 1)


def train_op_fn(loss):
    """Returns the train op of the package's own example."""
    optimizer = v1.train.AdagradOptimizer(0.1)
    step = v1.train.get_global_step()
    gradients, variables = zip(*optimizer.compute_gradients(loss), strict=True)
    gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
    return optimizer.apply_gradients(zip(gradients, variables, strict=True), step)


head = tfr.head.create_ranking_head(
    tfr.losses.make_loss_fn(tfr.losses.RankingLossKey.SOFTMAX_LOSS),
    train_op_fn=train_op_fn,
)
model_fn = tfr.model.make_groupwise_ranking_fn(score, group_size=1, ranking_head=head)
estimator = v1.estimator.Estimator(model_fn, str(output_dir))
estimator.train(made_data.lists, max_steps=bench.UPDATES)
