"""Fixtures shared by the tests of scripts."""

import pathlib
from collections.abc import Callable

import pytest

from bert_finetune import receiving
from tests.helpers.local_server import running_server
from tests.helpers.running import Done


@pytest.fixture
def server(monkeypatch):
    """A running LocalServer, which publishes its `files`; nobody waits to try again."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(receiving, "_PAUSES_SECS", (0, 0, 0))
    with running_server() as server:
        yield server


@pytest.fixture
def call(capsys) -> Callable[..., Done]:
    """Runs a script's `main` in this process."""

    def run(main, *flags) -> Done:
        try:
            code = main([*map(str, flags)])
        except SystemExit as left:
            code = left.code
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def refusal(call, tmp_path) -> Callable[..., str]:
    """Runs `main`, which must refuse and write nothing; returns its error message."""

    def run(main, *flags, code: int = 2) -> str:
        before = _content(tmp_path)
        done = call(main, *flags)
        assert done.returncode == code
        assert done.stderr.count("\n") == 1, done.stderr
        assert _content(tmp_path) == before
        return done.stderr

    return run


def _content(folder: pathlib.Path) -> dict[pathlib.Path, bytes | None]:
    paths = folder.rglob("*")
    return {path: path.read_bytes() if path.is_file() else None for path in paths}
