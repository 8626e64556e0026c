"""Fixtures that several rooms' tests share."""

import collections
import logging
import os
import pathlib
from collections.abc import Callable

import programs
import psutil
import pytest
import tensorflow as tf

from estimator_accum.compat import enable_estimator

programs.fork_from_now_on()
enable_estimator()  # a no-op on TensorFlow 2.15

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items):
    """Files of many slow tests first: begun last, one of them has a core to itself."""
    slow = collections.Counter(
        item.path for item in items if item.get_closest_marker("slow")
    )
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session", autouse=True)
def _nothing_outlives_the_suite():
    """This process adopts what its programs leave behind, see programs.py."""
    yield
    left = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.pid != programs.server_pid()
        and process.status() != psutil.STATUS_ZOMBIE
    ]
    for process in left:
        process.kill()
    assert not left, f"tests must end what they start. Received: {left}."


@pytest.fixture
def real_starts():
    """Programs of the test start the way a user starts them: not forked."""
    with programs.real_starts():
        yield


@pytest.fixture
def _loggers_as_before():
    """A room's main() sets the process's loggers; other tests read theirs."""
    rooms = ("estimator_accum", "bert_finetune", "distributed", "housing_example")
    names = ("tensorflow", *(f"tensorflow.{room}" for room in rooms))
    loggers = [logging.getLogger(name) for name in names]
    states = [(each.level, each.propagate, list(each.handlers)) for each in loggers]
    yield
    for each, (level, propagate, handlers) in zip(loggers, states, strict=True):
        each.setLevel(level)
        each.propagate = propagate
        each.handlers[:] = handlers


@pytest.fixture
def count_session_runs(monkeypatch) -> Callable[[Callable[[], object]], int]:
    """Calls a function; returns how many `session.run`s of this process that made."""
    begun = []
    run = tf.compat.v1.Session.run

    def noted(self, fetches, *args, **kwargs):
        begun.append(fetches)
        return run(self, fetches, *args, **kwargs)

    def count(function) -> int:
        before = len(begun)
        function()
        return len(begun) - before

    monkeypatch.setattr(tf.compat.v1.Session, "run", noted)
    return count


@pytest.fixture(scope="session")
def real_data() -> pathlib.Path:
    """Folder with `cola/`, `housing/` and `mnist/`; skips where there is none."""
    named = os.environ.get("ESTIMATOR_ACCUM_DATA")
    folder = pathlib.Path(named) if named else _REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(
            f"no real data at {folder}: set ESTIMATOR_ACCUM_DATA to a folder with "
            "cola/, housing/ and mnist/ to run this test"
        )
    return folder
