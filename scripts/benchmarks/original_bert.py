"""The program of google-research/bert with the gradient accumulation article's patch.

Both are restated: an encoder of plain operations that computes on padding too, the last
layer for every token, the densified embedding gradient, and AdamW as a sequence of
single operations. It runs one epoch, every example padded to `max_seq_length`, without
an Estimator and its hooks, and prints, as its last line, the examples per second of all
updates after the first fifth, as JSON. Weights are random, of the size given in
`bert_config.json`.

B = micro-batch, T = `max_seq_length`, H = hidden, N = heads, D = H / N.
"""

import json
import math
import os
import pathlib
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import

import numpy as np
import tensorflow as tf

from bert_finetune.bert_config import BertConfig
from bert_finetune.encoding import EncodedExamples, encode_examples
from bert_finetune.tasks import get_task, read_examples
from bert_finetune.tokenization import WordPieceTokenizer
from scripts.benchmarks.script_runs import examples_per_sec
from scripts.benchmarks.ways import original_patch

_RATE, _WEIGHT_DECAY, _BETA_1, _BETA_2, _EPSILON = 5e-5, 0.01, 0.9, 0.999, 1e-6


def main() -> None:
    """Reads JSON from the command line: the folder and the sizes."""
    spec = json.loads(sys.argv[1])
    tf.compat.v1.disable_eager_execution()
    folder = pathlib.Path(spec["folder"])
    task = get_task("CoLA")
    encoded = encode_examples(
        read_examples(task, folder, task.train_file, labelled=True),
        WordPieceTokenizer(folder / "vocab.txt", do_lower_case=True),
        spec["max_seq_length"],
    )
    size, steps = spec["micro_batch_size"], spec["steps"]
    *inputs, labels = _batches(encoded, spec["max_seq_length"], size)
    config = BertConfig.from_json_file(str(folder / "bert_config.json"))
    pooled = pooled_output(config, *inputs, is_training=True)
    loss = classification_loss(pooled, labels, is_training=True)
    train_op = original_patch(loss, steps, AdamWeightDecay())
    updates = len(encoded) // (size * steps)
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        run, times = session.make_callable(train_op), []
        for _ in range(updates):
            for _ in range(steps):
                run()
            times.append(time.perf_counter())
    rate = examples_per_sec(times, size * steps)
    print(json.dumps({"examples_per_sec": rate}))


def _batches(encoded: EncodedExamples, length: int, size: int):
    features = encoded.features(np.arange(len(encoded)), length)
    names = ("input_ids", "input_mask", "segment_ids")
    arrays = (*(features[name] for name in names), encoded.labels)
    dataset = tf.data.Dataset.from_tensor_slices(arrays).repeat()
    dataset = dataset.shuffle(100, seed=0).batch(size, drop_remainder=True)
    return tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()


def pooled_output(
    config: BertConfig,
    input_ids: tf.Tensor,
    input_mask: tf.Tensor,
    segment_ids: tf.Tensor,
    *,
    is_training: bool,
) -> tf.Tensor:
    """Builds the encoder.

    Args:
        config: The encoder's sizes.
        input_ids: int32 [B, T].
        input_mask: int32 [B, T], 0 at padding.
        segment_ids: int32 [B, T].
        is_training: Whether dropout is active.

    Creates: the variables of a published checkpoint.

    Returns:
        `tanh(dense(first token of the last layer))`, float [B, H].
    """
    hidden_rate = config.hidden_dropout_prob if is_training else 0.0
    attention_rate = config.attention_probs_dropout_prob if is_training else 0.0
    heads, width = config.num_attention_heads, config.hidden_size
    length = input_ids.shape[1]
    with tf.compat.v1.variable_scope("bert"):
        with tf.compat.v1.variable_scope("embeddings"):
            words = _variable("word_embeddings", [config.vocab_size, width])
            types = _variable("token_type_embeddings", [config.type_vocab_size, width])
            positions = [config.max_position_embeddings, width]
            positions = _variable("position_embeddings", positions)
            x = tf.gather(words, input_ids)  # [B, T, H]
            x += tf.one_hot(segment_ids, config.type_vocab_size) @ types
            x += tf.slice(positions, [0, 0], [length, width])
            x = _dropout(_layer_norm(x), hidden_rate)
        bias = tf.cast(1 - input_mask, tf.float32)[:, tf.newaxis, tf.newaxis] * -1e4
        x = tf.reshape(x, [-1, width])  # [B * T, H]
        for number in range(config.num_hidden_layers):
            with tf.compat.v1.variable_scope(f"encoder/layer_{number}"):
                context = _attend(x, bias, heads, length, attention_rate)
                with tf.compat.v1.variable_scope("attention/output"):
                    attended = _dropout(_dense(context, width), hidden_rate)
                    attended = _layer_norm(attended + x)
                with tf.compat.v1.variable_scope("intermediate"):
                    wide = _dense(attended, config.intermediate_size)
                    wide = _ACTIVATIONS[config.hidden_act](wide)
                with tf.compat.v1.variable_scope("output"):
                    x = _dropout(_dense(wide, width), hidden_rate)
                    x = _layer_norm(x + attended)
        first = tf.reshape(x, [-1, length, width])[:, 0]  # [B, H]
        with tf.compat.v1.variable_scope("pooler"):
            return tf.tanh(_dense(first, width))


def classification_loss(
    pooled: tf.Tensor, labels: tf.Tensor, *, is_training: bool
) -> tf.Tensor:
    """Builds a two-class classifier.

    Args:
        pooled: float [B, H].
        labels: int32 [B].
        is_training: Whether dropout is active.

    Creates: the classifier's variables.

    Returns:
        The mean loss, a scalar.
    """
    pooled = _dropout(pooled, 0.1 if is_training else 0.0)
    weights = _variable("output_weights", [2, pooled.shape[-1]])
    logits = tf.matmul(pooled, weights, transpose_b=True)
    logits += _variable("output_bias", [2], tf.compat.v1.zeros_initializer())
    likelihoods = tf.nn.log_softmax(logits)
    return -tf.reduce_mean(tf.reduce_sum(tf.one_hot(labels, 2) * likelihoods, -1))


def _attend(x, bias, heads: int, length: int, rate: float) -> tf.Tensor:
    """Computes attention over all tokens, padding too: [B * T, H] -> [B * T, H]."""
    width = x.shape[-1]

    def split(y):  # [B * T, H] -> [B, N, T, D]
        y = tf.reshape(y, [-1, length, heads, width // heads])
        return tf.transpose(y, [0, 2, 1, 3])

    with tf.compat.v1.variable_scope("attention/self"):
        query, key, value = (
            split(_dense(x, width, name)) for name in ("query", "key", "value")
        )
    scores = tf.matmul(query, key, transpose_b=True) / math.sqrt(width // heads)
    attention = _dropout(tf.nn.softmax(scores + bias), rate)  # [B, N, T, T]
    context = tf.transpose(attention @ value, [0, 2, 1, 3])
    return tf.reshape(context, [-1, width])


def _dense(x: tf.Tensor, units: int, name: str = "dense") -> tf.Tensor:
    with tf.compat.v1.variable_scope(name):
        kernel = _variable("kernel", [x.shape[-1], units])
        bias = _variable("bias", [units], tf.compat.v1.zeros_initializer())
    return tf.nn.bias_add(x @ kernel, bias)


def _layer_norm(x: tf.Tensor) -> tf.Tensor:
    with tf.compat.v1.variable_scope("LayerNorm"):
        gamma = _variable("gamma", x.shape[-1:], tf.compat.v1.ones_initializer())
        beta = _variable("beta", x.shape[-1:], tf.compat.v1.zeros_initializer())
    mean, variance = tf.nn.moments(x, [-1], keepdims=True)
    return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-12)


def _gelu(x: tf.Tensor) -> tf.Tensor:
    return x * 0.5 * (1.0 + tf.math.erf(x / math.sqrt(2.0)))


def _gelu_new(x: tf.Tensor) -> tf.Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
    return x * 0.5 * (1.0 + tf.tanh(inner))


_ACTIVATIONS = {"gelu": _gelu, "gelu_new": _gelu_new}


def _dropout(x: tf.Tensor, rate: float) -> tf.Tensor:
    return tf.nn.dropout(x, rate=rate) if rate else x


def _variable(name: str, shape, initializer=None) -> tf.Variable:
    initializer = initializer or tf.compat.v1.truncated_normal_initializer(stddev=0.02)
    return tf.compat.v1.get_variable(
        name, shape, initializer=initializer, use_resource=True
    )


class AdamWeightDecay:
    """google-research/bert's optimizer in single operations; slots are variables."""

    def apply_gradients(self, pairs: list[tuple]) -> tf.Operation:
        """Updates each variable by its dense gradient."""
        return tf.group(*[self._update(g, v) for g, v in pairs])

    def _update(self, gradient: tf.Tensor, variable: tf.Variable) -> tf.Operation:
        m, v = (self._slot(variable, name) for name in ("adam_m", "adam_v"))
        next_m = _BETA_1 * m + (1.0 - _BETA_1) * gradient
        next_v = _BETA_2 * v + (1.0 - _BETA_2) * tf.square(gradient)
        step = next_m / (tf.sqrt(next_v) + _EPSILON)
        if "LayerNorm" not in variable.op.name and "bias" not in variable.op.name:
            step += _WEIGHT_DECAY * variable
        next_variable = variable - _RATE * step
        targets = ((variable, next_variable), (m, next_m), (v, next_v))
        return tf.group(*[t.assign(value, read_value=False) for t, value in targets])

    def _slot(self, variable: tf.Variable, name: str) -> tf.Variable:
        with tf.init_scope():
            return tf.compat.v1.Variable(
                tf.zeros(variable.shape),
                name=f"{variable.op.name}/{name}",
                trainable=False,
                use_resource=True,
            )


if __name__ == "__main__":
    main()
