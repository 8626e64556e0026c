"""Fixtures of these tests: a tiny BERT, a corpus, runs that several tests read."""

import dataclasses
import pathlib

import pytest

from bert_finetune import report
from bert_finetune.settings import Settings
from tests.helpers.models import tiny_bert
from tests.helpers.processes.local_server import running_server


@pytest.fixture(scope="session", autouse=True)
def _undrawn():
    """Leaves the drawing out of all runs; test_report.py draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_draw", lambda *_: None)
        yield


@pytest.fixture(scope="session")
def bert_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_bert")
    tiny_bert.write_bert(folder)
    return folder


@pytest.fixture(scope="session")
def cola_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_cola")
    tiny_bert.write_cola(folder)
    return folder


@pytest.fixture
def settings(bert_dir, cola_dir, tmp_path) -> Settings:
    """Settings with no job enabled; training is 7 updates in 13 micro-steps of 4."""
    return tiny_bert.make_settings(bert_dir, cola_dir, tmp_path / "output")


@pytest.fixture(scope="session")
def trained_settings(bert_dir, cola_dir, tmp_path_factory) -> Settings:
    """Settings of a run that has trained and predicted, in a read-only folder.

    Its checkpoints are of micro-steps 5 (the middle of a window), 10 and 13.
    """
    folder = tmp_path_factory.mktemp("trained") / "output"
    settings = tiny_bert.make_settings(bert_dir, cola_dir, folder)
    settings = dataclasses.replace(settings, do_train=True, save_checkpoints_steps=5)
    tiny_bert.run(settings, do_predict=True)
    return settings


@pytest.fixture(scope="session")
def trained(trained_settings) -> pathlib.Path:
    return pathlib.Path(trained_settings.output_dir)


@pytest.fixture
def server(monkeypatch):
    """A running LocalServer, which publishes its `files`; nobody waits to try again."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("time.sleep", lambda _: None)
    with running_server() as server:
        yield server
