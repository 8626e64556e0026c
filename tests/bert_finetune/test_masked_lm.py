"""bert_finetune/masked_lm.py: masking, learning and saving."""

import dataclasses
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import masked_lm
from tests.helpers import tiny_bert

# Ids: [PAD] 0, [UNK] 1, [CLS] 2, [SEP] 3, [MASK] 4, two words 5 and 6, two unused.
_ALTERNATING = [[2, 5, 6, 5, 6, 5, 6, 3], [2, 6, 5, 6, 5, 3]] * 8
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SIZES = {"vocab_size": 9, "max_position_embeddings": 8, "initializer_range": 0.1}
_TINY = dataclasses.replace(tiny_bert.CONFIG, **_SIZES, **_NO_DROPOUT)
_TRAINING = {"special_ids": range(5), "pad_id": 0, "mask_id": 4}
_TRAINING |= {"batch_size": 16, "peak_learning_rate": 5e-3}


def _pretrain(checkpoint: pathlib.Path, num_updates: int, seed: int = 0) -> float:
    steps = {"num_updates": num_updates, "seed": seed}
    return masked_lm.pretrain(_TINY, _ALTERNATING, checkpoint, **steps, **_TRAINING)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> tuple[pathlib.Path, float]:
    """(checkpoint after 120 updates, last loss)."""
    checkpoint = tmp_path_factory.mktemp("pretrained") / "bert_model.ckpt"
    return checkpoint, _pretrain(checkpoint, num_updates=120)


def test_pretraining_learns_what_a_masked_token_was(pretrained):
    # ln 2 is the loss of a guess between the two tokens without their neighbours.
    assert pretrained[1] < 0.2 < np.log(2)


def test_pretraining_is_bit_identical_for_one_seed(tmp_path, pretrained):
    _pretrain(tmp_path / "second", num_updates=120)
    _pretrain(tmp_path / "other seed", num_updates=1, seed=1)
    checkpoints = pretrained[0], tmp_path / "second", tmp_path / "other seed"
    first, second, other = (tf.train.load_checkpoint(str(c)) for c in checkpoints)
    for name in first.get_variable_to_shape_map():
        np.testing.assert_array_equal(first.get_tensor(name), second.get_tensor(name))
    kernel = "bert/pooler/dense/kernel"  # pre-training does not train it
    assert not np.array_equal(first.get_tensor(kernel), other.get_tensor(kernel))


def test_checkpoint_holds_the_published_names_and_no_others(pretrained):
    checkpoint, _ = pretrained
    names = [name for name, _ in tf.train.list_variables(str(checkpoint))]
    head = [name for name in names if not name.startswith("bert/")]
    in_transform = ("LayerNorm/beta", "LayerNorm/gamma", "dense/bias", "dense/kernel")
    transform = [f"cls/predictions/transform/{name}" for name in in_transform]
    assert head == ["cls/predictions/output_bias", *transform]
    assert "bert/pooler/dense/kernel" in names
    assert not [name for name in names if "adam" in name or "step" in name]
    files = {path.name for path in checkpoint.parent.iterdir()}
    assert files == {f"bert_model.ckpt.{x}" for x in ("index", "data-00000-of-00001")}


def test_only_ordinary_tokens_are_masked_four_of_five_of_them_by_mask():
    rows = np.tile(np.array([2, 5, 6, 7, 8, 3, 0, 0], np.int32), (4000, 1))
    ordinary_ids = np.arange(5, 9)
    masked = masked_lm._mask(rows, ordinary_ids, 4, np.random.RandomState(0))
    np.testing.assert_array_equal(masked.masked_ids, rows.flat[masked.masked_places])
    assert set(masked.masked_ids) == set(ordinary_ids)
    shown = masked.input_ids.flat[masked.masked_places]
    assert abs(np.mean(shown == 4) - 0.8) < 0.02
    # Of the tenth that becomes a random token, a quarter is the same one by chance.
    assert abs(np.mean(shown == masked.masked_ids) - 0.125) < 0.02
    is_left = np.ones(rows.size, bool)
    is_left[masked.masked_places] = False
    np.testing.assert_array_equal(masked.input_ids.flat[is_left], rows.flat[is_left])
    share = len(masked.masked_places) / (4 * len(rows))
    assert abs(share - masked_lm._MASKED_SHARE) < 0.01


def test_batch_without_a_masked_token_gets_one():
    rows = np.array([[2, 5, 3]], np.int32)
    ordinary_ids = np.array([5])
    for seed in range(20):
        masked = masked_lm._mask(rows, ordinary_ids, 4, np.random.RandomState(seed))
        assert masked.masked_places.tolist() == [1]
        assert masked.masked_ids.tolist() == [5]
