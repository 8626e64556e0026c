"""Canned estimators with feature columns."""

import sys

import numpy as np
import tensorflow as tf

RANDOM = np.random.default_rng(0)
NUMBERS = RANDOM.normal(size=200).astype(np.float32)
WORDS = np.where(NUMBERS > 0.3, "high", "low")
COLUMNS = [tf.feature_column.numeric_column("number")]
WORD = tf.feature_column.categorical_column_with_vocabulary_list(
    "word", ["low", "high"]
)


def input_fn(labels, epochs=None):
    features = {"number": NUMBERS, "word": WORDS}
    dataset = tf.data.Dataset.from_tensor_slices((features, labels))
    return dataset.repeat(epochs).batch(20)


is_high = (NUMBERS > 0).astype(np.int64)
classifier = tf.estimator.DNNClassifier(
    [8],
    [*COLUMNS, tf.feature_column.indicator_column(WORD)],
    model_dir=sys.argv[1] + "/classifier",
    optimizer=tf.keras.optimizers.legacy.Adam(0.05),
    config=tf.estimator.RunConfig(tf_random_seed=1),
)
classifier.train(lambda: input_fn(is_high), steps=100)
metrics = classifier.evaluate(lambda: input_fn(is_high, 1))
assert metrics["accuracy"] > 0.9, metrics
classes = [
    int(row["class_ids"][0]) for row in classifier.predict(lambda: input_fn(is_high, 1))
]
assert np.mean(classes == is_high) > 0.9
print("classifier", metrics["accuracy"], metrics["loss"])

regressor = tf.estimator.LinearRegressor(
    [*COLUMNS, WORD], model_dir=sys.argv[1] + "/regressor", optimizer="Adagrad"
)
values = (2 * NUMBERS).astype(np.float32)
regressor.train(lambda: input_fn(values), steps=300)
metrics = regressor.evaluate(lambda: input_fn(values, 1))
assert metrics["average_loss"] < 0.9 * np.var(values), metrics
print("regressor", metrics["average_loss"])

old = tf.compat.v1.estimator.DNNRegressor(
    [4],
    COLUMNS,
    model_dir=sys.argv[1] + "/v1",
    activation_fn=tf.nn.tanh,  # with ReLUs, one run in eight starts with all four dead
    optimizer=tf.compat.v1.train.AdamOptimizer(0.05),
)
old.train(lambda: input_fn(values), steps=100)
metrics = old.evaluate(lambda: input_fn(values, 1))
assert metrics["average_loss"] < 0.9 * np.var(values), metrics
