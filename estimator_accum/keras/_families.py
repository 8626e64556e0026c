"""Adapters for the three families of Keras optimizers.

    keras 3                        `Keras3`
    tf.keras 2.15 and tf_keras     `Keras2`, and `Keras2Legacy` for
                                   `optimizers.legacy`, which tf.estimator uses

An adapter is the family's part of `_optimizer.Accumulating`; the other part, with the
rule, is the same for all families.
"""

import importlib

from estimator_accum.keras._keras_2 import Keras2, Keras2Legacy
from estimator_accum.keras._keras_3 import Keras3

_ADAPTERS = {
    "OptimizerV2": Keras2Legacy,
    "_BaseOptimizer": Keras2,
    "BaseOptimizer": Keras3,
}


def find_family(optimizer) -> tuple[str, type] | None:
    """Returns ("keras" or "tf_keras", adapter), or None for other objects."""
    for cls in type(optimizer).__mro__:
        root = cls.__module__.split(".")[0]
        if root in ("keras", "tf_keras") and cls.__name__ in _ADAPTERS:
            return root, _ADAPTERS[cls.__name__]
    return None


def adapters_of(keras) -> list[type]:
    """Returns the adapters of one Keras."""
    return [Keras3] if hasattr(keras, "ops") else [Keras2, Keras2Legacy]


def load(root: str):
    """Returns the module `keras` or `tf_keras`."""
    return importlib.import_module(root)
