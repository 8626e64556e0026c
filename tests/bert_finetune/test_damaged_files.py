"""Damaged files: the program continues, or ends with one sentence without changes."""

import itertools
import shutil

import pytest

from bert_finetune import jobs, run_classifier
from estimator_accum.programs.folder import SETTINGS_FILE
from tests.helpers.models import tiny_bert
from tests.helpers.oracles import fuzzing

pytestmark = pytest.mark.once


@pytest.fixture
def run(bert_dir, cola_dir, trained, tmp_path, monkeypatch):
    """Runs the program up to its training, on copies of good files."""
    monkeypatch.setattr(jobs, "execute", lambda run: None)
    data, bert, output = tmp_path / "data", tmp_path / "bert", tmp_path / "output"
    shutil.copytree(cola_dir, data)
    shutil.copytree(bert_dir, bert)
    shutil.copytree(trained, output)
    (output / ".run.lock").touch()
    numbers = itertools.count()

    def main(**more) -> None:
        folder = tmp_path / "new" / str(next(numbers))
        flags = tiny_bert.command_line(bert, data, folder)
        flags |= {"do_eval": "true", **more}
        run_classifier.main(["", *(f"--{k}={v}" for k, v in flags.items())])

    return main


@pytest.mark.parametrize(
    "name",
    ["data/train.tsv", "data/dev.tsv", "bert/vocab.txt", "bert/bert_config.json"]
    + [f"bert/bert_model.ckpt.{end}" for end in ("index", "data-00000-of-00001")],
)
def test_damaged_file_is_used_or_refused(name, run, tmp_path):
    path = tmp_path / name
    is_json = name.endswith(".json")
    good = path.read_bytes()
    contents = (fuzzing.damaged_json if is_json else fuzzing.damaged)(good)

    def damage(content: bytes) -> None:
        path.write_bytes(content)
        run()

    fuzzing.check(contents, damage, tmp_path / "new")


def test_damaged_settings_file_is_used_or_refused(run, tmp_path):
    path = tmp_path / "output" / SETTINGS_FILE
    good = path.read_bytes()

    def damage(content: bytes) -> None:
        path.write_bytes(content)
        try:
            run(output_dir=tmp_path / "output")
        finally:
            assert path.read_bytes() == content
            path.write_bytes(good)

    fuzzing.check(fuzzing.damaged_json(good), damage, tmp_path / "output")
