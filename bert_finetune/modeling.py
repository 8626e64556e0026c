"""BERT's encoder, with the variable names of the published checkpoints.

Its numbers are those of google-research/bert up to rounding, except that "gelu" is the
exact GELU here; google-research/bert's is "gelu_new" (see layers.py: activation).

B = micro-batch, T = tokens with padding, P = tokens without padding, H = hidden,
N = heads, D = H / N.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from bert_finetune.bert_config import BertConfig
from bert_finetune.layers import (
    FixedShape,
    TokenPacking,
    activation,
    dense,
    dropout,
    first_weights,
    layer_norm,
    weighted_sum,
)

# Far below any score, so that the attention to a padding token is exactly 0.
_PADDING_BIAS = -10000.0


class EncoderOutput(NamedTuple):
    """Output of `encode`.

    layers: outputs of the embeddings and of every layer, float Tensors [B, T, H], 0 at
      padding.
    sequence: the last of `layers`.
    pooled: `tanh(dense(first token of the last layer))`, float Tensor [B, H].
    """

    layers: list[tf.Tensor]
    sequence: tf.Tensor
    pooled: tf.Tensor


def encode(
    config: BertConfig,
    input_ids: tf.Tensor,
    input_mask: tf.Tensor,
    segment_ids: tf.Tensor,
    *,
    is_training: bool,
    is_packed: bool = True,
    recomputed: Callable | None = None,
    scope: str = "bert",
) -> EncoderOutput:
    """Builds BERT's encoder.

    `pooled` needs the last layer for one token per example only and has its own ops
    for it; TensorFlow runs those of `sequence` only if it is fetched. In training, the
    two have different dropout in the last layer.

    Args:
        config: Configuration of the encoder.
        input_ids: int32 or int64 Tensor [B, T], 0 <= id < vocab_size; B and T may be
            unknown at graph build.
        input_mask: integer Tensor [B, T], 1 at tokens and 0 at padding. The ids at
            padding have no influence on the result.
        segment_ids: int32 or int64 Tensor [B, T], 0 <= id < type_vocab_size.
        is_training: Whether dropout is on.
        is_packed: Whether layers that treat each token independently leave padding out.
            Their shapes then change with every batch.
        recomputed: Wrapper of each part of a layer, `estimator_accum.recompute` or one
            like it; None keeps the activations for the backward pass.
        scope: Variable scope; the checkpoints use "bert".

    Creates: the float32 variables of a published checkpoint, from
        `bert/embeddings/word_embeddings` to `bert/pooler/dense/bias`.

    Returns: an `EncoderOutput`.

    Raises:
        ValueError: If T is greater than `max_position_embeddings`. If T is known only
            at run time, `session.run` raises `tf.errors.InvalidArgumentError` instead.
    """
    with tf.compat.v1.variable_scope(scope):
        packing = TokenPacking if is_packed else FixedShape
        packing = packing(input_mask, config.num_attention_heads)
        shared = _Shared(config, packing, _padding_bias(input_mask), is_training)
        hidden = [_embed(shared, input_ids, segment_ids)]
        with tf.compat.v1.variable_scope("encoder"):
            for i in range(config.num_hidden_layers):
                with tf.compat.v1.variable_scope(f"layer_{i}"):
                    hidden.append(_layer(shared, hidden[-1], recomputed))
            last = f"layer_{config.num_hidden_layers - 1}"
            with tf.compat.v1.variable_scope(last, reuse=True):
                first_tokens = _layer(shared, hidden[-2], recomputed, True)
            first_tokens = _normalized(shared, first_tokens)  # [B, H]
        with tf.compat.v1.variable_scope("pooler"):
            pooled = tf.math.tanh(shared.dense(first_tokens, config.hidden_size))
        layers = [shared.packing.unpack(_normalized(shared, layer)) for layer in hidden]
    return EncoderOutput(layers, layers[-1], pooled)


def classifier_logits(
    pooled: tf.Tensor,
    num_labels: int,
    *,
    is_training: bool,
    dropout_prob: float = 0.1,
    initializer_range: float = 0.02,
) -> tf.Tensor:
    """Builds the head of run_classifier: `dropout(pooled) @ output_weights.T + bias`.

    Args:
        pooled: float Tensor [B, H].
        num_labels: Number of classes; 1 for a regression.
        is_training: Whether dropout is on.
        dropout_prob: 0 <= p < 1; google-research/bert uses 0.1 here for every config.
        initializer_range: Standard deviation of the first weights.

    Creates: `output_weights` [num_labels, H], `output_bias` [num_labels], float32.

    Returns: float Tensor [B, num_labels].
    """
    weights = tf.compat.v1.get_variable(
        "output_weights",
        [num_labels, pooled.shape[-1]],
        initializer=first_weights("output_weights", initializer_range),
    )
    bias = tf.compat.v1.get_variable(
        "output_bias", [num_labels], initializer=tf.compat.v1.zeros_initializer()
    )
    if is_training:
        pooled = dropout(pooled, dropout_prob)
    return tf.nn.bias_add(tf.matmul(pooled, weights, transpose_b=True), bias)


class _Shared(NamedTuple):
    """Values that all layers of one encoder share."""

    config: BertConfig
    packing: TokenPacking | FixedShape
    bias: tf.Tensor  # [B, 1, 1, T], added to the scores of attention
    is_training: bool

    def dropout(self, x: tf.Tensor, rate: float) -> tf.Tensor:
        return dropout(x, rate) if self.is_training else x

    def layer_norm(self, x: tf.Tensor) -> tf.Tensor:
        epsilon = self.config.layer_norm_eps
        return layer_norm(x, epsilon, is_training=self.is_training)

    def dense(self, x: tf.Tensor, units: int, name: str = "dense") -> tf.Tensor:
        return dense(
            x,
            units,
            name,
            initializer_range=self.config.initializer_range,
            is_training=self.is_training,
        )


class _Sum(NamedTuple):
    """Output of half a layer, before its layer normalization.

    The part that reads it normalizes it, so that every part of a layer ends with a
    matrix product. The backward pass of a part does not need that product, which is
    not computed again if the part is recomputed.
    """

    tokens: tf.Tensor  # [P, H], or [B, H] for the first tokens only
    # Variable scope of the layer normalization; None: the tokens are normalized.
    scope: tf.compat.v1.VariableScope | None


def _normalized(shared: _Shared, x: _Sum) -> tf.Tensor:
    if x.scope is None:
        return x.tokens
    with tf.compat.v1.variable_scope(x.scope, reuse=tf.compat.v1.AUTO_REUSE):
        return shared.layer_norm(x.tokens)


def _padding_bias(input_mask: tf.Tensor) -> tf.Tensor:
    padding = 1.0 - tf.cast(input_mask, tf.float32)
    return (padding * _PADDING_BIAS)[:, tf.newaxis, tf.newaxis, :]


def _token_count(config: BertConfig, input_ids: tf.Tensor) -> tf.Tensor:
    """Returns T, checked against the position table at graph build or run time."""
    limit = config.max_position_embeddings
    sentence = (
        f"`input_ids` must have at most `max_position_embeddings` = {limit} tokens per "
        "example. Received: {}. Use a smaller max_seq_length."
    )
    static_count = input_ids.shape[1]
    if static_count is not None and static_count > limit:
        raise ValueError(sentence.format(static_count))
    count = tf.shape(input_ids)[1]
    if static_count is not None:
        return count
    check = tf.debugging.assert_less_equal(
        count, limit, message=sentence.format("more")
    )
    with tf.control_dependencies([check]):
        return tf.identity(count)


def _embed(shared: _Shared, input_ids: tf.Tensor, segment_ids: tf.Tensor) -> _Sum:
    """Returns words + positions + segments, normalized, [P, H]."""
    config, pack = shared.config, shared.packing.pack
    width = config.hidden_size
    padded_shape = [tf.shape(input_ids)[0], _token_count(config, input_ids), width]
    with tf.compat.v1.variable_scope("embeddings"):
        word_table = _table(config, "word_embeddings", config.vocab_size)
        segment_table = _table(config, "token_type_embeddings", config.type_vocab_size)
        position_table = _table(
            config, "position_embeddings", config.max_position_embeddings
        )
        # Words are gathered, so their gradient is IndexedSlices over the tokens; the
        # two small tables get dense gradients, as in google-research/bert.
        words = tf.gather(word_table, pack(input_ids))
        positions = tf.slice(position_table, [0, 0], padded_shape[1:])  # [T, H]
        positions = pack(tf.broadcast_to(positions, padded_shape))
        segments = tf.one_hot(pack(segment_ids), config.type_vocab_size)
        tokens = words + positions + tf.matmul(segments, segment_table)
        tokens = shared.layer_norm(tokens)
    return _Sum(shared.dropout(tokens, config.hidden_dropout_prob), None)


def _table(config: BertConfig, name: str, rows: int) -> tf.Variable:
    return tf.compat.v1.get_variable(
        name,
        [rows, config.hidden_size],
        initializer=first_weights(name, config.initializer_range),
    )


def _layer(
    shared: _Shared, x: _Sum, recomputed: Callable | None, only_first: bool = False
) -> _Sum:
    """Returns one layer's output [P, H], or [B, H] for the first tokens only.

    For these, only keys and values need all tokens: a sixth of the work. It is the last
    layer, of which the backward pass is the first to run: recomputing it frees nothing.
    """
    part = recomputed
    if recomputed is None or only_first:
        part = _kept
    with tf.compat.v1.variable_scope("attention"):
        inputs, context = part(_attention)(shared, x, only_first)
        x = part(_output)(shared, context, inputs)
    return part(_feed_forward)(shared, x)


def _kept(layer: Callable) -> Callable:
    return layer


def _attention(
    shared: _Shared, x: _Sum, only_first: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the normalized input and the output of attention."""
    tokens = _normalized(shared, x)
    inputs = shared.packing.unpack(tokens)[:, 0] if only_first else tokens
    with tf.compat.v1.variable_scope("self"):
        return inputs, _attend(shared, inputs, tokens, only_first)


def _feed_forward(shared: _Shared, x: _Sum) -> _Sum:
    inputs = _normalized(shared, x)
    with tf.compat.v1.variable_scope("intermediate"):
        act = activation(shared.config.hidden_act, is_training=shared.is_training)
        wide = act(shared.dense(inputs, shared.config.intermediate_size))
    return _output(shared, wide, inputs)


def _attend(
    shared: _Shared, inputs: tf.Tensor, tokens: tf.Tensor, only_first: bool
) -> tf.Tensor:
    """Returns `softmax(query @ key.T / sqrt(D) + bias) @ value`, [P or B, H]."""
    width, heads = shared.config.hidden_size, shared.config.num_attention_heads
    depth, split_heads = width // heads, shared.packing.split_heads
    # Scaling the query instead of the scores touches fewer numbers.
    query = shared.dense(inputs, width, "query") * (1.0 / math.sqrt(depth))
    if only_first:
        query = tf.reshape(query, [-1, heads, 1, depth])
    else:
        query = split_heads(query)  # [B, N, T, D]
    key = split_heads(shared.dense(tokens, width, "key"))
    value = split_heads(shared.dense(tokens, width, "value"))
    scores = tf.matmul(query, key, transpose_b=True)
    attention = shared.dropout(
        tf.nn.softmax(scores + shared.bias),  # [B, N, 1 or T, T]
        shared.config.attention_probs_dropout_prob,
    )
    context = weighted_sum(attention, value, is_training=shared.is_training)
    # [B, N, 1 or T, D]
    if only_first:
        return tf.reshape(context, [-1, width])
    return shared.packing.join_heads(context)


def _output(shared: _Shared, x: tf.Tensor, residual: tf.Tensor) -> _Sum:
    with tf.compat.v1.variable_scope("output"):
        x = shared.dense(x, shared.config.hidden_size)
        x = shared.dropout(x, shared.config.hidden_dropout_prob)
        return _Sum(x + residual, tf.compat.v1.get_variable_scope())
