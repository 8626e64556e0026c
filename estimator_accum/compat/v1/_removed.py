"""Removed names of Python, NumPy or TensorFlow that TensorFlow 1 scripts use.

    inspect.getargspec                            until Python 3.10
    collections.Mapping, .Iterable, ...           until Python 3.9
    imp.load_source, .reload, .new_module         until Python 3.11
    np.int, np.object, np.float_, np.product ...  until NumPy 1.23, 1.26 or 2.3
    variable of TensorFlow's variable_scope       in copies of tf.metrics

Only missing names are added. `distutils` comes from setuptools, which TensorFlow needs.
"""

import collections
import collections.abc
import importlib
import importlib.util
import inspect
import sys
import types

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import variable_scope

from estimator_accum.compat.v1 import _imports

ArgSpec = collections.namedtuple("ArgSpec", "args varargs keywords defaults")

_NUMPY = {
    "int": int,
    "float": float,
    "bool": bool,
    "object": object,
    "str": str,
    "complex": complex,
    "unicode": str,
    "long": int,
    "float_": np.float64,
    "complex_": np.complex128,
    "unicode_": np.str_,
    "string_": np.bytes_,
    "Inf": np.inf,
    "Infinity": np.inf,
    "infty": np.inf,
    "PINF": np.inf,
    "NINF": -np.inf,
    "NaN": np.nan,
    "NAN": np.nan,
    "product": np.prod,
    "cumproduct": np.cumprod,
    "sometrue": np.any,
    "alltrue": np.all,
    "round_": np.round,
    "row_stack": np.vstack,
    "asscalar": lambda array: array.item(),
    "in1d": lambda first, second, *a, **k: np.isin(np.ravel(first), second, *a, **k),
    "rank": np.ndim,
}


def install() -> None:
    """Adds the names that are missing."""
    _add(inspect, {"getargspec": getargspec})
    abstract = {name: getattr(collections.abc, name) for name in _ABSTRACT}
    _add(collections, abstract)
    _add(np, _NUMPY)
    _add(variable_scope, {"variable": tf.compat.v1.Variable})
    if importlib.util.find_spec("imp") is None:
        imp = sys.modules["imp"] = types.ModuleType("imp", "Made by this package.")
        imp.load_source, imp.reload = load_source, importlib.reload
        imp.new_module = types.ModuleType


_ABSTRACT = ("Callable", "Container", "Hashable", "ItemsView", "Iterable", "Iterator")
_ABSTRACT += ("KeysView", "Mapping", "MappingView", "MutableMapping", "MutableSequence")
_ABSTRACT += ("MutableSet", "Sequence", "Set", "Sized", "ValuesView")


def _add(module: types.ModuleType, names: dict) -> None:
    for name, value in names.items():
        if name not in vars(module):  # hasattr would ask NumPy, which warns
            setattr(module, name, value)


def getargspec(function) -> ArgSpec:
    """Returns the arguments of a function without keyword-only ones.

    Raises:
        ValueError: If the function has keyword-only arguments.
    """
    spec = inspect.getfullargspec(function)
    if spec.kwonlyargs:
        raise ValueError(
            "inspect.getargspec must get a function without keyword-only arguments. "
            f"Received: {function}. Use inspect.signature."
        )
    return ArgSpec(*spec[:4])


def load_source(name: str, path: str) -> types.ModuleType:
    """Imports a file as the module `name`."""
    loader = _imports.UsersLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
