"""One task of a cluster with parameter servers, by `train_and_evaluate`.

    python -m tests.helpers.processes.parameter_server_task FOLDER [dies|again]

A task that `dies` kills itself in the middle of its second window. The one that starts
`again` in its place writes FOLDER/again; the others wait for that after a window.
"""

import logging
import os
import pathlib
import signal
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from estimator_accum import (
    get_or_create_update_step,
    make_accumulating_train_op,
    make_accumulation_hooks,
)
from estimator_accum.compat import enable_estimator

v1 = tf.compat.v1
STEPS, MAX_STEPS, DEATH = 4, 120, 6  # all of them micro-steps


def input_fn() -> tf.data.Dataset:
    """Returns endless batches of 4 examples."""
    x = tf.random.stateless_normal([64, 3], [1, 2])
    data = tf.data.Dataset.from_tensor_slices(({"x": x}, x[:, :1]))
    return data.batch(4).repeat()


def model_fn(features, labels, mode):
    """Trains a layer whose update_step is on the second server."""
    update_step = get_or_create_update_step()
    kernel = v1.get_variable("kernel", [3, 1], initializer=v1.zeros_initializer())
    predictions = features["x"] @ kernel
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions)
    loss, train_op, hooks = tf.reduce_mean((predictions - labels) ** 2), None, []
    if mode == tf.estimator.ModeKeys.TRAIN:
        rate = 0.1 * 0.99 ** tf.cast(update_step, tf.float32)
        optimizer = v1.train.AdagradOptimizer(rate)
        train_op = make_accumulating_train_op(loss, optimizer, STEPS, clip_norm=1.0)
        hooks = make_accumulation_hooks()
    return tf.estimator.EstimatorSpec(
        mode, predictions, loss, train_op, training_hooks=hooks
    )


class _Death(v1.train.SessionRunHook):
    """Kills this process after some micro-steps, or waits for the one in its place."""

    def __init__(self, folder: pathlib.Path, role: str):
        self._sign, self._role, self._steps = folder / "again", role, 0

    def after_create_session(self, session, coord):
        if self._role == "again":
            self._sign.touch()

    def after_run(self, run_context, run_values):
        self._steps += 1
        if self._role == "dies" and self._steps == DEATH:
            os.kill(os.getpid(), signal.SIGKILL)
        while not self._role and self._steps == STEPS and not self._sign.exists():
            time.sleep(0.01)


def _receive():
    x = v1.placeholder(tf.float32, [None, 3])
    return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})


def train(folder: pathlib.Path, role: str = "") -> None:
    """Runs the task that TF_CONFIG names."""
    config = tf.estimator.RunConfig(
        str(folder / "model"),
        save_checkpoints_steps=40,
        experimental_max_worker_delay_secs=0,
    )
    estimator = tf.estimator.Estimator(model_fn, config=config)
    exporter = tf.estimator.FinalExporter("final", _receive)
    tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(input_fn, MAX_STEPS, [_Death(folder, role)]),
        tf.estimator.EvalSpec(
            input_fn, 1, exporters=exporter, start_delay_secs=0, throttle_secs=0
        ),
    )


if __name__ == "__main__":
    enable_estimator()
    logging.getLogger("tensorflow").setLevel(logging.INFO)
    train(pathlib.Path(sys.argv[1]), *sys.argv[2:])
