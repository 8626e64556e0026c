"""An Estimator that starts from another one's weights."""

import sys

import numpy as np
import tensorflow as tf


def input_fn():
    x = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
    return tf.data.Dataset.from_tensor_slices(({"x": x}, 2 * x)).repeat().batch(8)


columns = [tf.feature_column.numeric_column("x")]
first = tf.estimator.LinearRegressor(columns, model_dir=sys.argv[1] + "/first")
first.train(input_fn, steps=200)
second = tf.estimator.LinearRegressor(
    columns,
    model_dir=sys.argv[1] + "/second",
    optimizer=tf.keras.optimizers.legacy.SGD(0.0),
    warm_start_from=tf.estimator.WarmStartSettings(
        ckpt_to_initialize_from=first.model_dir, vars_to_warm_start=".*"
    ),
)
second.train(input_fn, steps=1)
for name in ("linear/linear_model/x/weights", "linear/linear_model/bias_weights"):
    ours, theirs = (estimator.get_variable_value(name) for estimator in (second, first))
    np.testing.assert_array_equal(ours, theirs)
    assert np.any(ours)
print("weights", second.get_variable_value("linear/linear_model/x/weights"))
