"""Output folders with other content: refused before anything is written."""

import dataclasses
import json
import logging
import os
import pathlib
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import checkpoint, inputs, jobs
from bert_finetune.settings import Settings
from estimator_accum.programs.folder import check_output_dir
from estimator_accum.programs.progress import latest_checkpoint
from tests.helpers.models.tiny_bert import copy_at_step

pytestmark = pytest.mark.once


@pytest.fixture
def copy(trained_settings, tmp_path) -> Settings:
    """Settings of a trained run, in a copied folder that a test may change."""
    copy_at_step(trained_settings.output_dir, tmp_path / "copy", 13)
    return dataclasses.replace(trained_settings, output_dir=str(tmp_path / "copy"))


def _refusal(settings, **changes) -> str:
    """Returns the error message; the folder must stay as it is."""
    before = _content(settings.output_dir)
    with pytest.raises(ValueError) as refused:
        jobs.prepare(inputs.read(dataclasses.replace(settings, **changes)))
    assert _content(settings.output_dir) == before
    return str(refused.value)


def _content(folder):
    return {path: path.stat().st_mtime_ns for path in pathlib.Path(folder).rglob("*")}


_EVAL = {"do_train": False, "do_eval": True}
_MODES = pytest.mark.parametrize("mode", [{}, _EVAL], ids=["train", "eval"])


@pytest.mark.parametrize(("mode", "size"), [({}, 100), (_EVAL, -40)])
def test_a_half_written_checkpoint_is_refused(copy, mode, size):
    (data,) = pathlib.Path(copy.output_dir).glob("model.ckpt-13.data*")
    data.write_bytes(data.read_bytes()[:size])
    sentence = _refusal(copy, **mode)
    assert "model.ckpt-13 must be a complete TensorFlow checkpoint. Rece" in sentence


@pytest.mark.parametrize(
    ("mode", "content"),
    [({}, b""), (_EVAL, b"garbage {{{"), ({}, bytes(range(256))), (_EVAL, None)],
)
def test_a_garbled_state_file_is_refused(copy, mode, content, caplog):
    state = pathlib.Path(copy.output_dir) / "checkpoint"
    state.unlink()
    if content is not None:
        state.write_bytes(content)
    caplog.set_level(logging.DEBUG)
    sentence = "with model.ckpt-13, but its file `checkpoint` names no checkpoint"
    assert sentence in _refusal(copy, **mode)
    assert not caplog.records  # TensorFlow's own warning would be a second line
    assert not logging.getLogger("tensorflow").disabled


def test_a_run_that_was_killed_in_its_first_save_begins_anew(tmp_path):
    (tmp_path / "model.ckpt-0.index").write_text("")
    assert latest_checkpoint(str(tmp_path)) is None


def _other_config(settings, folder, **changes) -> dict[str, str]:
    config = json.loads(pathlib.Path(settings.bert_config_file).read_text())
    path = folder / "bert_config.json"
    path.write_text(json.dumps(config | changes))
    return {"bert_config_file": str(path)}


@pytest.mark.parametrize(
    ("mode", "key", "value", "expected"),
    [
        ({}, "num_hidden_layers", 2, "bert_config.num_hidden_layers=1, not 2"),
        (_EVAL, "hidden_size", 32, "bert_config.hidden_size=16, not 32"),
        ({}, "num_attention_heads", 4, "bert_config.num_attention_heads=2, not 4"),
        (_EVAL, "hidden_act", "relu", "bert_config.hidden_act=gelu, not relu"),
    ],
)
def test_another_bert_config_is_refused(copy, tmp_path, mode, key, value, expected):
    """Another hidden_act or number of heads has the same shapes."""
    changes = _other_config(copy, tmp_path, **{key: value})
    sentence = _refusal(copy, **mode, **changes)
    assert (
        f"Received: {copy.output_dir}, which holds a run with {expected}. Use"
        in sentence
    )


@_MODES
def test_hidden_act_is_used_in_place_of_the_one_in_the_file(copy, tmp_path, mode):
    sentence = _refusal(copy, **mode, hidden_act="gelu_new")
    assert (
        "which holds a run with bert_config.hidden_act=gelu, not gelu_new. Use"
        in sentence
    )
    other = _other_config(copy, tmp_path, hidden_act="gelu_new")
    run = jobs.prepare(
        inputs.read(dataclasses.replace(copy, **mode, **other, hidden_act="gelu"))
    )
    assert run.config.hidden_act == "gelu"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hidden_size", 32, r"must have the shape \[25, 32\] .* Received: \[25, 16\]"),
        ("num_hidden_layers", 2, r"must hold the variable `bert/encoder/layer_1/"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused_without_run_settings(
    copy, tmp_path, key, value, expected
):
    (pathlib.Path(copy.output_dir) / "run_settings.json").unlink()
    changes = _EVAL | _other_config(copy, tmp_path, **{key: value})
    assert re.search(expected, _refusal(copy, init_checkpoint=None, **changes))


def test_a_run_resumes_with_its_first_checkpoint_at_any_path(copy, tmp_path):
    prefix = tmp_path / "staged" / "model.ckpt"
    shutil.copytree(pathlib.Path(copy.init_checkpoint).parent, prefix.parent)
    for file in prefix.parent.glob("bert_model.ckpt.*"):
        file.rename(f"{prefix}{file.name.removeprefix('bert_model.ckpt')}")
    settings = dataclasses.replace(copy, init_checkpoint=str(prefix))
    jobs.prepare(inputs.read(settings))
    sentence = "which holds a run with a different --init_checkpoint. Use the same"
    assert sentence in _refusal(copy, init_checkpoint=None)
    checkpoint.write_checkpoint({"weight": np.zeros(1)}, str(prefix))
    assert sentence in _refusal(copy, init_checkpoint=str(prefix))
    path = pathlib.Path(copy.output_dir) / "run_settings.json"
    run = json.loads(path.read_text())
    del run["init_checkpoint_checksum"]
    path.write_text(json.dumps(run))
    jobs.prepare(inputs.read(copy))


@_MODES
def test_text_of_another_case_is_refused(copy, mode):
    sentence = _refusal(copy, **mode, do_lower_case=False)
    assert "which holds a run with --do_lower_case=True, not False. Use" in sentence


def test_a_classifier_of_another_task_is_refused_from_elsewhere_too(copy, tmp_path):
    """SST-2 also has two classes, so the shapes match."""
    checkpoint = f"{copy.output_dir}/model.ckpt-13"
    changes = {"output_dir": str(tmp_path / "new"), "init_checkpoint": checkpoint}
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nw1\t1\n")
    other = {"task_name": "SST-2", "data_dir": str(tmp_path)}
    sentence = _refusal(copy, **_EVAL, **changes, **other)
    assert sentence.startswith(
        "A trained classifier must be used for the task of its tr"
    )
    assert "which holds a run with --task_name=cola, not sst2. Use the same" in sentence
    jobs.prepare(inputs.read(dataclasses.replace(copy, **_EVAL, **changes)))


@_MODES
def test_another_vocabulary_of_the_same_size_is_refused(copy, tmp_path, mode):
    path = tmp_path / "vocab.txt"
    lines = pathlib.Path(copy.vocab_file).read_text().split()
    path.write_text("\n".join([*lines[:5], *reversed(lines[5:])]))
    sentence = _refusal(copy, **mode, vocab_file=str(path))
    assert "which holds a run with a different vocabulary. Use " in sentence


@pytest.mark.parametrize(("mode", "content"), [({}, "{"), (_EVAL, "[]"), ({}, None)])
def test_a_settings_file_of_another_origin_is_refused(copy, mode, content):
    path = pathlib.Path(copy.output_dir) / "run_settings.json"
    path.unlink()
    path.write_text(content) if content else path.mkdir()
    sentence = _refusal(copy, **mode)
    expected = "must be the settings file of a run" if content else " is a folder. Use"
    assert f"{path}" in sentence and expected in sentence


@pytest.mark.parametrize(
    ("changes", "name", "fault"),
    [
        ({"do_train": True}, "checkpoint", "is a folder"),
        ({"do_train": True}, "run_settings.json", "is a folder"),
        ({"do_eval": True}, "eval_results.txt", "is a folder"),
        ({"do_predict": True}, "test_results.tsv", "is a folder"),
        ({"do_predict": True}, "CoLA.tsv", "is a folder"),
        ({"do_eval": True}, "eval", "is not a folder"),
        ({"do_export": True}, "export", "is not a folder"),
    ],
)
def test_what_stands_in_the_way_of_results_is_refused(settings, changes, name, fault):
    path = pathlib.Path(settings.output_dir) / name
    path.parent.mkdir()
    path.mkdir() if fault == "is a folder" else path.write_text("")
    sentence = _refusal(settings, **changes)
    assert f"Received: {path.parent}, but {path} {fault}. Use another one." in sentence


def test_a_foreign_table_of_metrics_is_refused_before_training(settings):
    path = pathlib.Path(settings.output_dir) / "train_metrics.csv"
    path.parent.mkdir()
    path.write_text("a,b\n1,2\n")
    assert f"{path} must have the columns" in _refusal(settings, do_train=True)


@pytest.mark.parametrize("fault", ["cannot be written to", "is not a folder"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch, fault):
    """`os.access` is patched, because root may write everywhere."""
    path = tmp_path / "above"
    path.mkdir() if fault == "cannot be written to" else path.touch()
    monkeypatch.setattr(os, "access", lambda other, mode: other != path)
    sentence = f"Received: {path / 'a' / 'b'}, but {path} {fault}."
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_output_dir(str(path / "a" / "b"), files=[], folders=[])


def test_a_new_folder_is_accepted_and_not_made(tmp_path):
    check_output_dir(str(tmp_path / "a" / "b"), files=["x"], folders=["y"])
    assert not list(tmp_path.iterdir())
    assert latest_checkpoint(str(tmp_path / "a")) is None
    assert tf.train.latest_checkpoint(str(tmp_path)) is None
