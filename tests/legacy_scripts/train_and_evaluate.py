"""train_and_evaluate in one process, with exporters, early stopping, hooks."""

import pathlib
import sys

import numpy as np
import tensorflow as tf

INPUTS = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]


def input_fn(epochs=None):
    data = ({"x": INPUTS}, 2 * INPUTS)
    return tf.data.Dataset.from_tensor_slices(data).repeat(epochs).batch(16)


def serving_fn():
    x = tf.compat.v1.placeholder(tf.float32, [None, 1], name="x")
    return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})


class Counter(tf.estimator.SessionRunHook):
    runs = 0

    def after_run(self, run_context, run_values):
        self.runs += 1


estimator = tf.estimator.LinearRegressor(
    [tf.feature_column.numeric_column("x")],
    model_dir=sys.argv[1],
    config=tf.estimator.RunConfig(save_checkpoints_steps=50),
)
counter = Counter()
stopping = tf.estimator.experimental.stop_if_no_decrease_hook(
    estimator, "loss", max_steps_without_decrease=1000
)
metrics, _ = tf.estimator.train_and_evaluate(
    estimator,
    tf.estimator.TrainSpec(input_fn, max_steps=100, hooks=[counter, stopping]),
    tf.estimator.EvalSpec(
        lambda: input_fn(1),
        exporters=[
            tf.estimator.FinalExporter("final", serving_fn),
            tf.estimator.BestExporter(serving_input_receiver_fn=serving_fn),
        ],
        start_delay_secs=0,
        throttle_secs=0,
    ),
)
assert metrics["global_step"] == counter.runs == 100, (metrics, counter.runs)
for exporter in ("final", "best_exporter"):
    exported = list(pathlib.Path(sys.argv[1], "export", exporter).iterdir())
    assert exported, exporter
print("loss", metrics["loss"])
