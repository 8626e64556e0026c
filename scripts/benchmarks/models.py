"""BERT in five sizes, with random weights, on random tokens without padding."""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from bert_finetune import modeling


class Size(NamedTuple):
    """Layers, width, heads and vocabulary; a head has 64 dimensions, MiniLM's 32."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int = 30522


# google-research/bert's miniatures, all-MiniLM-L6's shape, and BERT-Base.
SIZES = {
    "tiny": Size(2, 128, 2),
    "mini": Size(4, 256, 4),
    "small": Size(4, 512, 8),
    "6-layer": Size(6, 384, 12),
    "base": Size(12, 768, 12),
}


def bert_config(size: Size, dropout: float = 0.0) -> modeling.BertConfig:
    """Returns the encoder of that size, with that rate of dropout."""
    return modeling.BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def token_ids(size: Size, micro_batch_size: int, tokens: int) -> tf.Variable:
    """Returns random ids, int32 [micro_batch_size, tokens].

    A variable, because TensorFlow computes the parts that depend on constants only
    once.
    """
    shape = [micro_batch_size, tokens]
    ids = np.random.default_rng(0).integers(0, size.vocabulary, shape, np.int32)
    return tf.compat.v1.Variable(ids, trainable=False, use_resource=True)


def classification_loss(
    size: Size, ids: tf.Tensor, mask: tf.Tensor | None = None, dropout: float = 0.0
) -> tf.Tensor:
    """Builds the encoder and a classifier of two classes.

    Args:
        size: Layers, width and vocabulary of the encoder.
        ids: Token ids [B, T], such as those of `token_ids`.
        mask: 1 at tokens and 0 at padding [B, T]; None without padding.
        dropout: Rate of dropout.

    Returns:
        The mean loss, a scalar.
    """
    mask, segments = tf.ones_like(ids) if mask is None else mask, tf.zeros_like(ids)
    config = bert_config(size, dropout)
    pooled = modeling.encode(config, ids, mask, segments, is_training=True).pooled
    logits = modeling.classifier_logits(
        pooled, 2, is_training=True, dropout_prob=dropout
    )
    labels = tf.zeros_like(ids[:, 0])
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )
