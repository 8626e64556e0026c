"""Losses of TensorFlow 1's `tf.contrib.losses`: those of `tf.losses`, logits first."""

import inspect

import tensorflow.compat.v1 as tf


def _with_second_first(loss):
    """Returns a loss with the first two arguments exchanged, which may be named."""
    second, first, *others = inspect.signature(loss).parameters

    def contrib_loss(*arguments, **named):
        names = [first, second, *others][: len(arguments)]
        return loss(**dict(zip(names, arguments)), **named)

    return contrib_loss


absolute_difference = _with_second_first(tf.losses.absolute_difference)
log_loss = _with_second_first(tf.losses.log_loss)
mean_squared_error = _with_second_first(tf.losses.mean_squared_error)
sigmoid_cross_entropy = _with_second_first(tf.losses.sigmoid_cross_entropy)
softmax_cross_entropy = _with_second_first(tf.losses.softmax_cross_entropy)
sparse_softmax_cross_entropy = _with_second_first(
    tf.losses.sparse_softmax_cross_entropy
)
add_loss = tf.losses.add_loss
get_losses = tf.losses.get_losses
get_regularization_losses = tf.losses.get_regularization_losses
get_total_loss = tf.losses.get_total_loss


def compute_weighted_loss(losses, weights=1.0):
    """Returns the mean of `weights * losses` over the losses whose weight is not 0."""
    return tf.losses.compute_weighted_loss(losses, weights)
