"""Modules that tensorflow-estimator imports but newer TensorFlows lack."""

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import types

import tensorflow as tf

from estimator_accum.compat import _training

_ESTIMATOR = "tensorflow_estimator.python.estimator"
_OLD_NAMES = {  # up to TensorFlow 2.15 -> today
    "tensorflow.python.estimator": _ESTIMATOR,
    "tensorflow.python.training.training_ops": "tensorflow.python.ops.gen_training_ops",
}


def install() -> None:
    """Makes `tf.estimator` from tensorflow-estimator's modules."""
    for module in _replacements():
        sys.modules[module.__name__] = module
        parent, _, name = module.__name__.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], name, module)
    sys.meta_path.insert(0, OldNames(_OLD_NAMES))
    v1 = importlib.import_module(f"{_ESTIMATOR}.api._v1.estimator")
    v2 = importlib.import_module(f"{_ESTIMATOR}.api._v2.estimator")
    _refuse_use_tpu(v1.tpu.TPUEstimator)
    for name, api in (("", v2), (".compat.v1", v1), (".compat.v2", v2)):
        sys.modules[f"tensorflow{name}.estimator"] = api
    for outer in (tf, tf.compat.v1, tf.compat.v2):
        outer.compat.v1.estimator, outer.compat.v2.estimator = v1, v2
    tf.estimator = v2  # last, because enable_estimator() takes it as done


def _replacements() -> list[types.ModuleType]:
    embedding = ("AdagradParameters", "AdamParameters", "EmbeddingConfigSpec")
    embedding += ("StochasticGradientDescentParameters",)
    needs_tpu = ("session_support", "tpu_embedding_gradient")  # not used without one
    return [
        _module(
            "tensorflow.python.distribute.estimator_training",
            init_run_config=_training.init_run_config,
            should_run_distribute_coordinator=_training.should_run_distribute_coordinator,
            train_and_evaluate=_training.train_and_evaluate,
            estimator_train=_training.refusing_method("train"),
            estimator_evaluate=_training.refusing_method("evaluate"),
        ),
        _module(f"{_ESTIMATOR}.estimator_export", estimator_export=_EstimatorExport),
        *(_module(f"tensorflow.python.tpu.{name}") for name in needs_tpu),
        _module(
            f"{_ESTIMATOR}.tpu._tpu_estimator_embedding", **_refusing_classes(embedding)
        ),
    ]


def _module(name: str, **contents) -> types.ModuleType:
    module = types.ModuleType(name, "Made by estimator_accum.compat.")
    vars(module).update(contents)
    return module


class OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes imports of an old module, or of a submodule, find the new one.

    Args:
        names: Old names of modules, and the new ones.
    """

    def __init__(self, names: dict[str, str]):
        self._names = names

    def find_spec(self, fullname, path=None, target=None):
        del path, target
        if self._name_today(fullname) is not None:
            return importlib.machinery.ModuleSpec(fullname, self)
        return None

    def exec_module(self, module):
        name = self._name_today(module.__name__)
        sys.modules[module.__name__] = importlib.import_module(name)

    def _name_today(self, name: str) -> str | None:
        for old, new in self._names.items():
            if f"{name}.".startswith(f"{old}."):
                return name.replace(old, new, 1)
        return None


class _EstimatorExport:
    """Replaces the decorator that exported symbols to TensorFlow's API: no effect."""

    def __init__(self, *names: str, v1=None):
        del names, v1

    def __call__(self, symbol):
        return symbol

    def export_constant(self, module_name: str, name: str) -> None:
        del module_name, name


def _refusing_classes(names: tuple[str, ...]) -> dict[str, type]:
    def refuse(self, *args, **kwargs):
        del args, kwargs
        _refuse_tpu(type(self).__name__)

    return {name: type(name, (), {"__init__": refuse}) for name in names}


def _refuse_use_tpu(tpu_estimator: type) -> None:
    """Makes TPUEstimator refuse `use_tpu=True`, which is its default."""
    make = tpu_estimator.__init__
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_without_tpu(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["use_tpu"]:
            _refuse_tpu("TPUEstimator(use_tpu=True)")
        make(self, *args, **kwargs)

    tpu_estimator.__init__ = make_without_tpu


def _refuse_tpu(received: str):
    raise NotImplementedError(
        "TPUs with tf.estimator must have TensorFlow 2.15, the last with their "
        f"modules. Received: {received} on TensorFlow {tf.__version__}. Use "
        "TPUEstimator(use_tpu=False) without embeddings on TPUs."
    )
