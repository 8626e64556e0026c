"""Runs whose checkpoints, in mid-window, version 0.1.0 has written: data/old_checkpoint.

    python tests/estimator_accum/old_checkpoint.py FOLDER

writes them again, by the library that is installed: `v1/`, a step-wise train op with
sparse gradients, clipping and the noise scale, and `keras/`, an optimizer of Keras 2, both
after 6 of 12 micro-steps, with `v1.npz` and `keras.npz`, the variables after all 12.
"""

import importlib
import importlib.util
import pathlib
import sys

import numpy as np
import tensorflow as tf

from estimator_accum import make_accumulating_train_op
from estimator_accum.keras import accumulate

v1 = tf.compat.v1
K, STOPPED, MICRO_STEPS = 4, 6, 12
ROWS = np.random.default_rng(0).integers(0, 5, size=[MICRO_STEPS, 3])
TARGETS = np.random.default_rng(1).normal(size=[MICRO_STEPS, 3]).astype(np.float32)


def train_v1(folder: str, first: int, stop: int, restored: str | None) -> dict:
    """Trains micro-steps [first, stop), saves, and returns all saved variables."""
    with tf.Graph().as_default():
        rows, targets = v1.placeholder(tf.int64, [3]), v1.placeholder(tf.float32, [3])
        table = v1.get_variable("table", initializer=np.ones([5, 2], np.float32))
        dense = v1.get_variable("dense", initializer=np.ones([2, 1], np.float32))
        found = tf.nn.embedding_lookup(table, rows) @ dense
        loss = tf.reduce_mean((found[:, 0] - targets) ** 2)
        train_op = make_accumulating_train_op(
            loss,
            v1.train.AdamOptimizer(0.1),
            K,
            clip_norm=1.0,
            weight=tf.reduce_sum(tf.abs(targets)),
            noise_scale=True,
        )
        saver = v1.train.Saver()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            if restored is not None:
                saver.restore(session, restored)
            for i in range(first, stop):
                session.run(train_op, {rows: ROWS[i], targets: TARGETS[i]})
            path = saver.save(session, f"{folder}/model.ckpt", write_meta_graph=False)
    reader = tf.train.load_checkpoint(path)
    return {n: reader.get_tensor(n) for n in reader.get_variable_to_dtype_map()}


def train_keras(folder: str, first: int, stop: int, restored: str | None) -> dict:
    """Trains micro-steps [first, stop), saves, and returns the weights."""
    root = "tf_keras" if importlib.util.find_spec("tf_keras") else "keras"
    optimizers = importlib.import_module(root).optimizers
    table, dense = tf.Variable(tf.ones([5, 2])), tf.Variable(tf.ones([2, 1]))
    optimizer = accumulate(optimizers.Adam(0.1), K)
    optimizer.build([table, dense])
    checkpoint = tf.train.Checkpoint(table=table, dense=dense, optimizer=optimizer)
    if restored is not None:
        checkpoint.restore(restored)
    for i in range(first, stop):
        with tf.GradientTape() as tape:
            found = tf.nn.embedding_lookup(table, ROWS[i]) @ dense
            loss = tf.reduce_mean((found[:, 0] - TARGETS[i]) ** 2)
        gradients = tape.gradient(loss, [table, dense])
        optimizer.apply_gradients(zip(gradients, [table, dense]))
    checkpoint.write(f"{folder}/model.ckpt")
    return {"table": table.numpy(), "dense": dense.numpy()}


def _write(folder: pathlib.Path) -> None:
    for name, train in (("v1", train_v1), ("keras", train_keras)):
        (folder / name).mkdir(parents=True)
        train(str(folder / name), 0, STOPPED, None)
        (folder / "end").mkdir(exist_ok=True)
        restored = str(folder / name / "model.ckpt")
        values = train(str(folder / "end"), STOPPED, MICRO_STEPS, restored)
        np.savez(folder / f"{name}.npz", **values)


if __name__ == "__main__":
    _write(pathlib.Path(sys.argv[1]))
