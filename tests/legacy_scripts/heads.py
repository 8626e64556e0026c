"""A model_fn whose EstimatorSpec comes from a head."""

import sys

import numpy as np
import tensorflow as tf

INPUTS = np.random.default_rng(0).normal(size=[120, 2]).astype(np.float32)
IS_POSITIVE = (INPUTS.sum(axis=1, keepdims=True) > 0).astype(np.int64)
HEADS = {
    "regression": (tf.estimator.RegressionHead(), INPUTS[:, :1]),
    "binary": (tf.estimator.BinaryClassHead(), IS_POSITIVE),
    "multi_class": (tf.estimator.MultiClassHead(3), IS_POSITIVE + 1),
    "multi_label": (
        tf.estimator.MultiLabelHead(2),
        np.concatenate([IS_POSITIVE, 1 - IS_POSITIVE], axis=1),
    ),
}


def model_fn(features, labels, mode, params):
    head = HEADS[params["head"]][0]
    optimizer = tf.keras.optimizers.legacy.SGD(0.3)
    optimizer.iterations = tf.compat.v1.train.get_or_create_global_step()
    layer = tf.compat.v1.layers.Dense(head.logits_dimension)
    return head.create_estimator_spec(
        features,
        mode,
        layer(features["x"]),
        labels=labels,
        optimizer=optimizer,
        trainable_variables=layer.trainable_weights,
        update_ops=[],
    )


for name, (_, labels) in HEADS.items():

    def input_fn(epochs=None, labels=labels):
        data = ({"x": INPUTS}, labels)
        return tf.data.Dataset.from_tensor_slices(data).repeat(epochs).batch(20)

    folder = f"{sys.argv[1]}/{name}"
    estimator = tf.estimator.Estimator(model_fn, folder, params={"head": name})
    estimator.train(input_fn, steps=2)
    before = estimator.evaluate(lambda: input_fn(1))
    estimator.train(input_fn, steps=60)
    after = estimator.evaluate(lambda: input_fn(1))
    assert after["loss"] < before["loss"], (name, before, after)
    assert len(list(estimator.predict(lambda: input_fn(1)))) == 120
    print(name, after["loss"])
