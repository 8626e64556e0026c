"""The Keras versions of this installation, with small models in them."""

import importlib
import importlib.util
import inspect

import numpy as np
import pytest
import tensorflow as tf

from estimator_accum.keras._accumulate import is_supported
from scripts.experiments.optimizer_table import sum_of_rows

KINDS = [("keras", "new"), ("keras", "legacy")] * is_supported(
    importlib.import_module("keras")
)
if importlib.util.find_spec("tf_keras"):
    KINDS = [("tf_keras", "new"), ("tf_keras", "legacy"), ("keras", "new")]


def marks_of(kind: tuple[str, str]) -> list[pytest.MarkDecorator]:
    """Returns `once` for a tf_keras, whose optimizers the first Python has as `keras`."""
    return [pytest.mark.once] if kind[0] == "tf_keras" else []


class Kind:
    """One family of optimizers.

    Attributes:
        name: (root, kind), an element of KINDS.
        keras: The Keras module.
        is_legacy: Whether optimizers are those of `optimizers.legacy`.
        is_3: Whether it is Keras 3.
    """

    def __init__(self, root: str, kind: str):
        self.name = (root, kind)
        self.keras = importlib.import_module(root)
        self.is_legacy = kind == "legacy"
        self.is_3 = hasattr(self.keras, "ops")

    def optimizer(self, name: str, *args, **kwargs):
        """Returns `optimizers.<name>(...)`."""
        return getattr(self._home, name)(*args, **kwargs)

    @property
    def _home(self):
        home = self.keras.optimizers
        return home.legacy if self.is_legacy else home

    def names(self) -> list[str]:
        """Returns the names of all optimizer classes, wrappers of others included."""
        names = {
            name
            for name, cls in vars(self._home).items()
            if inspect.isclass(cls) and issubclass(cls, self._home.Optimizer)
        }
        return sorted(names - {"Optimizer"} | {"LossScaleOptimizer"})

    def any_optimizer(self, name: str):
        """Returns an optimizer of one of `names()`, with state of its own."""
        if name == "LossScaleOptimizer":
            inner = self.optimizer("Adam" if self.is_legacy else "AdamW", 0.05)
            return self.keras.mixed_precision.LossScaleOptimizer(inner)
        if name == "MultiOptimizer":
            optimizers = self.keras.optimizers
            biases = {".*bias": optimizers.SGD(0.05, momentum=0.9)}
            return optimizers.MultiOptimizer(
                optimizers.OptimizerMap(optimizers.Adam(0.05), biases)
            )
        has_momentum = (
            "momentum" in inspect.signature(getattr(self._home, name)).parameters
        )
        return self.optimizer(name, 0.05, **({"momentum": 0.9} if has_momentum else {}))

    def _begin(self, dtype: str):
        self.keras.backend.set_floatx(dtype)  # Keras 3 casts losses to it
        self.keras.utils.set_random_seed(0)
        return self.keras

    def dense_model(self, dtype: str = "float32"):
        """Returns a model of two dense layers, with the same weights at every call."""
        keras = self._begin(dtype)
        return keras.Sequential(
            [
                keras.Input((5,), dtype=dtype),
                keras.layers.Dense(4, activation="tanh", dtype=dtype),
                keras.layers.Dense(1, dtype=dtype),
            ]
        )

    def sparse_model(self, dtype: str = "float32"):
        """Returns a model with an embedding of 20 rows; an example looks up 3."""
        keras = self._begin(dtype)
        base = _summing(keras) if self.is_3 else keras.Sequential
        return base(
            [
                keras.Input((3,), dtype="int64"),
                keras.layers.Embedding(20, 4, dtype=dtype),
                keras.layers.Flatten(dtype=dtype),
                keras.layers.Dense(1, dtype=dtype),
            ]
        )


def _summing(keras):
    """Returns a model class that sums a row's slices, which Keras 3 does not do."""

    class Summing(keras.Sequential):
        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self._compute_loss(x=x, y=y, y_pred=y_pred)
                loss = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(loss, self.trainable_variables)
            pairs = zip(map(sum_of_rows, gradients), self.trainable_variables)
            self.optimizer.apply_gradients(list(pairs))
            return {"loss": loss}

    return Summing


@pytest.fixture(
    params=[
        pytest.param(kind, id="-".join(kind), marks=marks_of(kind)) for kind in KINDS
    ]
)
def kind(request):
    """Each family of optimizers."""
    keras_kind = Kind(*request.param)
    yield keras_kind
    keras_kind.keras.backend.set_floatx("float32")
    if keras_kind.is_3:  # which takes it from the first floatx, and no other one
        keras_kind.keras.mixed_precision.set_global_policy("float32")


def dense_data(examples: int, dtype: str = "float32"):
    """Returns x [examples, 5] and y [examples, 1]."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=[examples, 5]).astype(dtype)
    return x, rng.normal(size=[examples, 1]).astype(dtype)


def sparse_data(examples: int, dtype: str = "float32"):
    """Returns row ids [examples, 3] and y [examples, 1]."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 20, size=[examples, 3])
    return x, rng.normal(size=[examples, 1]).astype(dtype)


def fit(model, optimizer, data, batch, epochs=1, loss="mse", **kwargs):
    """Compiles and trains, batches in order; returns the History."""
    names = ("jit_compile", "run_eagerly", "steps_per_execution")
    options = {name: kwargs.pop(name) for name in names if name in kwargs}
    model.compile(optimizer, loss, **{"jit_compile": False, **options})
    return model.fit(
        *data, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **kwargs
    )


def apply_each(optimizer, variable, gradients, in_graph=False, **options):
    """Applies one gradient after the other; returns the variable after each."""

    def apply(gradient):
        optimizer.apply_gradients([(gradient, variable)], **options)

    apply = tf.function(apply) if in_graph else apply
    values = []
    for gradient in gradients:
        apply(tf.constant(gradient))
        values.append(variable.numpy())
    return values


def difference(model, other) -> float:
    """Returns the largest weight difference, relative to its variable's largest."""
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return max(np.abs(a - b).max() / np.abs(a).max() for a, b in pairs)
