"""Reading bert_config.json."""

import dataclasses
import json
import pathlib
import re

import pytest
import tensorflow as tf

from bert_finetune.bert_config import BertConfig

pytestmark = pytest.mark.once

# As published with BERT-Base, Multilingual.
_PUBLISHED = json.loads("""{
    "attention_probs_dropout_prob": 0.1, "directionality": "bidi", "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 512,
    "num_attention_heads": 12, "num_hidden_layers": 12, "pooler_fc_size": 768,
    "pooler_type": "first_token_transform", "type_vocab_size": 2, "vocab_size": 105879
}""")
_USED = [field.name for field in dataclasses.fields(BertConfig)]


def _write(folder, content):
    path = folder / "bert_config.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_published_file_is_read_and_defaults_are_those_of_bert_base(tmp_path):
    config = BertConfig.from_json_file(_write(tmp_path, _PUBLISHED))
    used = {k: v for k, v in _PUBLISHED.items() if k in _USED}
    assert dataclasses.asdict(config) == {**used, "layer_norm_eps": 1e-12}
    assert BertConfig(vocab_size=105879) == config


def test_a_byte_order_mark_is_accepted(tmp_path):
    path = pathlib.Path(_write(tmp_path, _PUBLISHED))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert BertConfig.from_json_file(str(path)) == BertConfig(vocab_size=105879)


def test_layer_norm_eps_is_taken_from_the_file_that_has_it(tmp_path):
    path = _write(tmp_path, {**_PUBLISHED, "layer_norm_eps": 1e-5})
    assert BertConfig.from_json_file(path).layer_norm_eps == 1e-5


def test_storage_that_only_tensorflow_reads_is_read():
    with tf.io.gfile.GFile("ram://bert_config.json", "w") as file:
        json.dump(_PUBLISHED, file)
    config = BertConfig.from_json_file("ram://bert_config.json")
    assert config == BertConfig(vocab_size=105879)
    tf.io.gfile.makedirs("ram://folder")
    for path in ("ram://missing", "ram://folder"):
        with pytest.raises(ValueError, match=f"Received: {path}, which cannot be r"):
            BertConfig.from_json_file(path)


def test_missing_file_is_named(tmp_path):
    path = str(tmp_path / "bert_config.json")
    with pytest.raises(ValueError, match=f"must be a JSON file.*{re.escape(path)}"):
        BertConfig.from_json_file(path)
    with pytest.raises(ValueError, match="which cannot be read"):
        BertConfig.from_json_file(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"hidden_size: 768", b"\x00\x80", b"\xff\xfe\x00"),
        b'{"hidden_size": 768, "hidden_size": 512}',
        pytest.param(b"[" * 100_000, id="nested"),
    ],
)
def test_what_is_not_json_is_refused(content, tmp_path):
    path = tmp_path / "bert_config.json"
    path.write_bytes(content)
    sentence = f"{re.escape(str(path))} must hold a JSON object. Received text that is"
    with pytest.raises(ValueError, match=sentence):
        BertConfig.from_json_file(str(path))


def test_json_that_is_not_an_object_is_refused(tmp_path):
    with pytest.raises(TypeError, match="must hold a JSON object. Received: a list"):
        BertConfig.from_json_file(_write(tmp_path, [_PUBLISHED]))


@pytest.mark.parametrize("key", [key for key in _USED if key != "layer_norm_eps"])
def test_missing_key_is_named_with_the_file(key, tmp_path):
    content = {k: v for k, v in _PUBLISHED.items() if k != key}
    path = _write(tmp_path, content)
    sentence = f"{path} must have the key `{key}`. Received the keys: "
    with pytest.raises(ValueError, match=re.escape(sentence)):
        BertConfig.from_json_file(path)


@pytest.mark.parametrize(
    ("key", "value", "error", "rule"),
    [
        ("vocab_size", "30522", TypeError, "an integer >= 1. Received: '30522'"),
        ("hidden_size", 768.0, TypeError, "an integer >= 1. Received: 768.0"),
        ("num_hidden_layers", 0, ValueError, "an integer >= 1. Received: 0"),
        ("num_attention_heads", True, TypeError, "an integer >= 1. Received: True"),
        ("intermediate_size", -1, ValueError, "an integer >= 1. Received: -1"),
        ("max_position_embeddings", None, TypeError, "an integer >= 1"),
        ("type_vocab_size", [2], TypeError, "an integer >= 1"),
        ("hidden_dropout_prob", 1, ValueError, r"a number in [0, 1). Received: 1"),
        ("attention_probs_dropout_prob", "0", TypeError, r"a number in [0, 1)"),
        ("hidden_dropout_prob", float("nan"), ValueError, r"a number in [0, 1)"),
        ("num_hidden_layers", 10**6, ValueError, "an integer >= 1 and <= 1,000. Rec"),
        ("hidden_size", 10**9, ValueError, "an integer >= 1 and <= 16,777,216. Rec"),
        ("initializer_range", 0, ValueError, "a number > 0. Received: 0"),
        ("initializer_range", float("inf"), ValueError, "a number > 0. Received: inf"),
        ("layer_norm_eps", None, TypeError, "a number > 0. Received: None"),
        ("hidden_act", "swish", ValueError, "one of gelu, gelu_new, relu, tanh, lin"),
        ("hidden_act", ["gelu"], ValueError, "one of gelu"),
    ],
)
def test_unfit_value_is_named_with_key_and_file(key, value, error, rule, tmp_path):
    path = _write(tmp_path, {**_PUBLISHED, key: value})
    sentence = f"`{key}` in {path} must be {rule}"
    with pytest.raises(error, match=re.escape(sentence)):
        BertConfig.from_json_file(path)
    with pytest.raises(error, match=re.escape(f"`{key}` in BertConfig must be {rule}")):
        BertConfig(**{"vocab_size": 10, key: value})


def test_hidden_size_must_be_a_multiple_of_the_heads(tmp_path):
    path = _write(tmp_path, {**_PUBLISHED, "num_attention_heads": 7})
    sentence = f"`hidden_size` in {path} must be a multiple of `num_attention_heads`."
    with pytest.raises(ValueError, match=re.escape(sentence)):
        BertConfig.from_json_file(path)
