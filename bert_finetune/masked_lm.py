"""Masked language modelling: pre-trains an encoder and saves it as `bert_model.ckpt`.

    loss = mean over the masked tokens of -log p(token | the other tokens)

Enough for a small model of a small language; BERT's second task, next-sentence
prediction, is left out, and with it the training of the pooler. Of the masked tokens,
80 % become [MASK], 10 % become another token, and 10 % stay.

B = batch, T = tokens, M = masked tokens of a batch, H = hidden, V = vocabulary.
Source: https://arxiv.org/abs/1810.04805, section 3.1.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from bert_finetune.layers import activation, dense, layer_norm
from bert_finetune.modeling import BertConfig, EncoderOutput, encode
from bert_finetune.optimization import AdamWeightDecayOptimizer, learning_rate
from estimator_accum import get_or_create_update_step, make_accumulating_train_op

_MASKED_SHARE = 0.2  # of the tokens; BERT's paper masks 0.15 of longer texts
_WARMUP_SHARE = 0.1
_CLIP_NORM = 1.0


class _Batch(NamedTuple):
    """The int32 placeholders of a batch, or the arrays that are fed to them."""

    input_ids: object  # [B, T]
    masked_places: object  # [M], places among the B * T tokens
    masked_ids: object  # [M], the original tokens


def pretrain(
    config: BertConfig,
    sequences: Sequence[Sequence[int]],
    checkpoint: str | os.PathLike,
    *,
    special_ids: Sequence[int],
    pad_id: int,
    mask_id: int,
    num_updates: int,
    batch_size: int,
    peak_learning_rate: float,
    seed: int,
) -> float:
    """Trains an encoder from random weights and saves it.

    Args:
        config: Configuration of the encoder.
        sequences: Token ids of each text, [CLS] and [SEP] included; at most
            `max_position_embeddings` per text.
        checkpoint: Prefix of the checkpoint's files, e.g. `folder/bert_model.ckpt`.
        special_ids: Ids that are neither masked nor put in a masked token's place.
        pad_id: Id of [PAD].
        mask_id: Id of [MASK].
        num_updates: Updates of training, >= 1.
        batch_size: B [texts], drawn with replacement.
        peak_learning_rate: Rate after a tenth of the updates; then it falls to 0.
        seed: Random seed of the weights, the order and the masks.

    Creates: `bert/...` and `cls/predictions/...` under the names of the published
        checkpoints, the only variables that are saved.

    Returns:
        The mean loss of the last tenth of the updates [nats per masked token].
    """
    rows = _padded(sequences, pad_id)
    ordinary_ids = np.setdiff1d(np.arange(config.vocab_size), special_ids)
    random = np.random.RandomState(seed)
    losses = []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.set_random_seed(seed)
        batch = _Batch(
            tf.compat.v1.placeholder(tf.int32, [None, rows.shape[1]]),
            tf.compat.v1.placeholder(tf.int32, [None]),
            tf.compat.v1.placeholder(tf.int32, [None]),
        )
        loss, train_op = _graph(config, batch, pad_id, num_updates, peak_learning_rate)
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in tqdm(range(num_updates), "pre-training", unit=" update", disable=None):
            drawn = rows[random.randint(len(rows), size=batch_size)]
            fed = _mask(drawn, ordinary_ids, mask_id, random)
            feed_dict = dict(zip(batch, fed, strict=True))
            losses.append(session.run([loss, train_op], feed_dict)[0])
        _save(session, checkpoint)
    return float(np.mean(losses[-max(1, num_updates // 10) :]))


def _padded(sequences: Sequence[Sequence[int]], pad_id: int) -> np.ndarray:
    """Returns the sequences padded to the longest, int32 [texts, T]."""
    rows = np.full((len(sequences), max(map(len, sequences))), pad_id, np.int32)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return rows


def _mask(
    rows: np.ndarray,
    ordinary_ids: np.ndarray,
    mask_id: int,
    random: np.random.RandomState,
) -> _Batch:
    ids = rows.flatten()
    is_masked = np.isin(ids, ordinary_ids) & (random.rand(len(ids)) < _MASKED_SHARE)
    places = np.flatnonzero(is_masked)
    if not len(places):  # a batch without a masked token has no loss
        places = np.flatnonzero(np.isin(ids, ordinary_ids))[:1]
    masked_ids = ids[places]
    others = random.choice(ordinary_ids, size=len(places))
    fate = random.rand(len(places))
    ids[places] = np.select([fate < 0.8, fate < 0.9], [mask_id, others], masked_ids)
    return _Batch(ids.reshape(rows.shape), places.astype(np.int32), masked_ids)


def _graph(config, batch: _Batch, pad_id: int, num_updates: int, peak_rate: float):
    """Returns the loss and the train op."""
    output = encode(
        config,
        batch.input_ids,
        tf.cast(tf.not_equal(batch.input_ids, pad_id), tf.int32),
        tf.zeros_like(batch.input_ids),
        is_training=True,
    )
    logits = _masked_logits(config, output, batch.masked_places)  # [M, V]
    loss = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=batch.masked_ids, logits=logits
        )
    )
    rate = learning_rate(
        peak_rate,
        get_or_create_update_step(),
        num_updates,
        int(num_updates * _WARMUP_SHARE),
    )
    train_op = make_accumulating_train_op(
        loss,
        AdamWeightDecayOptimizer(rate, beta_2=0.98),
        gradient_accumulation_steps=1,
        clip_norm=_CLIP_NORM,
    )
    return loss, train_op


def _masked_logits(config, output: EncoderOutput, places: tf.Tensor) -> tf.Tensor:
    """Returns the logits [M, V] of the published checkpoints' head.

    The head is a dense layer, then the word embeddings.
    """
    width = config.hidden_size
    tokens = tf.gather(tf.reshape(output.sequence, [-1, width]), places)  # [M, H]
    with tf.compat.v1.variable_scope("bert/embeddings", reuse=True):
        embeddings = tf.compat.v1.get_variable("word_embeddings")
    with tf.compat.v1.variable_scope("cls/predictions"):
        with tf.compat.v1.variable_scope("transform"):
            tokens = dense(
                tokens,
                width,
                "dense",
                initializer_range=config.initializer_range,
                is_training=True,
            )
            tokens = activation(config.hidden_act, is_training=True)(tokens)
            tokens = layer_norm(tokens, config.layer_norm_eps, is_training=True)
        bias = tf.compat.v1.get_variable(
            "output_bias",
            [config.vocab_size],
            initializer=tf.compat.v1.zeros_initializer(),
        )
    return tf.nn.bias_add(tf.matmul(tokens, embeddings, transpose_b=True), bias)


def _save(session: tf.compat.v1.Session, checkpoint: str | os.PathLike) -> None:
    names = {
        variable.op.name: variable for variable in tf.compat.v1.trainable_variables()
    }
    tf.compat.v1.train.Saver(names).save(
        session, os.fspath(checkpoint), write_meta_graph=False, write_state=False
    )
