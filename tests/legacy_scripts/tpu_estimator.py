"""TPUEstimator without a TPU: train with hooks, evaluate, predict, export."""

import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

SIZES = {}  # mode -> params["batch_size"]
INPUTS = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]


class Counter(tf.train.SessionRunHook):
    runs = 0

    def after_run(self, run_context, run_values):
        self.runs += 1


COUNTERS = {mode: Counter() for mode in ("training", "evaluation", "prediction")}


def input_fn(params):
    dataset = tf.data.Dataset.from_tensor_slices(({"x": INPUTS}, 2 * INPUTS))
    dataset = dataset.repeat(10 if params["mode"] == "train" else 1)
    return dataset.batch(params["batch_size"], drop_remainder=True)


def model_fn(features, labels, mode, params):
    SIZES[mode] = params.get("batch_size")
    predicted = tf.layers.dense(features["x"], 1, name="dense")
    spec = {"mode": mode, "predictions": {"y": predicted}}
    spec |= {f"{name}_hooks": [hook] for name, hook in COUNTERS.items()}
    if mode != tf.estimator.ModeKeys.PREDICT:
        loss = tf.losses.mean_squared_error(labels, predicted)
        optimizer = tf.train.GradientDescentOptimizer(0.3)
        spec |= {
            "loss": loss,
            "train_op": optimizer.minimize(loss, tf.train.get_global_step()),
            "eval_metrics": (metric_fn, {"labels": labels, "predicted": predicted}),
            "host_call": (host_call, [tf.reshape(loss, [1])]),
            "scaffold_fn": tf.train.Scaffold,
        }
    return tf.estimator.tpu.TPUEstimatorSpec(**spec)


def metric_fn(labels, predicted):
    return {"error": tf.metrics.mean_absolute_error(labels, predicted)}


def host_call(losses):
    return tf.summary.scalar("loss_of_host_call", losses[0])


def serving_fn():
    x = tf.placeholder(tf.float32, [None, 1])
    return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})


config = tf.estimator.tpu.RunConfig(
    model_dir=sys.argv[1],
    tf_random_seed=1,
    tpu_config=tf.estimator.tpu.TPUConfig(
        iterations_per_loop=10,
        per_host_input_for_training=tf.estimator.tpu.InputPipelineConfig.PER_HOST_V2,
    ),
)
params = {"mode": "train"}
estimator = tf.estimator.tpu.TPUEstimator(
    model_fn=model_fn,
    config=config,
    params=params,
    use_tpu=False,
    train_batch_size=16,
    eval_batch_size=8,
    predict_batch_size=4,
)
estimator.train(input_fn, max_steps=40)
results = estimator.evaluate(input_fn, steps=4)
assert results["global_step"] == 40, results
assert results["error"] < 0.01, results
predictions = list(estimator.predict(input_fn))
assert len(predictions) == 640, len(predictions)
assert SIZES == {"train": 16, "eval": 8, "infer": 4}, SIZES
runs = {name: hook.runs for name, hook in COUNTERS.items()}
assert runs["training"] == 40 and runs["evaluation"] == 4, runs
assert runs["prediction"] == 160, runs
exported = estimator.export_saved_model(os.path.join(sys.argv[1], "export"), serving_fn)
assert os.path.exists(os.path.join(exported.decode(), "saved_model.pb"))
print("prediction", predictions[0]["y"])
