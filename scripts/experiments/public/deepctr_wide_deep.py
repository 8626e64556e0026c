"""shenweichen/DeepCTR, WDLEstimator: losses that sum, for Ftrl beside Adagrad."""

import bench
import made_data
import removed
import tensorflow as tf
from tensorflow.python.keras import layers as keras_layers

v1 = tf.compat.v1
output_dir = bench.begin()
removed.add_estimator("canned.head", "canned.optimizers")
keras_layers.LSTM = v1.keras.layers.LSTM

from deepctr.estimator import WDLEstimator

columns = tf.feature_column
ids = columns.categorical_column_with_identity("id", 50)
number = columns.numeric_column("number", [3])
estimator = WDLEstimator(
    [ids, number],
    [columns.embedding_column(ids, 8), number],
    dnn_hidden_units=(16, 8),
    config=v1.estimator.RunConfig(str(output_dir), tf_random_seed=1),
)
estimator.train(made_data.clicks, max_steps=bench.UPDATES)
