"""Mutants of a source file: small edits that a test should notice.

    mutant = (path, function, kind, original text, replacement, occurrence)

identifies an edit, so that it can be found again after changes elsewhere in the file:
`occurrence` numbers the otherwise equal edits of a function. Outside the edit the file
stays the same, byte for byte.
"""

import ast
import collections
import pathlib
import random
import re
from collections.abc import Iterator
from typing import NamedTuple

_LONGEST_TEXT = 80  # characters of an original or a replacement
_OPERATORS = {
    "Lt": ("<", "<="),
    "LtE": ("<=", "<"),
    "Gt": (">", ">="),
    "GtE": (">=", ">"),
    "Eq": ("==", "!="),
    "NotEq": ("!=", "=="),
    "Is": ("is", "is not"),
    "IsNot": ("is not", "is"),
    "In": ("in", "not in"),
    "NotIn": ("not in", "in"),
    "And": ("and", "or"),
    "Or": ("or", "and"),
    "Add": ("+", "-"),
    "Sub": ("-", "+"),
    "Mult": ("*", "/"),
    "Div": ("/", "*"),
    "FloorDiv": ("//", "*"),
}
_COMMUTATIVE = {"add", "equal", "gcd", "logical_and", "logical_or", "max", "maximum"}
_COMMUTATIVE |= {"min", "minimum", "multiply"}
_CORE_KINDS = ("control_dependencies", "statement", "comparison", "condition")
_LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
_LEFT_ALONE = re.compile(  # errors, and the definitions of flags
    r"\w*(Error|Exception|Warning|Parser)|DEFINE_\w+|add_(argument|folder|numbers)"
)
_FIELDS_LEFT_ALONE = {"annotation", "returns", "decorator_list", "exc", "cause"}
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


class Mutant(NamedTuple):
    """Identity of a mutant."""

    path: str
    function: str
    kind: str
    original: str
    replacement: str
    occurrence: int


class Place(NamedTuple):
    """Position of a mutant in the current text."""

    mutant: Mutant
    start: int  # byte of the file
    end: int
    text: bytes  # replaces the bytes [start, end)
    lines: range  # lines of the edit
    statement: range  # its statement's lines, without a compound statement's body
    functions: tuple[range, ...]  # bodies of the enclosing functions, innermost first

    def applied_to(self, source: bytes) -> bytes:
        """Returns the file's text with the mutant."""
        return source[: self.start] + self.text + source[self.end :]


def places(root: pathlib.Path, *folders: str) -> dict[Mutant, Place]:
    """Returns every mutant of the Python files of these folders."""
    return {
        place.mutant: place
        for folder in folders
        for path in sorted((root / folder).rglob("*.py"))
        for place in places_of(str(path.relative_to(root)), path.read_bytes())
    }


def places_of(path: str, source: bytes) -> list[Place]:
    """Returns every mutant of a file."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.found


def sample(candidates: list[Place], size: int, seed: int) -> list[Place]:
    """Draws at least `size` mutants, from every file and evenly from every kind.

    A file's share is its share of the candidates, at least one mutant. Each draw takes
    the kind that was drawn least so far, files with few kinds first, so that the others
    make up for them; kinds that matter most to the algorithm are drawn twice as often.
    """
    random_ = random.Random(seed)
    left = collections.defaultdict(list)
    for place in candidates:
        left[place.mutant.path].append(place)
    turns = []
    for path, inside in left.items():
        turns += [path] * -(-size * len(inside) // len(candidates))
    random_.shuffle(turns)
    turns.sort(key=lambda path: len({each.mutant.kind for each in left[path]}))
    drawn, counts = [], collections.Counter()
    for path in turns:
        random_.shuffle(left[path])
        place = min(left[path], key=lambda each: counts[each.mutant.kind])
        counts[place.mutant.kind] += 1 if place.mutant.kind in _CORE_KINDS else 2
        left[path].remove(place)
        drawn.append(place)
    return sorted(drawn, key=lambda place: (place.mutant.path, place.start))


class _Finder:
    """Visitor of a file's nodes that collects its mutants in `found`."""

    def __init__(self, path: str, source: bytes):
        self._path, self._source = path, source
        self.found, self._counts = [], collections.Counter()
        self._starts = [0]  # first byte of each line
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._names, self._bodies, self._statement = (), (), range(1, 2)
        self._control_dependencies = {"control_dependencies"}  # and its aliases

    def visit(self, node: ast.AST, parent: ast.AST | None = None) -> None:
        """Adds the mutants of a node and of its descendants."""
        if _is_left_alone(node):
            return
        before = self._names, self._bodies, self._statement
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            end = max(node.lineno + 1, body[0].lineno) if body else node.end_lineno + 1
            self._statement = range(node.lineno, end)
        for kind, start, end, text, *shown in self._edits(node, parent):
            self._add(kind, start, end, text, *shown)
        if isinstance(node, _FUNCTIONS | ast.ClassDef):
            self._names += (node.name,)
        if isinstance(node, _FUNCTIONS):
            lines = range(node.body[0].lineno, node.end_lineno + 1)
            self._bodies = (lines, *self._bodies)
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and name not in _FIELDS_LEFT_ALONE:
                    self.visit(child, node)
        self._names, self._bodies, self._statement = before

    def _add(self, kind: str, start: int, end: int, text: bytes, shown=None) -> None:
        source = self._source
        first, last = self._span(shown) if shown else (start, end)
        texts = source[first:last], source[first:start] + text + source[end:last]
        texts = [" ".join(each.decode().split())[:_LONGEST_TEXT] for each in texts]
        function = ".".join(self._names) or "<module>"
        line = source.count(b"\n", 0, start) + 1
        lines = range(line, line + source.count(b"\n", start, end) + 1)
        identity = self._path, function, kind, *texts
        self._counts[identity] += 1
        mutant = Mutant(*identity, self._counts[identity])
        around = lines, self._statement, self._bodies
        self.found.append(Place(mutant, start, end, text, *around))

    def _edits(self, node: ast.AST, parent: ast.AST | None) -> Iterator[tuple]:
        """Yields kind, start, end, text, and the node to show if it is not the edit."""
        match node:
            case ast.Compare(left=left):
                for operator, right in zip(node.ops, node.comparators, strict=True):
                    yield from self._operator("comparison", node, left, operator, right)
                    left = right
            case ast.BoolOp(op=operator, values=[left, *more]):
                for right in more:
                    yield from self._operator("boolean", node, left, operator, right)
                    left = right
            case (
                ast.BinOp(left=left, op=operator, right=right)
                | ast.AugAssign(target=left, op=operator, value=right)
            ) if not _are_sequences(left, right):
                yield from self._operator("arithmetic", node, left, operator, right)
            case ast.UnaryOp(op=ast.Not()):
                start, _ = self._span(node)
                word = re.match(rb"not\s*", self._source[start:])[0]
                yield "not", start, start + len(word), b"", node
            case ast.Constant(value=bool() | int() | float() as value):
                is_short = isinstance(parent, ast.expr | ast.keyword)
                is_short = is_short and parent.lineno == parent.end_lineno
                shown = parent if is_short else node
                if isinstance(value, bool):
                    yield "truth", *self._span(node), b"%a" % (not value), shown
                else:
                    more = value + 1 if isinstance(value, int) else 2 * value or 1.0
                    yield "number", *self._span(node), b"%a" % more, shown
            case ast.If() | ast.IfExp() if not _assigns(node.test):
                for text in (b"True", b"False"):
                    yield "condition", *self._span(node.test), text
            case ast.Expr(value=ast.Call()):
                yield "statement", *self._span(node), b"pass"
            case ast.Return(value=ast.expr()) if self._text(node) != b"return None":
                yield "return", *self._span(node), b"return None"
            case ast.Raise():
                yield "raise", *self._span(node), b"pass"
            case ast.Assign(value=value) if _name(value) in self._control_dependencies:
                self._control_dependencies |= {_name(each) for each in node.targets}
            case ast.Call():
                yield from self._call_edits(node)
        is_end = isinstance(node, ast.Return | ast.Raise | _FUNCTIONS | ast.ClassDef)
        if isinstance(parent, _FUNCTIONS) and node is parent.body[-1] and not is_end:
            has_docstring = ast.get_docstring(parent, clean=False) is not None
            if len(parent.body) - has_docstring >= 2:
                start, _ = self._span(node)
                text = b"return\n" + b" " * node.col_offset
                yield "early_return", start, start, text, node

    def _call_edits(self, node: ast.Call) -> Iterator[tuple]:
        name, pair = _name(node.func), node.args[:2]
        is_ordered = name in self._control_dependencies and pair
        if is_ordered and self._text(pair[0]) not in (b"[]", b"None"):
            yield "control_dependencies", *self._span(pair[0]), b"[]", node
        is_starred = any(isinstance(each, ast.Starred) for each in pair)
        if len(pair) == 2 and not is_starred and name not in _COMMUTATIVE:
            first, second = map(self._text, pair)
            start, middle = self._span(pair[0])
            behind, end = self._span(pair[1])
            if first != second:
                text = second + self._source[middle:behind] + first
                yield "arguments", start, end, text
        for each in node.keywords:
            if each.arg and not _is_string(each.value):
                start, end = self._span(each)
                comma = re.match(rb"\s*,[^\S\n]*|", self._source[end:])[0]
                yield "keyword", start, end + len(comma), b"", each
        for literal in [*node.args, *(each.value for each in node.keywords)]:
            if isinstance(literal, ast.List | ast.Tuple) and len(literal.elts) >= 2:
                for dropped in literal.elts:
                    kept = [self._text(x) for x in literal.elts if x is not dropped]
                    text = b", ".join(kept) + b"," * (len(kept) == 1)
                    is_list = isinstance(literal, ast.List)
                    text = b"[%s]" % text if is_list else b"(%s)" % text
                    yield "element", *self._span(literal), text

    def _operator(self, kind, node, left, operator, right) -> Iterator[tuple]:
        """Replaces the operator between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        gap, name = self._source[start:end], type(operator).__name__
        if name in _OPERATORS and b"#" not in gap:
            old, new = _OPERATORS[name]
            found = re.search(re.escape(old).replace("\\ ", r"\s+").encode(), gap)
            first, last = start + found.start(), start + found.end()
            yield kind, first, last, new.encode(), node

    def _span(self, node: ast.AST) -> tuple[int, int]:
        """Returns the node's half-open byte range [start, stop)."""
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> bytes:
        start, end = self._span(node)
        return self._source[start:end]


def _is_left_alone(node: ast.AST) -> bool:
    """Returns whether the node is not mutated: f-strings, imports, logs, errors, flags.

    Also the assignment of `__all__` and ifs on `__name__` and TYPE_CHECKING.
    """
    match node:
        case ast.If(test=test):
            names = {_name(each) for each in ast.walk(test)}
            return bool(names & {"__name__", "TYPE_CHECKING"})
        case ast.Assign(targets=targets):
            return "__all__" in map(_name, targets)
        case ast.Expr(value=value):  # a call, or a docstring
            return _is_left_alone(value)
        case ast.Call(func=func):
            is_log = "log" in _name(getattr(func, "value", None))
            is_log = is_log and _name(func) in _LOG_METHODS
            return is_log or bool(_LEFT_ALONE.fullmatch(_name(func)))
    return isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom)


def _name(node: ast.AST | None) -> str:
    """Returns the last part of a dotted name, "" for anything else."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _is_string(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text or isinstance(node, ast.JoinedStr)


def _are_sequences(*nodes: ast.AST) -> bool:
    """Returns whether any of the nodes is a sequence, which has only + and *."""
    kinds = ast.List | ast.Tuple | ast.ListComp
    return any(isinstance(node, kinds) or _is_string(node) for node in nodes)


def _assigns(node: ast.AST) -> bool:
    return any(isinstance(each, ast.NamedExpr) for each in ast.walk(node))
