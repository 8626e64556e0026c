"""`tf.contrib.crf`: linear-chain conditional random fields.

    score of tags     sum over t of inputs[t, tag_t] + sum over t of transitions[tag_t-1, tag_t]
    log likelihood    score of the tags - log of the sum over all tags of e^score

B = sequences, T = steps, K = tags; steps from a sequence's length on do not count.
"""

import numpy as np
import tensorflow as tf

_Cell = tf.compat.v1.nn.rnn_cell.RNNCell


def crf_log_likelihood(
    inputs, tag_indices, sequence_lengths, transition_params=None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Computes the log likelihood of sequences of tags.

    Args:
        inputs: Unary scores, a [B, T, K] tensor.
        tag_indices: Tags, an integer [B, T] tensor.
        sequence_lengths: Lengths of the sequences, an integer [B] tensor [steps].
        transition_params: Scores [K, K] of each tag behind each other one; None makes
            a variable.

    Creates:
        transitions: [K, K], if there are no `transition_params`.

    Returns:
        (log likelihoods [B], scores [K, K] of transitions).
    """
    num_tags = tf.TensorShape(inputs.shape).as_list()[2]
    if transition_params is None:
        transition_params = tf.compat.v1.get_variable(
            "transitions", [num_tags, num_tags]
        )
    arguments = (sequence_lengths, transition_params)
    scores = crf_sequence_score(inputs, tag_indices, *arguments)
    return scores - crf_log_norm(inputs, *arguments), transition_params


def crf_sequence_score(
    inputs, tag_indices, sequence_lengths, transition_params
) -> tf.Tensor:
    """Computes the scores [B] of sequences of tags; arguments as above."""
    unary = crf_unary_score(tag_indices, sequence_lengths, inputs)
    if _has_one_step(inputs):
        return unary
    return unary + crf_binary_score(tag_indices, sequence_lengths, transition_params)


def crf_multitag_sequence_score(
    inputs, tag_bitmap, sequence_lengths, transition_params
) -> tf.Tensor:
    """Computes the log of the sum of e^score over all sequences of allowed tags.

    Args:
        inputs: As above.
        tag_bitmap: Whether a tag is allowed, a bool [B, T, K] tensor.
        sequence_lengths: As above.
        transition_params: As above.

    Returns:
        Scores [B].
    """
    inputs = tf.convert_to_tensor(inputs)
    never = tf.fill(tf.shape(inputs), tf.constant(-np.inf, inputs.dtype))
    allowed = tf.where(tf.cast(tag_bitmap, tf.bool), inputs, never)
    # With one step TensorFlow 1 counts it, whatever the length.
    one_step = tf.fill(tf.shape(sequence_lengths), tf.equal(tf.shape(inputs)[1], 1))
    lengths = tf.cast(sequence_lengths, tf.int32)
    return crf_log_norm(
        allowed, tf.where(one_step, tf.ones_like(lengths), lengths), transition_params
    )


def crf_log_norm(inputs, sequence_lengths, transition_params) -> tf.Tensor:
    """Computes the log of the sum of e^score over all tags, [B]; arguments as above."""
    cell = CrfForwardRnnCell(transition_params)
    _, alphas = _run(cell, inputs, sequence_lengths)
    log_norm = tf.reduce_logsumexp(alphas, 1)
    is_empty = tf.less_equal(tf.cast(sequence_lengths, tf.int32), 0)
    return tf.where(is_empty, tf.zeros_like(log_norm), log_norm)


def crf_unary_score(tag_indices, sequence_lengths, inputs) -> tf.Tensor:
    """Sums the scores of tags at their steps, [B]; arguments as above."""
    inputs = tf.convert_to_tensor(inputs)
    batch, steps, num_tags = tf.unstack(tf.shape(inputs))
    begins = tf.reshape(tf.range(batch * steps) * num_tags, [batch, steps])
    places = begins + tf.cast(tag_indices, tf.int32)
    scores = tf.gather(tf.reshape(inputs, [-1]), places)  # [B, T]
    return _sum(scores, _mask(tag_indices, sequence_lengths, scores.dtype))


def crf_binary_score(tag_indices, sequence_lengths, transition_params) -> tf.Tensor:
    """Sums the scores of transitions between tags, [B]; arguments as above."""
    transitions = tf.convert_to_tensor(transition_params)
    tags = tf.cast(tag_indices, tf.int32)
    places = tags[:, :-1] * tf.shape(transitions)[0] + tags[:, 1:]
    scores = tf.gather(tf.reshape(transitions, [-1]), places)  # [B, T - 1]
    mask = _mask(tag_indices, sequence_lengths, scores.dtype)
    return _sum(scores, mask[:, 1:])


def crf_decode(
    potentials, transition_params, sequence_length
) -> tuple[tf.Tensor, tf.Tensor]:
    """Finds the tags with the highest scores.

    Args:
        potentials: Unary scores, a [B, T, K] tensor.
        transition_params: Scores [K, K] of transitions.
        sequence_length: Lengths, an integer [B] tensor [steps].

    Returns:
        (tags, int32 [B, T], 0 behind a sequence; their scores [B]).
    """
    num_tags = tf.TensorShape(potentials.shape).as_list()[2]
    cell = CrfDecodeForwardRnnCell(transition_params)
    origins, scores = _run(cell, potentials, sequence_length, tf.int32)
    last = tf.argmax(scores, 1, tf.int32)[:, None]
    if origins is None:
        return last, tf.reduce_max(scores, 1)
    transitions = tf.maximum(tf.cast(sequence_length, tf.int32) - 1, 0)
    origins = tf.reverse_sequence(origins, transitions, seq_axis=1)
    tags, _ = tf.compat.v1.nn.dynamic_rnn(
        CrfDecodeBackwardRnnCell(num_tags), origins, transitions, last, dtype=tf.int32
    )
    tags = tf.concat([last, tags[:, :-1, 0]], 1)
    tags = tf.reverse_sequence(tags, tf.cast(sequence_length, tf.int32), seq_axis=1)
    return tags, tf.reduce_max(scores, 1)


def viterbi_decode(score, transition_params) -> tuple[list[int], float]:
    """Finds the tags with the highest score, in NumPy.

    Args:
        score: Unary scores of one sequence, an array [T, K].
        transition_params: Scores of transitions, an array [K, K].

    Returns:
        (list of T tags, their score).
    """
    best, origins = score[0], []
    for unary in score[1:]:
        sums = best[:, None] + transition_params
        origins.append(np.argmax(sums, 0))
        best = (unary + np.max(sums, 0)).astype(score.dtype)
    tags = [np.argmax(best)]
    for origin in reversed(origins):
        tags.append(origin[tags[-1]])
    return tags[::-1], np.max(best)


class CrfForwardRnnCell(_Cell):
    """Adds one step to the logs [B, K] of sums of e^score over all tags before it."""

    def __init__(self, transition_params):
        self._transitions = tf.convert_to_tensor(transition_params)
        self._num_tags = self._transitions.shape.as_list()[0]

    @property
    def state_size(self):
        return self._num_tags

    @property
    def output_size(self):
        return self._num_tags

    def __call__(self, inputs, state, scope=None):
        sums = state[:, :, None] + self._transitions
        alphas = inputs + tf.reduce_logsumexp(sums, 1)
        return alphas, alphas


class CrfDecodeForwardRnnCell(CrfForwardRnnCell):
    """Adds one step to the highest scores [B, K]; returns from which tag they come."""

    def __call__(self, inputs, state, scope=None):
        sums = state[:, :, None] + self._transitions
        return tf.argmax(sums, 1, tf.int32), inputs + tf.reduce_max(sums, 1)


class CrfDecodeBackwardRnnCell(_Cell):
    """Goes from tags [B, 1] to those that they come from."""

    def __init__(self, num_tags):
        self._num_tags = num_tags

    @property
    def state_size(self):
        return 1

    @property
    def output_size(self):
        return 1

    def __call__(self, inputs, state, scope=None):
        chosen = tf.one_hot(state[:, 0], self._num_tags, dtype=inputs.dtype)
        tags = tf.reduce_sum(inputs * chosen, 1, keepdims=True)
        return tags, tags


def _run(cell, inputs, sequence_lengths, dtype=None):
    """Runs a cell from the first step's scores, over the steps behind it."""
    inputs = tf.convert_to_tensor(inputs)
    if _has_one_step(inputs):
        return None, inputs[:, 0]
    steps = tf.maximum(tf.cast(sequence_lengths, tf.int32) - 1, 0)
    # A loop needs a step, which is beyond the length if there is no transition.
    rest = tf.pad(inputs[:, 1:], [[0, 0], [0, 1], [0, 0]])
    return tf.compat.v1.nn.dynamic_rnn(
        cell, rest, steps, inputs[:, 0], dtype=dtype or inputs.dtype
    )


def _has_one_step(inputs) -> bool:
    """Returns whether there is no transition, and so no gradient with respect to them."""
    return tf.TensorShape(inputs.shape).as_list()[1] == 1


def _mask(tag_indices, sequence_lengths, dtype) -> tf.Tensor:
    steps = tf.shape(tag_indices)[1]
    return tf.sequence_mask(sequence_lengths, steps, dtype)


def _sum(scores, mask) -> tf.Tensor:
    return tf.reduce_sum(scores * mask, 1)
