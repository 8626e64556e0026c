"""The network's inputs, made of the columns of the table.

Shapes: B = examples of a micro-batch, F = the network's inputs per example.
"""

import functools
from typing import NamedTuple

import numpy as np
import pandas as pd
import tensorflow as tf

from housing_example.table import CATEGORY, COLUMNS, TARGET

_NUMBERS = tuple(name for name in COLUMNS if name not in (CATEGORY, TARGET))
# Transforms for skewed columns; `math` is NumPy or `tf.math`.
_TRANSFORMS = {
    "CRIM": lambda values, math: math.log(values + 0.01),
    "B": lambda values, math: math.minimum(math.maximum(values, 300.0), 400.0),
}


class Moments(NamedTuple):
    """Moments of one column of the training examples, after its transform."""

    mean: float
    deviation: float  # > 0


def measure(train: pd.DataFrame) -> dict[str, Moments]:
    """Returns the moments of the target and of all numeric columns.

    Args:
        train: Training examples; a constant column gets the deviation 1.
    """
    moments = {}
    for name in (*_NUMBERS, TARGET):
        values = _transform(name, train[name].to_numpy(np.float64), np)
        moments[name] = Moments(float(values.mean()), _deviation(values))
    return moments


def _deviation(values: np.ndarray) -> float:
    # The deviation of equal numbers need not be 0 in floating point.
    return float(values.std()) if np.ptp(values) > 0 else 1.0


def feature_columns(moments: dict[str, Moments]) -> list:
    """Returns the feature columns of the network's input layer, float32 [B, F].

    Args:
        moments: Result of `measure`, which normalizes the log of CRIM, the clipped B
            and the other numbers to mean 0 and deviation 1 over the training examples.
    """
    category = tf.feature_column.categorical_column_with_identity(CATEGORY, 2)
    return [tf.feature_column.indicator_column(category)] + [
        tf.feature_column.numeric_column(
            name,
            normalizer_fn=functools.partial(_normalize, name, moments[name]),
        )
        for name in _NUMBERS
    ]


def _normalize(name: str, moments: Moments, values: tf.Tensor) -> tf.Tensor:
    return (_transform(name, values, tf.math) - moments.mean) / moments.deviation


def _transform(name: str, values, math):
    return _TRANSFORMS[name](values, math) if name in _TRANSFORMS else values
