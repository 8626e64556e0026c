"""Summaries that a training wrote for TensorBoard."""

import pathlib

import tensorflow as tf


def read_scalars(folder, tag: str = "") -> list[tuple[str, int, float]]:
    """Returns (tag, global step, value) of the scalars whose tags contain `tag`."""
    return [
        (value.tag, event.step, _value(value))
        for path in sorted(pathlib.Path(folder).glob("events*"))
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
        if tag in value.tag
    ]


def _value(value) -> float:
    if value.HasField("tensor"):
        return tf.make_ndarray(value.tensor).item()
    return value.simple_value
