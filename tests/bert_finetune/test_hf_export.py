"""A classifier in Hugging Face's layout gives the same logits, from the same tokens."""

import json
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file

from bert_finetune.bert_config import BertConfig
from bert_finetune.checkpoint import (
    encoder_shapes,
    init_from_checkpoint,
    write_checkpoint,
)
from bert_finetune.hf_export import export_classifier
from bert_finetune.hf_import import import_checkpoint
from bert_finetune.modeling import classifier_logits, encode
from bert_finetune.tasks import get_task
from bert_finetune.tokenization import WordPieceTokenizer
from estimator_accum.programs.progress import DamagedCheckpointError

_TASK = get_task("MNLI")  # three classes: not a square matrix anywhere
_WORDS = ["hello", "wor", "##ld", "caf", "##e", "été", "!", ",", "x", "##x", "北"]
_CONFIG = BertConfig(
    vocab_size=5 + len(_WORDS),
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=20,
)
_TEXTS = [
    ("Hello world!", None),
    ("Café, hello\u00a0WORLD 北x", "été x"),
    ("x" * 150, "hello"),  # longer than Hugging Face's own longest word
    ("x" * 201, "unknown"),
]


@pytest.fixture
def transformers(monkeypatch):
    """Hugging Face's library, with its BERT in TensorFlow."""
    name = "TF_USE_LEGACY_KERAS"  # the import would set it for the whole process
    monkeypatch.setenv(name, os.environ.get(name, "0"))
    return pytest.importorskip(
        "transformers", reason="Hugging Face's library to compare with is not installed"
    )


@pytest.fixture
def checkpoint(tmp_path) -> str:
    """A random classifier, with weights that are large enough to show bugs."""
    random = np.random.default_rng(0)
    shapes = encoder_shapes(_CONFIG) | {"output_weights": (3, 24), "output_bias": (3,)}
    arrays = {n: random.normal(0, 0.3, shape) for n, shape in shapes.items()}
    path = str(tmp_path / "model.ckpt-7")
    write_checkpoint({n: a.astype(np.float32) for n, a in arrays.items()}, path)
    return path


@pytest.fixture(params=[True, False], ids=["uncased", "cased"])
def tokenizer(request, tmp_path) -> WordPieceTokenizer:
    path = tmp_path / "given.txt"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS]
    path.write_bytes(("\ufeff" + "\r\n".join(tokens) + "\r\n").encode())
    return WordPieceTokenizer(path, do_lower_case=request.param)


@pytest.fixture
def folder(checkpoint, tokenizer, tmp_path) -> pathlib.Path:
    old = tmp_path / "export" / "hf" / "old"
    old.mkdir(parents=True)
    return export_classifier(checkpoint, _CONFIG, _TASK, tokenizer, old.parent)


def _batch():
    random = np.random.default_rng(1)
    mask = (np.arange(12) < np.array([[12], [7], [4]])).astype(np.int32)
    ids = random.integers(1, _CONFIG.vocab_size, [3, 12]) * mask
    return ids.astype(np.int32), mask, (np.arange(12) >= 3) * mask


def _our_logits(checkpoint: str, batch) -> np.ndarray:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        inputs = [tf.constant(part, tf.int32) for part in batch]
        pooled = encode(_CONFIG, *inputs, is_training=False).pooled
        logits = classifier_logits(pooled, 3, is_training=False)
        init_from_checkpoint(checkpoint)
        session.run(tf.compat.v1.global_variables_initializer())
        return session.run(logits)


def test_folder_is_what_transformers_reads_and_nothing_of_an_earlier_one(folder):
    names = {"config.json", "model.safetensors", "vocab.txt"}
    names |= {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    assert [path.name for path in folder.parent.iterdir()] == ["hf"]
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert config["id2label"] == {
        "0": "contradiction",
        "1": "entailment",
        "2": "neutral",
    }
    assert config["problem_type"] == "single_label_classification"
    assert config["num_labels"] == 3 and config["label2id"]["neutral"] == 2


def test_a_checkpoint_without_a_classifier_is_refused(tmp_path, tokenizer):
    path = str(tmp_path / "model.ckpt-7")
    write_checkpoint({"output_bias": np.zeros(3, np.float32)}, path)
    # Programs end with its text and exit code 2.
    with pytest.raises(
        DamagedCheckpointError, match="ckpt-7 without bert/embeddings/LayerNorm/b"
    ):
        export_classifier(path, _CONFIG, _TASK, tokenizer, tmp_path / "hf")


def test_import_of_an_export_gives_the_same_encoder(folder, checkpoint, tmp_path):
    import_checkpoint(folder, tmp_path / "back")
    back = tf.train.load_checkpoint(str(tmp_path / "back" / "bert_model.ckpt"))
    before = tf.train.load_checkpoint(checkpoint)
    for name in encoder_shapes(_CONFIG):
        np.testing.assert_array_equal(back.get_tensor(name), before.get_tensor(name))
    path = str(tmp_path / "back" / "bert_config.json")
    assert BertConfig.from_json_file(path) == _CONFIG


def test_tokens_are_those_of_training(folder, tokenizer, transformers):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text_a, text_b in _TEXTS:
        ours = tokenizer.encode(text_a, text_b, 300)
        tokens = theirs(text_a, text_b)
        assert tokens["input_ids"] == ours.input_ids
        assert tokens["token_type_ids"] == ours.segment_ids
    assert theirs.model_max_length == 20
    assert theirs.init_kwargs["do_lower_case"] == tokenizer.do_lower_case


@pytest.mark.parametrize("tokenizer", [True], indirect=True)
def test_logits_in_tensorflow_are_ours(folder, checkpoint, transformers):
    if not hasattr(transformers, "TFBertForSequenceClassification"):
        pytest.skip("BERT in TensorFlow needs transformers < 5")
    # from_pretrained reads safetensors with PyTorch; its own loader also takes arrays.
    from transformers.modeling_tf_pytorch_utils import (
        load_pytorch_state_dict_in_tf2_model as load,
    )

    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.TFAutoModelForSequenceClassification.from_config(config)
    assert type(model).__name__ == "TFBertForSequenceClassification"
    model.build_in_name_scope()
    weights = load_file(folder / "model.safetensors")
    _, loaded = load(model, weights, tf_inputs=False, output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    ids, mask, segments = batch = _batch()
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}
    logits = model(**inputs).logits.numpy()
    ours = _our_logits(checkpoint, batch)
    assert np.ptp(ours) > 0.1
    np.testing.assert_allclose(logits, ours, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokenizer", [True], indirect=True)
def test_logits_in_pytorch_are_ours(folder, checkpoint, transformers):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model, loaded = load(folder, output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    ids, mask, segments = batch = _batch()
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}
    with torch.no_grad():
        tensors = {name: torch.tensor(part).long() for name, part in inputs.items()}
        logits = model.eval()(**tensors).logits.numpy()
    np.testing.assert_allclose(logits, _our_logits(checkpoint, batch), atol=1e-5)
