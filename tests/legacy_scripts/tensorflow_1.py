"""A TensorFlow 1 script that was never migrated: tf.contrib, HParams, a TPUEstimator."""

import collections
import inspect
from distutils.version import LooseVersion

import numpy as np
import tensorflow as tf
from tensorflow.contrib import cluster_resolver
from tensorflow.contrib import tpu as contrib_tpu
from tensorflow.contrib.framework import get_variables_to_restore, list_variables
from tensorflow.python.ops import math_ops

flags = tf.flags
FLAGS = flags.FLAGS
flags.DEFINE_string("model_dir", None, "Where to.")
flags.DEFINE_string("hparams", "rate=0.05,units=[8]", "Other values.")
flags.DEFINE_bool("use_tpu", False, "Whether there is one.")

INPUTS = np.linspace(-1, 1, 64).astype(np.float32)[:, None]
assert np.dtype(np.object) == object
assert isinstance({}, collections.Mapping)


def input_fn_builder(count):
    def input_fn(params):
        dataset = tf.data.Dataset.from_tensor_slices(INPUTS).repeat(count)
        return dataset.apply(
            tf.contrib.data.map_and_batch(
                lambda x: ({"x": x}, 2 * x),
                batch_size=params["batch_size"],
                drop_remainder=True,
            )
        )

    return input_fn


def network(x, units):
    width = x.shape[-1].value
    with tf.variable_scope("hidden"):
        kernel = tf.get_variable(
            "kernel",
            [width, units],
            initializer=tf.contrib.layers.xavier_initializer(seed=1),
            regularizer=tf.contrib.layers.l2_regularizer(1e-6),
        )
        names = {kernel: kernel.op.name}  # variables of TensorFlow 1 can be keys
        assert names[kernel] == "hidden/kernel"
        hidden = tf.nn.relu(tf.matmul(x, kernel) + tf.range(units, dtype=tf.float32))
        hidden = tf.contrib.layers.layer_norm(hidden, begin_norm_axis=-1)
    return tf.layers.dense(hidden, 1, kernel_initializer=tf.ones_initializer())


def model_fn_builder(hparams, use_tpu):
    def model_fn(features, labels, mode, params):
        assert "batch_size" in params
        predicted = network(features["x"], hparams.units[0])
        if mode == tf.estimator.ModeKeys.PREDICT:
            return contrib_tpu.TPUEstimatorSpec(mode, predictions={"y": predicted})
        loss = tf.losses.mean_squared_error(labels, predicted)
        loss += tf.losses.get_regularization_loss()
        if mode == tf.estimator.ModeKeys.EVAL:

            def metric_fn(labels, predicted):
                return {"error": tf.metrics.mean_absolute_error(labels, predicted)}

            return contrib_tpu.TPUEstimatorSpec(
                mode, loss=loss, eval_metrics=(metric_fn, [labels, predicted])
            )
        optimizer = tf.train.AdamOptimizer(hparams.rate)
        if use_tpu:
            optimizer = contrib_tpu.CrossShardOptimizer(optimizer)
        restored = [v.op.name for v in get_variables_to_restore(exclude=["hidden"])]
        assert "global_step" in restored and "hidden/kernel" not in restored, restored
        step = tf.train.get_or_create_global_step()
        train_op = optimizer.minimize(loss, global_step=step)
        return contrib_tpu.TPUEstimatorSpec(mode, loss=loss, train_op=train_op)

    assert inspect.getargspec(model_fn).args == ["features", "labels", "mode", "params"]
    return model_fn


def main(_):
    tf.logging.set_verbosity(tf.logging.INFO)
    assert LooseVersion(tf.__version__) >= "1.11"
    assert not tf.executing_eagerly()
    hparams = tf.contrib.training.HParams(rate=0.1, units=[4])
    hparams.parse(FLAGS.hparams)
    resolver = None
    if FLAGS.use_tpu:
        resolver = cluster_resolver.TPUClusterResolver("name")
    config = contrib_tpu.RunConfig(
        cluster=resolver,
        model_dir=FLAGS.model_dir,
        tf_random_seed=1,
        tpu_config=contrib_tpu.TPUConfig(
            iterations_per_loop=10,
            num_shards=8,
            per_host_input_for_training=contrib_tpu.InputPipelineConfig.PER_HOST_V2,
        ),
    )
    estimator = contrib_tpu.TPUEstimator(
        use_tpu=FLAGS.use_tpu,
        model_fn=model_fn_builder(hparams, FLAGS.use_tpu),
        config=config,
        train_batch_size=16,
        eval_batch_size=8,
        predict_batch_size=4,
    )
    estimator.train(input_fn=input_fn_builder(None), max_steps=100)
    results = estimator.evaluate(input_fn=input_fn_builder(1))
    assert results["error"] < 0.3, results
    assert len(list(estimator.predict(input_fn=input_fn_builder(1)))) == 64
    with tf.gfile.GFile(FLAGS.model_dir + "/results.txt", "w") as results_file:
        results_file.write(str(results))
    names = [name for name, _ in list_variables(FLAGS.model_dir)]
    assert "hidden/LayerNorm/gamma/Adam_1" in names, names
    with tf.Session() as session:
        assert session.run(math_ops.add(tf.constant(1), 2)) == 3
    print("loss", results["loss"])


if __name__ == "__main__":
    flags.mark_flag_as_required("model_dir")
    tf.app.run()
