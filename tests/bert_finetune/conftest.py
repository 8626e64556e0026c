"""Fixtures of the room's tests: a tiny BERT, a corpus, the settings of a run."""

import pytest
from tiny_bert import make_settings, write_bert, write_cola

from bert_finetune.settings import Settings


@pytest.fixture(scope="session")
def bert_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_bert")
    write_bert(folder)
    return folder


@pytest.fixture(scope="session")
def cola_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny_cola")
    write_cola(folder)
    return folder


@pytest.fixture
def settings(bert_dir, cola_dir, tmp_path) -> Settings:
    """A run that does nothing yet: 13 micro-steps of 4, 7 updates, when it trains."""
    return make_settings(bert_dir, cola_dir, tmp_path / "output")
