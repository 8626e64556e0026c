"""Names that Python and NumPy removed and TensorFlow 1 scripts use.

    inspect.getargspec                            until Python 3.10
    collections.Mapping, .Iterable, ...           until Python 3.9
    imp.load_source, .reload, .new_module         until Python 3.11
    distutils.version, .util.strtobool, ...       until Python 3.11
    np.int, np.object, np.float_, np.product ...  until NumPy 1.23, 1.26 or 2.3

Only what is missing is added.
"""

import collections
import collections.abc
import functools
import importlib
import importlib.util
import inspect
import itertools
import re
import shutil
import sys
import types

import numpy as np

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
    if importlib.util.find_spec("imp") is None:
        new_module = types.ModuleType
        _module("imp", load_source=load_source, reload=_reload, new_module=new_module)
    if importlib.util.find_spec("distutils") is None:  # setuptools has one
        _module("distutils", __path__=[])
        _module(
            "distutils.version", LooseVersion=LooseVersion, StrictVersion=LooseVersion
        )
        _module("distutils.util", strtobool=strtobool)
        _module("distutils.spawn", find_executable=shutil.which)
        copy_tree = functools.partial(shutil.copytree, dirs_exist_ok=True)
        _module("distutils.dir_util", copy_tree=copy_tree)


_ABSTRACT = ("Callable", "Container", "Hashable", "ItemsView", "Iterable", "Iterator")
_ABSTRACT += ("KeysView", "Mapping", "MappingView", "MutableMapping", "MutableSequence")
_ABSTRACT += ("MutableSet", "Sequence", "Set", "Sized", "ValuesView")


def _add(module: types.ModuleType, names: dict) -> None:
    for name, value in names.items():
        if name not in vars(module):  # hasattr would ask NumPy, which warns
            setattr(module, name, value)


def _module(name: str, **contents) -> None:
    module = types.ModuleType(name, "Made by estimator_accum.compat.v1.")
    vars(module).update(contents)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


def getargspec(function) -> ArgSpec:
    """Returns the arguments of a function without keyword-only ones.

    Raises:
        ValueError: If the function has keyword-only arguments.
    """
    found = inspect.getfullargspec(function)
    if found.kwonlyargs:
        raise ValueError(
            "inspect.getargspec must get a function without keyword-only arguments. "
            f"Received: {function}. Use inspect.signature."
        )
    return ArgSpec(*found[:4])


def load_source(name: str, path: str) -> types.ModuleType:
    """Imports a file as the module `name`."""
    loader = _imports.UsersLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _reload(module: types.ModuleType) -> types.ModuleType:
    return importlib.reload(module)


def strtobool(value: str) -> int:
    """Returns 1 for y, yes, t, true, on or 1, and 0 for their opposites.

    Raises:
        ValueError: If the value is none of them.
    """
    if value.lower() in ("y", "yes", "t", "true", "on", "1"):
        return 1
    if value.lower() in ("n", "no", "f", "false", "off", "0"):
        return 0
    raise ValueError(
        f"A truth value must be yes or no. Received: {value!r}. Use true or false."
    )


@functools.total_ordering
class LooseVersion:
    """Version whose numbers compare as numbers: "1.9" < "1.15" < "2.0.0rc1"."""

    def __init__(self, vstring: str):
        self.vstring = vstring
        parts = re.findall(r"\d+|[a-z]+", vstring)
        self.version = [int(part) if part.isdigit() else part for part in parts]

    def __eq__(self, other):
        return self.version == _version(other).version

    def __lt__(self, other):
        pairs = itertools.zip_longest(self.version, _version(other).version)
        for mine, theirs in pairs:
            if mine == theirs:
                continue
            if mine is None or theirs is None:
                return mine is None
            if type(mine) is not type(theirs):
                return isinstance(mine, str)
            return mine < theirs
        return False

    def __str__(self):
        return self.vstring

    def __repr__(self):
        return f"LooseVersion ({self.vstring!r})"


def _version(value) -> LooseVersion:
    return value if isinstance(value, LooseVersion) else LooseVersion(value)
