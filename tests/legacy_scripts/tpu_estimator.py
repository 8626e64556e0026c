"""TPUEstimator, constructed."""

import sys

import tensorflow.compat.v1 as tf

tf.estimator.tpu.TPUEstimator(
    model_fn=lambda features, labels, mode, params: None,
    config=tf.estimator.tpu.RunConfig(model_dir=sys.argv[1]),
    use_tpu=False,
    train_batch_size=8,
)
