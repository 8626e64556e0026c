"""Files with typical damage, for tests of the programs' error messages.

FUZZ_CASES=2000 python -m pytest -k damaged
"""

import contextlib
import io
import json
import os
import pathlib
from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("FUZZ_CASES", "50"))
_PIECES = b"\0|\r|\r\n|\n|\t|,|\"|'|\xff|\xef\xbb\xbf|-1|0|nan|1e999".split(b"|")
_PIECES += [b"9" * 30, *b"true|null|{}|[]|x".split(b"|")]
_PIECES += [" ".encode("utf-16"), "é".encode(), "é".encode("latin-1"), b"[MASK]", b" "]
_VALUES = [None, True, -1, 0, 2.5, 10**30, "", "x", [], {}, [1], {"a": 1}]


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """Damages a valid file by one to three changes."""
    for _ in range(draw(st.integers(1, 3))):
        content = draw(st.sampled_from(_CHANGES))(draw, content)
    return content


@st.composite
def damaged_json(draw, content: bytes) -> bytes:
    """Damages a file like `damaged`, or changes a value or key in the JSON tree."""
    if draw(st.booleans()):
        return draw(damaged(content))
    tree = json.loads(content)
    place, parent, key = tree, None, None
    while isinstance(place, dict | list) and place and draw(st.integers(0, 3)):
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        parent, key = place, draw(st.sampled_from(list(keys)))
        place = place[key]
    value = draw(st.sampled_from(_VALUES))
    if parent is None:
        tree = value
    elif isinstance(parent, dict) and draw(st.booleans()):
        del parent[key]
    else:
        parent[key] = value
    return json.dumps(tree).encode()


def _place(draw, content: bytes) -> int:
    return draw(st.integers(0, len(content)))


def _cut(draw, content: bytes) -> bytes:
    return content[: _place(draw, content)]


def _insert(draw, content: bytes) -> bytes:
    at = _place(draw, content)
    return content[:at] + draw(st.sampled_from(_PIECES)) + content[at:]


def _remove(draw, content: bytes) -> bytes:
    first = _place(draw, content)
    return content[:first] + content[first + draw(st.integers(1, 40)) :]


def _flip(draw, content: bytes) -> bytes:
    at = _place(draw, content)
    byte = content[at : at + 1]
    other = bytes([byte[0] ^ (1 << draw(st.integers(0, 7)))]) if byte else b""
    return content[:at] + other + content[at + 1 :]


def _change_lines(draw, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    at = draw(st.integers(0, len(lines) - 1))
    dropped, doubled, first, blank = [], [lines[at]] * 2, [lines[0]], [b"\n"]
    lines[at : at + 1] = draw(st.sampled_from([dropped, doubled, first, blank]))
    return b"".join(lines)


_CHANGES = [_cut, _insert, _remove, _flip, _change_lines]


def check(contents, run: Callable[[bytes], int | None], kept: pathlib.Path) -> None:
    """Runs a program's `main` on file contents; checks its messages and files.

    Args:
        contents: Hypothesis strategy of the file's content.
        run: Writes the content to the file and runs the program in this process.
        kept: Folder that must stay unchanged if the program refuses the file.
    """

    @settings(
        max_examples=CASES,
        deadline=None,
        derandomize="FUZZ_CASES" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(contents)
    def run_one(content: bytes) -> None:
        said, code = io.StringIO(), 0
        before = _files(kept)
        with contextlib.redirect_stderr(said):
            try:
                run(content)
            except SystemExit as end:
                code = end.code
        lines = said.getvalue().splitlines()
        assert code in (0, 2), said.getvalue()
        if code == 2:
            assert len(lines) == 1 and "Received" in lines[0], lines
            assert _files(kept) == before

    run_one()


def _files(folder: pathlib.Path) -> dict[str, bytes | None]:
    paths = folder.rglob("*")
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}
