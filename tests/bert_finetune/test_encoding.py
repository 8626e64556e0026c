"""Tokenized examples: labels, progress, a checksum that differs for other examples."""

from unittest import mock

import numpy as np
import pytest

from bert_finetune.encoding import encode_examples
from bert_finetune.tasks import Example
from bert_finetune.tokenization import WordPieceTokenizer
from estimator_accum.programs import inputs

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


def test_examples_that_lose_tokens_are_counted(encode):
    rows = [("a b c a", None), ("a b c a b", None), ("a", None), ("a a a a a a", None)]
    assert encode(*((*row, 0) for row in rows)).truncated == 2
    pairs = [("a b", "c"), ("a b", "c a"), ("a b c", "")]
    assert encode(*((*pair, 0) for pair in pairs)).truncated == 1


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


def test_many_rows_are_encoded_in_parts_and_the_display_gets_those_done(
    encode, monkeypatch
):
    rows = [("a b c"[: 2 * i], None, i) for i in range(4)]
    display = mock.Mock()
    monkeypatch.setattr(inputs, "Display", display)
    at_once = encode(*rows)
    assert not display.called
    monkeypatch.setattr(inputs, "_PART_ROWS", 3)
    monkeypatch.setattr(inputs, "_SILENT_ROWS", 3)
    in_parts = encode(*rows)
    assert in_parts.checksum == at_once.checksum
    np.testing.assert_array_equal(in_parts.lengths, [2, 3, 4, 5])
    display.assert_called_once_with("tokenizing", "example", 4)
    calls = [mock.call.open(), mock.call.show(3), mock.call.show(4), mock.call.close()]
    assert display.return_value.method_calls == calls
