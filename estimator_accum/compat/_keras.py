"""Keras 2 as `tf.keras`, on TensorFlows that come with Keras 3."""

import importlib.util
import operator
import os
import pathlib
import sys
import types

import tensorflow as tf

_KERAS_VARIABLE = "TF_USE_LEGACY_KERAS"
_KERAS_IS_LEGACY = ("1", "true", "True")  # TensorFlow's own list
_KERAS_LOADERS = ("keras", "losses", "metrics", "optimizers", "initializers")
_KERAS_LOADERS += ("compat.v1.keras", "compat.v1.layers", "compat.v1.nn.rnn_cell")
_KERAS_LOADERS += ("compat.v2.keras",)


def use_keras_2() -> None:
    """Resolves all of TensorFlow's names for Keras to tf_keras.

    TensorFlow reads TF_USE_LEGACY_KERAS at two times: its import chooses the folders
    for `from tensorflow.keras import ...`, and each of its lazy loaders (`tf.keras`,
    `tf.losses`, ...) chooses at its own first use.

    Raises:
        ImportError: If TF_USE_LEGACY_KERAS is not 1, or `tf.keras` is already Keras 3.
    """
    received = os.environ.get(_KERAS_VARIABLE) or "1"
    if received not in _KERAS_IS_LEGACY:
        raise ImportError(
            f"{_KERAS_VARIABLE} must be 1 for tf.estimator. "
            f"Received: {received}. Unset it, or set it to 1."
        )
    os.environ[_KERAS_VARIABLE] = received
    _redirect_imports_of_keras()
    names = {f"tf.{name}": operator.attrgetter(name)(tf) for name in _KERAS_LOADERS}
    for name in ("tensorflow.keras", "tensorflow.compat.v1.keras"):
        if name in sys.modules:
            names[name] = sys.modules[name]
    for name, module in names.items():
        _ = module.__name__  # loads a lazy module
        if _is_keras_3(module):
            raise ImportError(
                "tf.estimator must be enabled before Keras 3 is used as tf.keras. "
                f"Received: {name} = {module.__name__}. Call enable_estimator() "
                f"earlier, or start the process with {_KERAS_VARIABLE}=1."
            )


def _redirect_imports_of_keras() -> None:
    """Makes `from tensorflow.keras import ...` find tf_keras."""
    keras_3 = importlib.util.find_spec("keras")
    if keras_3 is None:
        return
    theirs = os.path.join(os.path.dirname(keras_3.origin), "api", "")
    keras_2 = importlib.util.find_spec("tf_keras")
    ours = os.path.join(os.path.dirname(keras_2.origin), "api", "")
    for module in (tf, tf.compat.v1, tf.compat.v1.nn, tf.compat.v2):
        module.__path__ = [path.replace(theirs, ours) for path in module.__path__]


def _is_keras_3(module: types.ModuleType) -> bool:
    if module.__name__.startswith("tensorflow."):  # by an import statement
        folder = pathlib.Path(module.__file__).parts
        return "tf_keras" not in folder
    return not module.__name__.startswith("tf_keras.")
