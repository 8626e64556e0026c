"""The program of one contender: an Estimator whose model_fn has its own optimizer.

    python -m scripts.benchmarks.unedited_updates '{"micro_batches": 4,
        "size": [4, 512, 8], "batch_size": 32, "tokens": 128, "loss": "mean"}'

    python -m scripts.benchmarks.unedited_updates '{"micro_batches": 16,
        "batch_size": 4096, "widths": [2048, 2048], "is_checked": false, "updates": 2}'

The model_fn fine-tunes google-research/bert's encoder with dropout, and knows nothing of
this project. Its batches are split into `micro_batches` as
`estimator-accum run` splits them; with null it is used as it is. With `widths` it trains
dense layers by gradient descent, with `"is_checked": false` there is no spot check. The
program prints one JSON line when it has done `updates` updates (default: 2), with their
processor seconds and the peak of memory, and one for every line that it reads: seconds
per update.
"""

import json
import logging
import os
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import

import tensorflow as tf

from bert_finetune.optimization import AdamWeightDecayOptimizer
from estimator_accum import microbatch_model_fn
from estimator_accum.compat import enable_estimator
from estimator_accum.microbatch.own_optimizer import spot_check
from scripts.benchmarks.base import peak_bytes
from scripts.benchmarks.models import Size, bert_config
from tests.helpers.models import original_bert

v1 = tf.compat.v1

_DROPOUT = 0.1


def main() -> None:
    """Reads the contender from the command line, and commands from stdin."""
    spec = json.loads(sys.argv[1])
    enable_estimator()
    v1.disable_eager_execution()
    v1.logging.set_verbosity(v1.logging.ERROR)
    logger = logging.getLogger("tensorflow.estimator_accum")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_refuse_whole_batches)
    if not spec.get("is_checked", True):
        spot_check._BATCHES = ()
    if "widths" in spec:
        model_fn, input_fn = _make_dense(spec["widths"], spec["batch_size"])
    else:
        size = Size(*spec["size"])
        model_fn = _make_model_fn(size, _LOSSES[spec["loss"]])
        input_fn = _make_input_fn(size, spec)
    if spec["micro_batches"] is not None:
        model_fn = microbatch_model_fn(model_fn, spec["micro_batches"])
    with tempfile.TemporaryDirectory() as folder:
        config = tf.estimator.RunConfig(
            folder, save_checkpoints_steps=None, save_checkpoints_secs=None
        )
        estimator = tf.estimator.Estimator(model_fn, config=config)
        estimator.train(input_fn, hooks=[_OnDemand(spec.get("updates", 2))])


def _refuse_whole_batches(record: logging.LogRecord) -> bool:
    """Raises RuntimeError if the model is not split: then its figures say nothing."""
    if "on the whole batch" in record.getMessage():
        raise RuntimeError(record.getMessage())
    return True


def _make_input_fn(size: Size, spec: dict):
    def input_fn():
        shape = [spec["batch_size"], spec["tokens"]]
        ids = tf.random.stateless_uniform(shape, [0, 0], 1, size.vocabulary, tf.int32)
        return tf.data.Dataset.from_tensors(ids).cache().repeat()

    return input_fn


def _make_dense(widths: list[int], batch_size: int):
    def input_fn():
        return tf.data.Dataset.from_tensors(tf.ones([batch_size, widths[0]])).repeat()

    def model_fn(features, mode):
        for width in widths:
            features = tf.nn.relu(v1.layers.dense(features, width))
        loss = tf.reduce_mean(v1.layers.dense(features, 1) ** 2)
        sgd, step = v1.train.GradientDescentOptimizer(1e-3), v1.train.get_global_step()
        return tf.estimator.EstimatorSpec(
            mode, loss=loss, train_op=sgd.minimize(loss, step)
        )

    return model_fn, input_fn


def _mean_loss(pooled: tf.Tensor) -> tf.Tensor:
    labels = tf.zeros_like(pooled[:, 0], tf.int32)
    return original_bert.classification_loss(pooled, labels, is_training=True)


def _in_batch_loss(pooled: tf.Tensor) -> tf.Tensor:
    """Returns a loss that tells each example [B, H] from all others."""
    pooled = tf.math.l2_normalize(pooled, 1)
    scores = tf.matmul(pooled, pooled, transpose_b=True)
    labels = tf.range(tf.shape(pooled)[0])
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=scores)
    )


_LOSSES = {"mean": _mean_loss, "in-batch": _in_batch_loss}


def _make_model_fn(size: Size, loss_of):
    config = bert_config(size, _DROPOUT)

    def model_fn(features, mode):
        mask, segments = tf.ones_like(features), tf.zeros_like(features)
        loss = loss_of(
            original_bert.pooled_output(
                config, features, mask, segments, is_training=True
            )
        )
        variables = v1.trainable_variables()
        gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, variables), 1.0)
        update = AdamWeightDecayOptimizer(1e-5).apply_gradients(
            zip(gradients, variables, strict=True)
        )
        step = v1.train.get_or_create_global_step()
        train_op = tf.group(update, step.assign(step + 1))
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


class _OnDemand(v1.train.SessionRunHook):
    """Lets one update pass for each line of stdin, and times it.

    Args:
        first: Number of updates before the first line.
    """

    def __init__(self, first: int):
        self._first, self._updates = first, 0

    def after_create_session(self, session, coord):
        self._start = time.process_time()  # hours apart, other programs may run

    def before_run(self, run_context):
        if self._updates == self._first:
            secs = time.process_time() - self._start
            facts = {"processor_secs": secs, "peak_bytes": peak_bytes()}
            print(json.dumps(facts), flush=True)
        if self._updates >= self._first and not sys.stdin.readline():
            sys.exit()
        self._begin = time.perf_counter()

    def after_run(self, run_context, run_values):
        secs = time.perf_counter() - self._begin
        self._updates += 1
        if self._updates > self._first:
            print(json.dumps({"secs": secs}), flush=True)


if __name__ == "__main__":
    main()
