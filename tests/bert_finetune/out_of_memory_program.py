"""Trains a small BERT on batches of 64 and prints what became of it as JSON.

    python out_of_memory_program.py plain,auto FOLDER LENGTH:UPDATES ...

A line for each kind of training. Sequence lengths in turn, as in progressive resizing.
TF_CPU_BFC_MEM_LIMIT_IN_MB in the environment limits what tensors may take; TensorFlow
reads it when it is imported.
"""

import json
import logging
import os
import re
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

from bert_finetune import modeling, optimization
from estimator_accum import make_accumulating_train_op, microbatch_model_fn
from estimator_accum.compat import enable_estimator

enable_estimator()
v1 = tf.compat.v1
BATCH = 64
CONFIG = modeling.BertConfig(
    vocab_size=200,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=256,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    max_position_embeddings=128,
)


def make_model_fn(is_plain, examples):
    def model_fn(features, labels, mode):
        ids = features["input_ids"]
        ones = tf.ones_like(ids)
        output = modeling.encode(CONFIG, ids, ones, ids * 0, is_training=True)
        logits = modeling.classifier_logits(
            output.pooled, 2, is_training=True, dropout_prob=0.0
        )
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        )
        optimizer = optimization.AdamWeightDecayOptimizer(1e-3)
        if is_plain:
            step = v1.train.get_or_create_global_step()
            train_op = optimizer.minimize(loss, step)
        else:
            train_op = make_accumulating_train_op(loss, optimizer, 1)
        used = v1.get_variable(
            "used", [examples], tf.int32, v1.zeros_initializer(), trainable=False
        )
        mark = v1.scatter_add(used, features["number"], tf.ones_like(labels))
        train_op = tf.group(train_op, mark)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def make_input_fn(lengths):
    def batches():
        random = np.random.default_rng(0)
        start = 0
        for length, updates in lengths:
            for _ in range(updates):
                ids = random.integers(0, 200, [BATCH, length]).astype(np.int32)
                numbers = np.arange(start, start + BATCH, dtype=np.int32)
                labels = (ids[:, 0] > 100).astype(np.int32)
                start += BATCH
                yield {"input_ids": ids, "number": numbers}, labels

    vector = tf.TensorSpec([None], tf.int32)
    matrix = tf.TensorSpec([None, None], tf.int32)
    signature = ({"input_ids": matrix, "number": vector}, vector)
    return lambda: tf.data.Dataset.from_generator(batches, output_signature=signature)


class Adjustments(logging.Handler):
    """Collects at which updates memory ran out."""

    def __init__(self):
        super().__init__()
        self.updates = []

    def emit(self, record):
        found = re.search("out of memory at update ([0-9]+)", record.getMessage())
        self.updates += [int(found[1])] if found else []


def main(kinds, folder, *lengths):
    v1.disable_eager_execution()
    v1.logging.set_verbosity("ERROR")
    logging.getLogger("tensorflow.estimator_accum").setLevel("WARNING")
    lengths = [tuple(map(int, length.split(":"))) for length in lengths]
    for kind in kinds.split(","):
        print(json.dumps(train(kind, os.path.join(folder, kind), lengths)))


def train(kind, folder, lengths):
    adjustments = Adjustments()
    logging.getLogger("tensorflow.estimator_accum").addHandler(adjustments)
    updates = sum(count for _, count in lengths)
    model_fn = make_model_fn(kind == "plain", updates * BATCH)
    if kind == "auto":
        model_fn = microbatch_model_fn(model_fn, "auto")
    config = tf.estimator.RunConfig(
        folder,
        tf_random_seed=1,
        save_summary_steps=100,
        save_checkpoints_steps=10**6,
        session_config=v1.ConfigProto(allow_soft_placement=True),
    )
    estimator = tf.estimator.Estimator(model_fn, config=config)
    try:
        estimator.train(make_input_fn(lengths))
    except tf.errors.ResourceExhaustedError as error:
        return {"died": error.message[:40]}
    return {"out_of_memory_at": adjustments.updates} | values_of(estimator)


def values_of(estimator):
    """Saves the variables; returns where, and how often examples were used."""
    variables = {
        name: estimator.get_variable_value(name)
        for name in estimator.get_variable_names()
        if name != "update_step"
    }
    used = np.unique(variables.pop("used")).tolist()
    path = os.path.join(estimator.model_dir, "variables.npz")
    np.savez(path, **variables)
    return {"variables": path, "used": used}


if __name__ == "__main__":
    main(*sys.argv[1:])
