#!/usr/bin/env python3
"""Names the test files that a change can break, by the repository's import graph.

    ./scripts/test --changed

A file depends on each file that it imports, that a string in it names (a module, a path, a
command, code), and, if it is a test, on the `conftest.py` above it. Of a package it depends
on the modules of the names that it imports, and not on all names that the package offers.
"""

import argparse
import ast
import collections
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_COMMAND = {"estimator-accum": "estimator_accum/__main__.py"}
# Readers of files that they do not name.
_READERS = {
    ".py": ("tests/test_architecture.py", "tests/test_docs.py"),
    ".md": ("tests/helpers/processes/documents.py",),
}
_MOST_NAMES = 5

Sources = dict[str, str]


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, list[str] | None]]:
    """Yields each module that code imports, wherever it does, with the names from it.

    The names of `import module` are None.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)


def dependencies(sources: Sources) -> dict[str, set[str]]:
    """Returns the files that each Python file depends on directly.

    Args:
        sources: Text by path, of all files; texts that are not Python are not read.
    """
    trees = {
        path: ast.parse(text) for path, text in sources.items() if path.endswith(".py")
    }
    names = _Names(sources, trees)
    return {
        path: {*names.used(path, tree), *_conftests(path, sources)} - {path}
        for path, tree in trees.items()
    }


def dependent_tests(changed: Iterable[str], graph: dict[str, set[str]]) -> list[str]:
    """Returns the test files that depend on changed files, also through others.

    Where no Python file depends on a changed file, the tests of the whole repository
    do: those directly in `tests/`.
    """
    readers = collections.defaultdict(set)
    for path, used in graph.items():
        for module in used:
            readers[module].add(path)
    reached, waiting = set(), [*changed]
    for path in changed:
        waiting += _READERS.get(pathlib.Path(path).suffix, ())
        if not path.endswith(".py") and not readers[path]:
            waiting += [
                test for test in graph if re.match(r"tests/test_\w+\.py$", test)
            ]
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting += readers[path]
    return sorted(reached & {path for path in graph if _is_test(path)})


class _Names:
    """The files that names in code stand for."""

    def __init__(self, sources: Sources, trees: dict[str, ast.Module]):
        self._paths = sources.keys()
        self._modules = {}
        self._folders = collections.defaultdict(set)
        self._files = collections.defaultdict(set)
        for path in sources:
            folder, _, name = path.rpartition("/")
            self._files[name].add(path)
            while folder:
                self._folders[folder].add(path)
                folder = folder.rpartition("/")[0]
            if path.endswith(".py"):
                module = path.removesuffix(".py").removesuffix("/__init__")
                self._modules[module.replace("/", ".")] = path
        self._public = {
            module: self._public_names(trees[path])
            for module, path in self._modules.items()
            if path.endswith("/__init__.py")
        }

    def _public_names(self, tree: ast.Module) -> dict[str, str]:
        """Returns the module of each name that a package imports."""
        return {
            name: module
            for module, names in imported_modules(tree)
            for name in names or ()
            if module in self._modules
        }

    def used(self, path: str, tree: ast.Module) -> Iterator[str]:
        """Yields the files that code imports, or names in a string."""
        if path.endswith("/__init__.py"):
            tree = self._without_public_names(tree)
        for module, names in imported_modules(tree):
            yield from self._imported(module, names)
        is_tool = path.startswith(("tests/", "scripts/"))
        parts = set()  # docstrings, and the beginnings of longer paths
        for node in ast.walk(tree):  # outer ones first
            is_part = id(node) in parts
            if isinstance(node, ast.BinOp):
                parts.add(id(node.left))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                parts.add(id(node.value))
            if is_part:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named = self._named(node.value) if is_tool else self._module(node.value)
                yield from (p for p in named if _is_test(path) or not _is_test(p))
            elif isinstance(node, ast.BinOp) and is_tool:
                yield from self._below(_joined(node))

    def _without_public_names(self, tree: ast.Module) -> ast.Module:
        """Returns a package's code without the imports of names that it offers."""
        body = [node for node in tree.body if not isinstance(node, ast.If)]
        return ast.Module([node for node in body if not self._offers(node)], [])

    def _offers(self, node: ast.stmt) -> bool:
        is_import = isinstance(node, ast.ImportFrom)
        return is_import and f"{node.module}.{node.names[0].name}" not in self._modules

    def _imported(self, module: str, names: list[str] | None) -> Iterator[str]:
        if module not in self._modules:
            return
        yield self._modules[module]
        package = module.rpartition(".")[0]
        while package in self._modules:
            yield self._modules[package]
            package = package.rpartition(".")[0]
        public = self._public.get(module, {})
        for name in public if names is None else names:
            if f"{module}.{name}" in self._modules:
                yield self._modules[f"{module}.{name}"]
            elif name in public:
                yield from self._imported(public[name], [name])

    def _module(self, text: str) -> set[str]:
        return {self._modules[text]} if text in self._modules else set()

    def _named(self, text: str) -> Iterator[str]:
        for word in re.split(r"[^\w./-]+", text):
            yield from self._module(word)
            yield from self._paths & {word, word.removeprefix("./"), _COMMAND.get(word)}
            if len(self._files.get(word, ())) == 1:
                yield from self._files[word]
        if "import " in text:
            try:
                code = ast.parse(text)
            except SyntaxError:
                return
            for module, names in imported_modules(code):
                yield from self._imported(module, names)

    def _below(self, path: str) -> Iterable[str]:
        return {path} if path in self._paths else self._folders.get(path, ())


def _joined(node: ast.AST) -> str:
    """Returns "a/b" of `folder / "a" / "b"`, and of `folder / "a" / "b" / variable`."""
    parts = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        right = node.right
        is_text = isinstance(right, ast.Constant) and isinstance(right.value, str)
        parts = [right.value, *parts] if is_text else []
        node = node.left
    return "/".join(parts)


def _conftests(path: str, sources: Sources) -> Iterator[str]:
    if _is_test(path):
        for folder in pathlib.PurePosixPath(path).parents:
            if (conftest := f"{folder}/conftest.py") in sources:
                yield conftest


def _is_test(path: str) -> bool:
    return re.match(r"tests/(.*/)?test_\w+\.py$", path) is not None


## The working tree


def _git(*arguments: str) -> list[str]:
    command = ["git", "-C", str(_REPOSITORY), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def _base() -> tuple[str, str]:
    """Returns the commit that a change began at, and its description."""
    head, fork = _git("rev-parse", "HEAD"), _git("merge-base", "main", "HEAD")
    if fork and fork != head:
        return fork[0], f"since branch main ({fork[0][:7]})"
    return "HEAD", "since HEAD"


def _description(changed: list[str], tests: list[str], count: int, since: str) -> str:
    if not changed:
        return f"--changed: no file has changed {since}, so no test runs."
    shown = ", ".join(changed[:_MOST_NAMES])
    if len(changed) > _MOST_NAMES:
        shown += f" and {len(changed) - _MOST_NAMES} more"
    return (
        f"--changed: {len(tests)} of {count} test files depend on the files that have "
        f"changed {since}: {shown}."
    )


def main(arguments: list[str] | None = None) -> int:
    """Prints the chosen test files to stdout, one a line, and the reason to stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args(arguments)
    base, since = _base()
    untracked = _git("ls-files", "--others", "--exclude-standard")
    changed = sorted({*_git("diff", "--name-only", base), *untracked})
    paths = {*_git("ls-files"), *changed}
    sources = {path: _text(_REPOSITORY / path) for path in paths}
    graph = dependencies(sources)
    tests = [
        test
        for test in dependent_tests(changed, graph)
        if (_REPOSITORY / test).exists()
    ]
    count = sum(map(_is_test, sources))
    print(_description(changed, tests, count, since), file=sys.stderr)
    print("\n".join(tests))
    return 0


def _text(path: pathlib.Path) -> str:
    return path.read_text() if path.suffix == ".py" and path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
