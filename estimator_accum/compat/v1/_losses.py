"""Losses of TensorFlow 1's `tf.contrib.losses`: those of `tf.losses`, logits first."""

import inspect

import tensorflow.compat.v1 as tf


def with_second_first(function):
    """Returns a function with the first two arguments exchanged, which may be named."""
    second, first, *others = inspect.signature(function).parameters

    def exchanged(*arguments, **named):
        names = [first, second, *others][: len(arguments)]
        return function(**dict(zip(names, arguments)), **named)

    return exchanged


absolute_difference = with_second_first(tf.losses.absolute_difference)
log_loss = with_second_first(tf.losses.log_loss)
mean_squared_error = with_second_first(tf.losses.mean_squared_error)
sigmoid_cross_entropy = with_second_first(tf.losses.sigmoid_cross_entropy)
softmax_cross_entropy = with_second_first(tf.losses.softmax_cross_entropy)
sparse_softmax_cross_entropy = with_second_first(tf.losses.sparse_softmax_cross_entropy)
add_loss = tf.losses.add_loss
get_losses = tf.losses.get_losses
get_regularization_losses = tf.losses.get_regularization_losses
get_total_loss = tf.losses.get_total_loss
compute_weighted_loss = tf.losses.compute_weighted_loss
