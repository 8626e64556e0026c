"""Tokenized examples: cut, padded by the batch, told apart by their checksum."""

import numpy as np
import pytest

from bert_finetune.encoding import encode_examples
from bert_finetune.tasks import Example
from bert_finetune.tokenization import WordPieceTokenizer

pytestmark = pytest.mark.once

# [PAD] away from 0, so that a padding of zeros would be seen.
_TOKENS = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", *"abcdef"]


@pytest.fixture
def encode(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(_TOKENS))
    tokenizer = WordPieceTokenizer(path, do_lower_case=True)

    def encode(*rows, max_seq_length=6):
        examples = [Example("", *row) for row in rows]
        return encode_examples(examples, tokenizer, max_seq_length)

    return encode


def _tokens(encoded, rows, length):
    ids = encoded.features(np.array(rows), length)["input_ids"]
    return [" ".join(_TOKENS[i] for i in row) for row in ids]


def test_features_are_padded_rows_in_the_order_that_is_asked_for(encode):
    encoded = encode(("a", "b", 0), ("a b", "c", 1))
    assert _tokens(encoded, [1, 0], 7) == [
        "[CLS] a b [SEP] c [SEP] [PAD]",
        "[CLS] a [SEP] b [SEP] [PAD] [PAD]",
    ]
    features = encoded.features(np.array([0]), 7)
    assert features["input_mask"].tolist() == [[1, 1, 1, 1, 1, 0, 0]]
    assert features["segment_ids"].tolist() == [[0, 0, 0, 1, 1, 0, 0]]
    assert {array.dtype for array in features.values()} == {np.dtype(np.int32)}


def test_examples_longer_than_max_seq_length_are_truncated(encode):
    encoded = encode(("a b c d e f", None, 0), ("a", None, 1), max_seq_length=5)
    assert encoded.lengths.tolist() == [5, 3]
    assert _tokens(encoded, [0], 5) == ["[CLS] a b c [SEP]"]


def test_labels_are_kept_where_there_are_any(encode):
    assert encode(("a", None, 2), ("b", None, 0)).labels.tolist() == [2, 0]
    assert encode(("a", None, None)).labels is None


@pytest.mark.parametrize(
    "others",
    [
        [("b", None, 0), ("a", None, 1)],  # another order
        [("a", None, 1), ("b", None, 1)],  # another label
        [("a", None, 0), ("c", None, 1)],  # another text
        [("a b", None, 0), ("", None, 1)],  # other borders
        [("a", None, 0)],
    ],
)
def test_checksum_tells_training_sets_apart(encode, others):
    ours = encode(("a", None, 0), ("b", None, 1))
    assert ours.checksum == encode(("a", None, 0), ("b", None, 1)).checksum
    assert ours.checksum != encode(*others).checksum
