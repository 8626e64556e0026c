"""Tokenized examples: their labels, and a checksum that differs for other examples."""

import pytest

from bert_finetune.encoding import encode_examples
from bert_finetune.tasks import Example
from bert_finetune.tokenization import WordPieceTokenizer

pytestmark = pytest.mark.once


@pytest.fixture
def encode(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[UNK]", "[CLS]", "[SEP]", "[PAD]", *"abc"]))
    tokenizer = WordPieceTokenizer(path, do_lower_case=True)

    return lambda *rows: encode_examples(
        [Example("", *row) for row in rows], tokenizer, max_seq_length=6
    )


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
