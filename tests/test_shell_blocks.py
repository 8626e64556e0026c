"""The commands of the pages run as printed, from a clean folder, in their order."""

import dataclasses
import importlib

import pytest

from bert_finetune import fetch_glue
from estimator_accum.runs.command_line import OneSentenceParser
from tests.helpers import documents, running, tiny_bert
from tests.helpers.hugging_face_folder import write_folder
from tests.helpers.local_server import forget_checksums, make_zip

pytestmark = pytest.mark.once


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the repository's files, where the tests run."""
    for path in running.ROOT.iterdir():
        if not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(command: list[str]) -> str:
    """Runs a command that begins with `.venv/bin/python`; returns what it prints."""
    assert command[0] == ".venv/bin/python", command
    done = running.run(*command[1:], cwd=".", PYTHONPATH=str(running.ROOT))
    assert done.returncode == 0, done.output
    return done.stdout


@pytest.mark.slow
def test_the_commands_of_the_bert_page_run_one_after_the_other(folder, monkeypatch):
    glue, bert, *commands = documents.commands(documents.PAGES["bert"])
    config = dataclasses.replace(tiny_bert.CONFIG, max_position_embeddings=128)
    tiny_bert.write_bert(folder / "model", config=config)
    tiny_bert.write_cola(folder / "corpus")
    for name, prefix in (("model", ""), ("corpus", "CoLA/")):
        files = {each.name: each.read_bytes() for each in (folder / name).iterdir()}
        (folder / f"{name}.zip").write_bytes(make_zip(files, prefix))
    forget_checksums(monkeypatch, fetch_glue.SOURCES)
    assert fetch_glue.main([*glue[2:], "--archive=corpus.zip"]) == 0
    _run([*bert, "--archive=model.zip"])
    write_folder(folder / "DIR")
    train, plot, convert, elsewhere, compare = commands
    _run(train)
    _run(plot)
    assert (folder / "loss.png").stat().st_size > 10_000
    _run(convert)
    assert (folder / "bert" / "mine" / "bert_config.json").is_file()
    _run(elsewhere)
    assert "within --tolerance=1e-05" in _run(compare)


class _Read(Exception):
    """Raised when the flags have been read."""


@pytest.mark.parametrize("page", ["performance", "update", "whole_batches"])
def test_flags_of_measurements_that_take_minutes_are_read(folder, monkeypatch, page):
    parse_args = OneSentenceParser.parse_args

    def parse_and_stop(self, arguments):
        parse_args(self, arguments)
        raise _Read

    monkeypatch.setattr(OneSentenceParser, "parse_args", parse_and_stop)
    commands = documents.commands(documents.PAGES[page])
    scripts = [each for each in commands if each[1].startswith("scripts/")]
    assert scripts
    for _, script, *flags in scripts:
        module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
        with pytest.raises(_Read):
            module.main(flags)
