"""Names in the source of a TensorFlow 1 script that nothing replaces.

A script would meet them one by one, each after it has run for a while. Names are read
from the syntax tree, in the script and in those modules of its folder that it imports:
`tf.contrib.crf.crf_decode`, with `tf` bound by an import and by nothing else. Names in
a `try` that catches an ImportError or AttributeError are left out.
"""

import ast
import collections
import contextlib
import importlib
import os
import pathlib
import types
import warnings
from collections.abc import Iterator

import tensorflow.compat.v1 as tf

from estimator_accum.compat.v1 import _slim

_CHECKED = ("tensorflow", "numpy", "collections", "inspect", "imp", "distutils")
_CATCHING = ("ImportError", "ModuleNotFoundError", "AttributeError", "Exception")
_MISSING = object()


def find_missing(path: str, folder: str) -> dict[str, list[str]]:
    """Returns the missing names with the places that use them.

    Args:
        path: File of the script.
        folder: Folder of its own modules, first in `sys.path`.
    """
    places = collections.defaultdict(dict)
    files, seen = [pathlib.Path(path)], set()
    while files:
        file = files.pop(0)
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue  # Python says so when it runs the file
        shown = os.path.relpath(file, folder)
        for line, name in _used_names(tree):
            missing = _first_missing(name)
            if missing:
                places[missing][f"{shown} line {line}"] = None
        files += _own_modules(tree, file, pathlib.Path(folder))
    return {name: list(places[name]) for name in sorted(places)}


def list_missing(path: str, folder: str) -> str:
    """Returns a text that lists the missing names, "" if there is none."""
    missing = find_missing(path, folder)
    if not missing:
        return ""
    rule = "Names of TensorFlow 1 that have no stand-in, so that the script fails where"
    lines = [f"    {name}: {', '.join(places)}" for name, places in missing.items()]
    remedy = "Replace them in the script, or run it on TensorFlow 1.15."
    remedy += max(map(_slim.remedy, missing))
    return "\n".join([f"{rule} it uses them ({len(missing)}):", *lines, remedy])


def _used_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of each use of the checked modules."""
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try) and any(map(_catches, node.handlers))
        for statement in node.body
        for inner in ast.walk(statement)
    }
    aliases = _aliases(tree)
    inner_parts = set()  # tf.a in tf.a.b
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner_parts:
            inner = node.value
            while isinstance(inner, ast.Attribute):
                inner_parts.add(id(inner))
                inner = inner.value
        if id(node) in guarded or id(node) in inner_parts:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = _dotted(node, aliases)
            if name:
                yield node.lineno, name
        for name, _ in _imported(node):
            yield node.lineno, name


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Returns the names that mean one checked module, or one name in it, everywhere."""
    meanings = collections.defaultdict(set)
    for node in ast.walk(tree):
        for name, alias in _imported(node):
            meanings[alias].add(name)
    names = {alias: min(names) for alias, names in meanings.items() if len(names) == 1}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):  # slim = tf.contrib.slim
            for target in node.targets:
                if isinstance(target, ast.Name):
                    meanings[target.id].add(_dotted(node.value, names))
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            meanings[node.name].add(None)
        elif isinstance(node, ast.arg):
            meanings[node.arg].add(None)
    assigned = {
        id(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
    }
    for node in ast.walk(tree):
        is_bound = isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        if is_bound and id(node) not in assigned:
            meanings[node.id].add(None)
    return {
        alias: min(names)
        for alias, names in meanings.items()
        if len(names) == 1 and None not in names
    }


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields (dotted name, the name it is bound to) of an import of checked modules."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            root = alias.name.partition(".")[0]
            if root in _CHECKED:
                yield alias.name, alias.asname or alias.name
                if not alias.asname:
                    yield root, root
    elif isinstance(node, ast.ImportFrom) and not node.level:
        is_checked = node.module.partition(".")[0] in _CHECKED
        for alias in node.names if is_checked else ():
            name = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
            yield name, alias.asname or alias.name


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """Returns the whole name of `tf.a.b`; None for another expression."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in aliases:
        return ".".join([aliases[node.id], *parts])
    return None


def _catches(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return not names.isdisjoint(_CATCHING)


def _first_missing(name: str) -> str | None:
    """Returns the beginning of a dotted name up to its first part that does not exist."""
    root, *parts = name.split(".")
    member, path = tf if root == "tensorflow" else _member(None, root), root
    for part in parts:
        if member is _MISSING or not isinstance(member, types.ModuleType):
            break
        path = f"{path}.{part}"
        member = _member(member, path)
    if member is _MISSING:
        return path.replace("tensorflow.", "tf.", 1)
    return None


def _member(module, path: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns of names that it will remove
        for find in (
            lambda: getattr(module, path.rpartition(".")[2]),
            lambda: importlib.import_module(path),
        ):
            with contextlib.suppress(AttributeError, ImportError):
                return find()
        return _MISSING


def _own_modules(tree, file: pathlib.Path, folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of the modules in `folder` that the file imports."""
    stems = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            stems += [folder / alias.name.replace(".", "/") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = list(file.parents)[: node.level]
            base = above[-1] if above else folder
            base /= (node.module or "").replace(".", "/")
            stems += [base, *(base / alias.name for alias in node.names)]
    return [
        path
        for stem in stems
        for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py")
        if path.is_file()
    ]
