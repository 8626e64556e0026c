"""Devices of operations."""

import contextlib

import tensorflow as tf


def of_strings():
    """Returns the context of operations with strings, which GPUs do not have.

    A session places them there if told to, and fails. TensorFlow 2 moves them by itself.
    """
    if tf.compat.v1.executing_eagerly_outside_functions():
        return contextlib.nullcontext()
    return tf.device("/cpu:0")
