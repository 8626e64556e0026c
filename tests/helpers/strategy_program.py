"""Trains a small model under a strategy and prints its variables as JSON.

    python strategy_program.py none|mirrored|collectives|multi_worker BATCH K
    MICRO_STEPS
        FOLDER [FITS ...] [no_hooks] [loss_scaling] [one_device] [two_devices]
        [recompute] [save_summary_steps=N]

multi_worker is one process of a TF_CONFIG cluster. collectives is a MirroredStrategy
that is created eagerly, and so uses collectives by default; one_device passes it
ReductionToOneDevice, two_devices gives the Session two CPU devices. BATCH is the batch
of one replica. With FITS, batches are trained in as many micro-batches as a memory of
FITS examples needs; one number for each task.
"""

import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

from estimator_accum import (
    get_or_create_update_step,
    make_accumulating_train_op,
    make_accumulation_hooks,
    microbatch_model_fn,
    recompute,
)
from estimator_accum.compat import enable_estimator

enable_estimator()
v1 = tf.compat.v1
EXAMPLES = 96


def model_fn(features, labels, mode, params):
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode, loss=tf.reduce_mean(labels))
    predict = recompute(_predict) if params["is_recomputed"] else _predict
    predicted = predict(features, params["fits"])
    loss = tf.reduce_mean(tf.square(predicted - labels))
    rate = 0.05 / (1.0 + tf.cast(get_or_create_update_step(), tf.float32))
    optimizer = v1.train.MomentumOptimizer(rate, 0.9)
    if params["has_loss_scaling"]:
        optimizer = v1.mixed_precision.MixedPrecisionLossScaleOptimizer(optimizer, 4.0)
    train_op = make_accumulating_train_op(loss, optimizer, params["K"], clip_norm=1.0)
    hooks = make_accumulation_hooks("apply") if params["has_hooks"] else []
    return tf.estimator.EstimatorSpec(
        mode, loss=loss, train_op=train_op, training_hooks=hooks
    )


def _predict(features, fits):
    dense = v1.get_variable("dense", [3], initializer=v1.zeros_initializer())
    table = v1.get_variable("table", [7, 1], initializer=v1.zeros_initializer())
    predicted = tf.linalg.matvec(_fitting(features["inputs"], fits), dense)
    return predicted + tf.gather(table, features["ids"])[:, 0]


def _fitting(inputs, fits):
    """Returns `inputs`; runs out of memory above `fits` examples (None: no limit)."""

    def check(rows):
        if rows > fits:
            raise MemoryError(f"{rows} examples")
        return np.float32(0)

    if fits is None:
        return inputs
    with tf.control_dependencies(
        [tf.numpy_function(check, [tf.shape(inputs)[0]], tf.float32)]
    ):
        return tf.identity(inputs)


def main(kind, batch, steps, micro_steps, folder, *more):
    fits = [int(word) for word in more if word.isdecimal()]
    words = dict(word.partition("=")[::2] for word in more if not word.isdecimal())
    if kind != "collectives":
        v1.disable_eager_execution()
    v1.logging.set_verbosity("ERROR")
    random = np.random.default_rng(0)
    data = (
        {
            "inputs": random.normal(size=[EXAMPLES, 3]).astype(np.float32),
            "ids": random.integers(0, 6, EXAMPLES),
        },
        random.normal(size=EXAMPLES).astype(np.float32),
    )
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
    workers = 2 if kind == "multi_worker" else 1

    def input_fn():
        dataset = tf.data.Dataset.from_tensor_slices(data).repeat().batch(batch)
        return dataset.shard(workers, task["index"])

    strategy, session_config = None, None
    if kind in ("mirrored", "collectives"):
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )
        cross_device_ops = None
        if "one_device" in words:
            cross_device_ops = tf.distribute.ReductionToOneDevice()
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops)
    if "two_devices" in words:
        session_config = v1.ConfigProto(
            device_count={"CPU": 2}, allow_soft_placement=True
        )
    if kind == "multi_worker":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    config = tf.estimator.RunConfig(
        folder,
        train_distribute=strategy,
        session_config=session_config,
        save_checkpoints_steps=1000,
        save_summary_steps=int(words.get("save_summary_steps", 100)),
        experimental_max_worker_delay_secs=0,
    )
    params = {
        "K": steps,
        "fits": fits[task["index"]] if fits else None,
        "has_hooks": "no_hooks" not in words,
        "is_recomputed": "recompute" in words,
        "has_loss_scaling": "loss_scaling" in words,
    }
    estimator = tf.estimator.Estimator(
        microbatch_model_fn(model_fn, "auto") if fits else model_fn,
        config=config,
        params=params,
    )
    if kind == "multi_worker":  # Estimator.train refuses it
        tf.estimator.train_and_evaluate(
            estimator,
            tf.estimator.TrainSpec(input_fn, max_steps=micro_steps),
            tf.estimator.EvalSpec(input_fn, steps=1),
        )
    else:
        estimator.train(input_fn, steps=micro_steps)
    if task["index"] == 0:
        values = {
            name: estimator.get_variable_value(name).tolist()
            for name in estimator.get_variable_names()
        }
        print(json.dumps(values))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), *sys.argv[5:])
