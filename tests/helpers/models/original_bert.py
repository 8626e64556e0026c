"""google-research/bert's classifier, restated in plain operations.

It computes on padding too, and the last layer for every token.

B = micro-batch, T = length, H = hidden, N = heads, D = H / N.
"""

import math

import tensorflow as tf

from bert_finetune.bert_config import BertConfig


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
