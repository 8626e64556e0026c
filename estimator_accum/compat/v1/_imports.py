"""Imports of TensorFlow in the user's modules, rewritten when a module is compiled.

    import tensorflow as tf              import tensorflow.compat.v1 as tf
    from tensorflow import keras         from tensorflow.compat.v1 import keras
    import tensorflow.keras as keras     import tensorflow.compat.v1.keras as keras
    from tensorflow.python.ops import x  (as it is)

The syntax tree is rewritten, not the text: lines and columns of tracebacks stay true.
No bytecode is read or written: `python script.py` would run it, with TensorFlow 2.
"""

import ast
import functools
import glob
import importlib.abc
import importlib.machinery
import os
import pathlib
import sys
import sysconfig

import tensorflow as tf

_V1 = "tensorflow.compat.v1"
# Not TensorFlow 1's API, or the same in both versions.
_AS_THEY_ARE = ("compat", "contrib", "core", "python", "tools")
_INSTALLED = ("site-packages", "dist-packages")
_THIS_PACKAGE = str(pathlib.Path(__file__).parents[2])


def install() -> None:
    """Compiles modules of the user that are imported from now on by `compile_v1`."""
    sys.meta_path.insert(0, _UsersModules())
    # `import tensorflow.python.ops` binds `tensorflow`.
    tf.compat.v1.python = sys.modules["tensorflow.python"]


def compile_v1(source: bytes, path: str):
    """Returns the code of a module whose imports of TensorFlow are rewritten.

    Args:
        source: Text of the module.
        path: Its file, for tracebacks.
    """
    tree = _Rewriting().visit(ast.parse(source, path))
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class UsersLoader(importlib.machinery.SourceFileLoader):
    """Loads one module of the user."""

    def source_to_code(self, data, path, *, _optimize=-1):
        del _optimize
        return compile_v1(data, path)

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _UsersModules(importlib.abc.MetaPathFinder):
    """Finds modules as the other finders do, and gives the user's their loader."""

    def find_spec(self, fullname, path=None, target=None):
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                kind = type(spec.loader)
                is_source = kind is importlib.machinery.SourceFileLoader
                if is_source and is_users(spec.origin):
                    spec.loader = UsersLoader(spec.loader.name, spec.loader.path)
                return spec
        return None


def is_users(path: str) -> bool:
    """Returns whether a file is neither Python's, nor installed, nor this package's."""
    path = os.path.abspath(path)
    if any(part in _INSTALLED for part in path.split(os.sep)):
        return False
    others = [sysconfig.get_path("stdlib"), _THIS_PACKAGE]
    others += [folder for folder in sys.path if _has_installed(folder)]
    return not any(path.startswith(os.path.join(folder, "")) for folder in others)


@functools.cache
def _has_installed(folder: str) -> bool:
    """Returns whether pip has installed packages there, e.g. by `--target`."""
    return bool(glob.glob(os.path.join(glob.escape(folder), "*.dist-info")))


class _Rewriting(ast.NodeTransformer):
    def visit_Import(self, node):
        names = []
        for alias in node.names:
            root, _, rest = alias.name.partition(".")
            if root != "tensorflow":
                names.append(alias)
            elif alias.asname:
                names.append(ast.alias(_renamed(alias.name), alias.asname))
            else:
                names += [alias] if rest else []  # loads the submodule
                names.append(ast.alias(_V1, "tensorflow"))
        node.names = names
        return node

    def visit_ImportFrom(self, node):
        if node.level == 0:
            node.module = _renamed(node.module)
        return node


def _renamed(name: str) -> str:
    root, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    if root != "tensorflow" or first in _AS_THEY_ARE:
        return name
    if first and not hasattr(tf.compat.v1, first):
        return name  # the error shall name what the user wrote
    return f"{_V1}.{rest}" if rest else _V1
