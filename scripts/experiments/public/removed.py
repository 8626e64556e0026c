"""Stand-ins for names that TensorFlow 2 removed, where `--v1` has none.

A script's text stays as it is: what it imports is there before it does.
"""

import importlib
import sys
import types

import tensorflow as tf

v1 = tf.compat.v1


def add_module(name: str, **members) -> None:
    """Makes `import name` give a module with those members."""
    parent, _, last = name.rpartition(".")
    if parent and parent not in sys.modules:
        add_module(parent)
    module = sys.modules.get(name) or types.ModuleType(name)
    module.__path__ = []  # it may have submodules
    vars(module).update(members)
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], last, module)


def add_estimator(*names: str) -> None:
    """Makes modules of tensorflow.python.estimator those of tensorflow_estimator."""
    for name in names:
        module = importlib.import_module(
            f"tensorflow_estimator.python.estimator.{name}"
        )
        full = f"tensorflow.python.estimator.{name}"
        add_module(full.rpartition(".")[0])
        sys.modules[full] = module


def add_crf() -> None:
    """Makes `tensorflow.contrib.crf`, for sequences whose length is static."""
    crf = {"crf_log_likelihood": log_likelihood, "crf_decode": decode}
    add_module("tensorflow.contrib.crf", **crf)


def log_likelihood(inputs, tag_indices, sequence_lengths, transition_params):
    """Returns log p(tags) of a linear chain, [B], and the transitions.

    Args:
        inputs: Scores [B, T, N].
        tag_indices: Tags [B, T].
        sequence_lengths: Number of tags that count, [B].
        transition_params: Scores [N, N] of a tag after another.
    """
    length, tags = inputs.shape[1], inputs.shape[2]
    mask = tf.sequence_mask(sequence_lengths, length, tf.float32)
    one_hot = tf.one_hot(tag_indices, tags)  # [B, T, N]
    score = tf.reduce_sum(mask[:, :, None] * one_hot * inputs, [1, 2])
    pairs = tf.einsum(
        "bti,ij,btj->bt", one_hot[:, :-1], transition_params, one_hot[:, 1:]
    )
    score += tf.reduce_sum(mask[:, 1:] * pairs, 1)
    total = inputs[:, 0]  # [B, N]
    for i in range(1, length):
        after = total[:, :, None] + transition_params + inputs[:, i, None, :]
        after = tf.reduce_logsumexp(after, 1)
        total = tf.where(mask[:, i, None] * tf.ones_like(total) > 0, after, total)
    return score - tf.reduce_logsumexp(total, 1), transition_params


def decode(potentials, transition_params, sequence_length):
    """Returns the likeliest tags [B, T], 0 after the end, and their scores [B]."""
    length = potentials.shape[1]
    mask = tf.sequence_mask(sequence_length, length)
    total, back = potentials[:, 0], []
    for i in range(1, length):
        after = total[:, :, None] + transition_params + potentials[:, i, None, :]
        same = tf.zeros_like(total, tf.int32) + tf.range(total.shape[1])
        is_inside = tf.broadcast_to(mask[:, i, None], tf.shape(total))
        back.append(
            tf.where(is_inside, tf.argmax(after, 1, output_type=tf.int32), same)
        )
        total = tf.where(is_inside, tf.reduce_max(after, 1), total)
    tags = [tf.argmax(total, 1, output_type=tf.int32)]
    for pointers in reversed(back):
        tags.insert(0, tf.gather(pointers, tags[0], batch_dims=1))
    return tf.stack(tags, 1) * tf.cast(mask, tf.int32), tf.reduce_max(total, 1)
