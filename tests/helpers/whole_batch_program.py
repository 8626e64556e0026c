"""Trains with losses over the whole batch on two replicas; prints variables as JSON.

    python whole_batch_program.py mirrored|multi_worker FOLDER [ROWS ROWS]

The loss is that of all replicas' examples plus that of each replica's own. multi_worker
is one process of a TF_CONFIG cluster. With ROWS, the backward pass of a task runs out of
memory above so many examples, and micro-batches are "auto".
"""

import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

from estimator_accum import (
    make_accumulating_train_op,
    microbatch_model_fn,
    whole_batch_loss,
)
from estimator_accum.compat import enable_estimator

enable_estimator()
v1 = tf.compat.v1
# Examples of the two replicas, update by update; a worker must have some.
SIZES = {
    "mirrored": [(6, 4), (5, 0), (3, 8)],
    "multi_worker": [(6, 4), (2, 5), (3, 8)],
}


def batches(kind: str, is_joined: bool = False):
    """Yields x [examples, 2, 3] and the replica [examples], for one replica or both."""
    random = np.random.default_rng(0)
    for sizes in SIZES[kind]:
        parts = [random.normal(size=[n, 2, 3]).astype(np.float32) for n in sizes]
        replicas = [np.full([n], i) for i, n in enumerate(sizes)]
        if is_joined:
            yield np.concatenate(parts), np.concatenate(replicas)
        else:
            yield from zip(parts, replicas, strict=True)


def dataset(kind: str, is_joined: bool = False) -> tf.data.Dataset:
    """Returns a data set of `batches`."""
    signature = tf.TensorSpec([None, 2, 3]), tf.TensorSpec([None], tf.int64)
    return tf.data.Dataset.from_generator(
        lambda: batches(kind, is_joined), output_signature=signature
    )


def towers(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    start = np.random.default_rng(0).normal(size=[3, 4]).astype(np.float32)
    kernel = v1.get_variable("kernel", initializer=start)
    found = tf.math.l2_normalize(tf.tanh(tf.tensordot(x, kernel, 1)), -1)
    v1.get_variable("scale", initializer=1.0)
    return found[:, 0], found[:, 1]


def loss_fn(outputs) -> tf.Tensor:
    with v1.variable_scope("", reuse=True):
        scale = v1.get_variable("scale")
    logits = tf.exp(scale) * tf.matmul(outputs[0], outputs[1], transpose_b=True)
    rows = tf.shape(logits)[0]
    with tf.control_dependencies([tf.debugging.assert_positive(rows)]):
        own = tf.range(rows)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=own, logits=logits)
    )


def train_op_of(loss: tf.Tensor) -> tf.Operation:
    optimizer = v1.train.MomentumOptimizer(0.5, 0.9)
    return make_accumulating_train_op(loss, optimizer, 1, clip_norm=1.0)


def model_fn(features, labels, mode, params):
    del labels
    if mode == tf.estimator.ModeKeys.EVAL:
        return tf.estimator.EstimatorSpec(mode, loss=tf.reduce_mean(features))
    query, document = towers(features)
    outputs = _fitting(query, params["rows"]), document
    loss = whole_batch_loss(outputs, loss_fn, across_replicas=True)
    loss += whole_batch_loss(outputs, loss_fn)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op_of(loss))


def _fitting(outputs: tf.Tensor, most: int | None) -> tf.Tensor:
    """Returns `outputs`, of whose gradient `most` rows fit in memory."""
    if most is None:
        return outputs

    def check(rows):
        if rows > most:
            raise MemoryError(f"{rows} rows")
        return np.float32(1)

    @tf.custom_gradient
    def fitting(outputs):
        def gradient(arrived):
            return arrived * tf.numpy_function(
                check, [tf.shape(arrived)[0]], tf.float32, stateful=False
            )

        return tf.identity(outputs), gradient

    return fitting(outputs)


def main(kind: str, folder: str, *rows: str) -> None:
    v1.disable_eager_execution()
    v1.logging.set_verbosity("ERROR")
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
    if kind == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def input_fn():
        found = dataset(kind)
        return found.shard(2, task["index"]) if kind == "multi_worker" else found

    config = tf.estimator.RunConfig(
        folder,
        train_distribute=strategy,
        save_checkpoints_steps=1000,
        experimental_max_worker_delay_secs=0,
    )
    most = int(rows[task["index"]]) if rows else None
    estimator = tf.estimator.Estimator(
        microbatch_model_fn(model_fn, "auto" if rows else 3),
        config=config,
        params={"rows": most},
    )
    updates = len(SIZES[kind])
    if kind == "multi_worker":  # Estimator.train refuses it
        tf.estimator.train_and_evaluate(
            estimator,
            tf.estimator.TrainSpec(input_fn, max_steps=updates),
            tf.estimator.EvalSpec(input_fn, steps=1),
        )
    else:
        estimator.train(input_fn, steps=updates)
    if task["index"] == 0:
        names = ("kernel", "scale", "global_step")
        values = {name: estimator.get_variable_value(name).tolist() for name in names}
        print(json.dumps(values))


if __name__ == "__main__":
    main(*sys.argv[1:])
