#!/usr/bin/env python3
"""Names the tests that a change is likely to break, the nearest ones.

    ./scripts/test --changed          # the nearest tests
    ./scripts/test --changed --all    # all tests that depend on the change

A file depends on each file that it imports, that a string in it names (a module, a path, a
command, code), and, if it is a test, on the `conftest.py` above it. Of a package it depends
on the modules of the names that it uses, and not on all names that the package offers.

The nearest tests of a file import it, are named after it, or lie in the folder of its
room. If only texts of a file have changed, its messages, docstrings and comments, the
nearest tests are those with a string that the changed words match, in the first four files
that have such tests.
"""

import argparse
import ast
import collections
import difflib
import itertools
import math
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_COMMAND = {"estimator-accum": "estimator_accum/__main__.py"}
_DOCS, _ARCHITECTURE = "tests/test_docs.py", "tests/test_architecture.py"
_PAGES = "tests/test_pages.py"
# Readers of files that they do not name.
_READERS = {
    ".py": (_ARCHITECTURE, _DOCS),
    ".md": ("tests/helpers/processes/documents.py",),
}
# Those of a file's code, or of a page's blocks of code; and those of the texts alone.
_CODE_READERS = {".py": (_ARCHITECTURE, _DOCS), ".md": (_DOCS, _PAGES)}
_TEXT_READERS = {".py": (_ARCHITECTURE, _DOCS), ".md": (_DOCS,)}
_ENOUGH = 4  # tests of a file's room
_MOST_NAMES = 5

Sources = dict[str, str]
Change = tuple[str, str]  # a text before and after


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
    starts = [*changed]
    for path in changed:
        starts += _READERS.get(pathlib.Path(path).suffix, ())
        if not path.endswith(".py") and len(_distances([path], graph)) == 1:
            starts += filter(_is_of_repository, graph)
    return sorted(filter(_is_test, _distances(starts, graph).keys() & graph.keys()))


def nearest_tests(path: str, graph: dict[str, set[str]], sources: Sources) -> set[str]:
    """Returns the test files that say most about a changed file.

    They are itself, those that import or name it, those of its name, and the four
    nearest of its room, with all others as near. A room is a folder of a package, with
    the folders in it. Its tests lie in the folder of tests with its name, or, without
    such a folder, are marked `core`. The tests of the whole repository count if there are
    no others.
    """
    readers = {*_CODE_READERS.get(pathlib.Path(path).suffix, ())}
    if _is_test(path):
        return {path} | readers
    distances = _distances([path], graph)
    tests = [
        test for test in filter(_is_test, distances) if not _is_of_repository(test)
    ]
    *folders, name = path.split("/")
    folder = "/".join(folders[:2])
    room = [test for test in tests if test.startswith(f"tests/{folder}/")]
    if not any(test.startswith(f"tests/{folder}/") for test in graph):
        room = [test for test in tests if "pytest.mark.core" in sources[test]]
    reach = max(sorted(distances[test] for test in room)[:_ENOUGH], default=0)
    namesake = f"/test_{name.removesuffix('.py').strip('_')}.py"
    near = {test for test in room if distances[test] <= reach}
    near |= {test for test in tests if distances[test] <= 1 or test.endswith(namesake)}
    return readers | (near or {*filter(_is_test, distances)})


def _distances(paths: Iterable[str], graph: dict[str, set[str]]) -> dict[str, int]:
    """Returns the files that depend on files, with the number of imports to there."""
    readers = collections.defaultdict(set)
    for reader, used in graph.items():
        for module in used:
            readers[module].add(reader)
    distances, last = {}, {*paths}
    for distance in itertools.count():
        distances |= dict.fromkeys(last, distance)
        last = {reader for path in last for reader in readers[path]} - distances.keys()
        if not last:
            return distances


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


def _is_of_repository(path: str) -> bool:
    return re.match(r"tests/test_\w+\.py$", path) is not None


## The choice


def chosen_tests(
    changed: Iterable[str],
    texts: dict[str, list[Change] | None],
    sources: Sources,
    takes_all: bool = False,
) -> tuple[set[str], str]:
    """Returns the test files, or tests in files, for a change, and the reason for them.

    Args:
        changed: The changed files.
        texts: The changed texts of files of which nothing else has changed.
        sources: Text by path, of all files; texts that are not Python are not read.
        takes_all: Whether all test files that depend on the change are chosen.
    """
    texts = {} if takes_all else {path: t for path, t in texts.items() if t is not None}
    others = [path for path in changed if path not in texts]
    matching = {path: matching_files(t, sources) for path, t in texts.items()}
    helpers = {path for path in set().union(*matching.values()) if not _is_test(path)}
    are_many = any(len(files) > _ENOUGH for files in matching.values())
    graph = dependencies(sources) if others or helpers or are_many else {}
    near, tests = set(), collections.defaultdict(set)
    for path, files in matching.items():
        distances = _distances([path], graph)
        nearest = sorted(files, key=lambda file: (distances.get(file, math.inf), file))
        for file in dict.fromkeys([*nearest[:_ENOUGH], *sorted(files & helpers)]):
            names = matching_names(texts[path], sources[file])
            matches = {file: names}
            if file in helpers:
                matches = {
                    reader: matching_names(texts[path], sources[reader], names)
                    for reader, used in graph.items()
                    if file in used
                }
            for reader in filter(_is_test, matches):
                tests[reader] |= {n for n in matches[reader] if n.startswith("test_")}
                near |= set() if tests[reader] else {reader}
    reasons = ["those that match the changed texts"] if texts else []
    for path in texts:
        near |= {path, *_TEXT_READERS[pathlib.Path(path).suffix]}
    if others:
        dependent = dependent_tests(others, graph)
        reasons.append(f"the nearest of {len(dependent)}, which --changed --all runs")
        for path in () if takes_all else others:
            near |= nearest_tests(path, graph, sources)
        if takes_all:
            near, reasons = {*dependent}, ["all that depend on the change"]
    near = {*filter(_is_test, near)}
    for file in tests.keys() - near:
        near |= {f"{file}::{test}" for test in tests[file]}
    return near, " and ".join(reasons)


## Texts


def changed_texts(before: str, after: str) -> list[Change] | None:
    """Returns the messages and docstrings of Python code that have changed.

    None if anything else has. Comments count as nothing.
    """
    try:
        codes = [ast.parse(text) for text in (before, after)]
    except SyntaxError:
        return None
    texts = [_Texts(), _Texts()]
    dumps = {ast.dump(text.visit(code)) for text, code in zip(texts, codes)}
    if len(dumps) > 1:
        return None
    old, new = (text.listed for text in texts)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return [
        change
        for kind, *ends in matcher.get_opcodes()
        if kind != "equal"
        for change in itertools.zip_longest(
            old[ends[0] : ends[1]], new[ends[2] : ends[3]], fillvalue=""
        )
    ]


def matching_files(changes: Iterable[Change], sources: Sources) -> set[str]:
    """Returns the files of tests with a string that the changed words of a text match.

    The string may be a regular expression.
    """
    sides = [side for change in changes for side in _changed_words(*change)]
    words = {w for text, begin, end in sides for w in text[max(begin - 1, 0) : end + 1]}
    return {
        path
        for path, source in sources.items()
        if path.startswith("tests/") and any(word in source for word in words)
        if any(
            _matches(literal, *side)
            for literal in _literals(ast.parse(source))
            for side in sides
        )
    }


def matching_names(
    changes: Iterable[Change], source: str, names: Iterable[str] = ()
) -> set[str]:
    """Returns the names of a module that have such a string, or use a name that does.

    Empty if the module has such a string without a name.

    Args:
        changes: The changed texts.
        source: The module's code.
        names: Names of other modules that have such a string.
    """
    sides = [side for change in changes for side in _changed_words(*change)]
    nodes = ast.parse(source).body
    uses = {node: {*_used(node)} for node in nodes}
    last = [
        node
        for node in nodes
        if uses[node] & {*names}
        or any(_matches(text, *side) for text in _literals(node) for side in sides)
    ]
    seen, matching = {*last}, set()
    while last:
        defined = _defined(last.pop())
        if not defined:
            return set()
        matching |= defined
        readers = {node for node in nodes if defined & uses[node]} - seen
        seen |= readers
        last += readers
    return matching


def _used(node: ast.stmt) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.arg):  # a fixture
            yield part.arg


def _defined(node: ast.stmt) -> set[str]:
    """Returns the names that a statement of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    names = (name for name in ast.walk(node) if isinstance(name, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


class _Texts(ast.NodeTransformer):
    """Takes docstrings and strings of at least three words out of code.

    "{}" stands for each value in a string.
    """

    def __init__(self):
        self.listed = []

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            self.listed.append(node.value.value)
            return None
        return self.generic_visit(node)

    def visit_Constant(self, node):
        return ast.Constant("") if self._takes(node) else node

    def visit_JoinedStr(self, node):
        values = [part for part in node.values if isinstance(part, ast.FormattedValue)]
        values = [self.generic_visit(value) for value in values]
        return ast.Tuple(values) if self._takes(node) else node

    def _takes(self, node) -> bool:
        text = _text_of(node)
        is_text = len(re.findall(r"[A-Za-z]{2,}", text)) >= 3
        if is_text:
            self.listed.append(text)
        return is_text


def _text_of(node: ast.AST) -> str:
    """Returns a string's text with "{}" for each value in it; "" of anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(part) or "{}" for part in node.values)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return re.sub(r"%[sdrf]|{[^{}]*}", "{}", node.value) if is_text else ""


def _words(text: str) -> list[str]:
    return re.findall(r"\w+(?:\.\w+)*|{}", text)


def _changed_words(old: str, new: str) -> Iterator[tuple[list[str], int, int]]:
    """Yields the words before and after, with the range of changed ones.

    The range is empty where words are added or left out.
    """
    texts = _words(old), _words(new)
    matcher = difflib.SequenceMatcher(None, *texts, autojunk=False)
    for kind, *ends in matcher.get_opcodes():
        if kind != "equal":
            yield from zip(texts, ends[::2], ends[1::2], strict=True)


def _literals(tree: ast.AST) -> Iterator[str]:
    """Yields the strings of code that are no docstrings."""
    parts = set()
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, ast.Expr):
            parts.add(id(node.value))
        elif id(node) not in parts and (text := _text_of(node)):
            parts.update(map(id, getattr(node, "values", ())))
            yield text


def _matches(literal: str, text: list[str], begin: int, end: int) -> bool:
    """Returns whether a test's string is of a text, and of some of its changed words.

    A string of both words beside an empty range is.
    """
    literal = re.sub(r"\\([^\w])", r"\1", literal)  # an escaped character
    parts = re.split(r"\\\w[*+?]?|\.[*+]\??|[()|\[\]]|{}", literal)
    parts = [words for words in map(_words, parts) if re.search("[A-Za-z]", str(words))]
    if sum(map(len, parts)) < 2:
        return False
    places = [[*_places(words, text)] for words in parts]
    return (all(places) or "|" in literal) and any(
        place < end and begin < place + len(words)
        for words, starts in zip(parts, places, strict=True)
        for place in starts
    )


def _places(words: list[str], text: list[str]) -> Iterator[int]:
    """Yields where words stand in a text, whose values may be any one word."""
    for place in range(len(text) - len(words) + 1):
        pairs = [*zip(words, text[place:], strict=False)]
        is_there = all(other in (word, "{}") for word, other in pairs)
        if is_there and any(other == word for word, other in pairs):
            yield place


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


def _description(changed: list[str], since: str) -> str:
    shown = ", ".join(changed[:_MOST_NAMES])
    if len(changed) > _MOST_NAMES:
        shown += f" and {len(changed) - _MOST_NAMES} more"
    return f"changed {since}: {shown}"


def main(arguments: list[str] | None = None) -> int:
    """Prints pytest's arguments to stdout, one a line, and the reason to stderr.

    Tests marked `daily` are left out, but for the runs of a page's blocks of code.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = "name all test files that depend on the change, also through others"
    parser.add_argument("--all", action="store_true", help=text)
    takes_all = parser.parse_args(arguments).all
    base, since = _base()
    untracked = _git("ls-files", "--others", "--exclude-standard")
    changed = sorted({*_git("diff", "--name-only", base), *untracked})
    if not changed:
        line = f"--changed: no file has changed {since}, so no test runs."
        print(line, file=sys.stderr)
        return 0
    paths = {*_git("ls-files"), *changed}
    sources = {path: _text(_REPOSITORY / path) for path in paths}
    texts = {}
    for path in changed:
        before = "\n".join(_git("show", f"{base}:{path}"))
        if before and (_REPOSITORY / path).is_file():
            texts[path] = _texts_of(path, before, (_REPOSITORY / path).read_text())
    tests, reason = chosen_tests(changed, texts, sources, takes_all)
    files = {test: test.partition("::")[0] for test in tests}
    tests = sorted(test for test in tests if (_REPOSITORY / files[test]).exists())
    count = sum(map(_is_test, sources))
    line = f"--changed: {len({files[test] for test in tests})} of {count} test files, {reason}; "
    print(line + _description(changed, since) + ".", file=sys.stderr)
    is_short = not takes_all and _PAGES not in tests
    print(*(["--without-daily"] if is_short else []), *tests, sep="\n")
    return 0


def _texts_of(path: str, before: str, after: str) -> list[Change] | None:
    """Returns the changed texts of code; of a page none, if its blocks have stayed."""
    if path.endswith(".md"):
        blocks = [re.findall(r"(?ms)^```.*?^```", text) for text in (before, after)]
        return [] if blocks[0] == blocks[1] else None
    return changed_texts(before, after) if path.endswith(".py") else None


def _text(path: pathlib.Path) -> str:
    return path.read_text() if path.suffix == ".py" and path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
