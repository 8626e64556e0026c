"""Tokens cached beside the text: content, invalidation, runs without the cache."""

import logging
import os
from unittest import mock

import numpy as np
import pytest

from bert_finetune import token_cache
from bert_finetune.encoding import encode_examples
from bert_finetune.tasks import get_task, read_examples
from bert_finetune.token_cache import cached_examples
from bert_finetune.tokenization import WordPieceTokenizer


@pytest.fixture
def text(tmp_path, cola_dir):
    path = tmp_path / "train.tsv"
    path.write_text((cola_dir / "train.tsv").read_text())
    return path


@pytest.fixture
def tokenizer(bert_dir):
    return WordPieceTokenizer(bert_dir / "vocab.txt", do_lower_case=True)


@pytest.fixture
def encodings(monkeypatch):
    """Mock that counts the calls of the tokenizer."""
    calls = mock.Mock(side_effect=encode_examples)
    monkeypatch.setattr(token_cache, "encode_examples", calls)
    return calls


def _read(path, tokenizer, max_seq_length=16, labelled=True):
    rows = read_examples(get_task("CoLA"), path.parent, path.name, labelled=labelled)
    return rows, cached_examples(path, rows, tokenizer, max_seq_length)


def _assert_same(ours, theirs):
    for name in ("input_ids", "segment_ids", "offsets", "labels"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
    assert (ours.pad_id, ours.checksum) == (theirs.pad_id, theirs.checksum)


def test_text_is_tokenized_once(text, tokenizer, encodings):
    rows, first = _read(text, tokenizer)
    _, second = _read(text, tokenizer)
    assert encodings.call_count == 1
    names = sorted(path.name for path in text.parent.iterdir())
    assert names == ["train.tsv", "train.tsv.tokens.npz"]
    for found in (first, second):
        _assert_same(found, encode_examples(rows, tokenizer, 16))


def test_examples_without_labels_are_kept_too(tmp_path, cola_dir, tokenizer, encodings):
    path = tmp_path / "test.tsv"
    path.write_text((cola_dir / "test.tsv").read_text())
    _, first = _read(path, tokenizer, labelled=False)
    _, second = _read(path, tokenizer, labelled=False)
    assert encodings.call_count == 1 and second.labels is None
    _assert_same(first, second)


def test_labels_are_those_of_the_text_now(text, tokenizer, encodings):
    _, first = _read(text, tokenizer)
    text.write_text(text.read_text().replace("\t1\t", "\t0\t", 1))
    rows, second = _read(text, tokenizer)
    assert encodings.call_count == 1
    assert second.labels.sum() == first.labels.sum() - 1
    _assert_same(second, encode_examples(rows, tokenizer, 16))


@pytest.mark.parametrize(
    "what", ["text", "vocabulary", "casing", "max_seq_length", "version"]
)
def test_whatever_the_tokens_were_made_of_invalidates_them(
    text, tokenizer, bert_dir, tmp_path_factory, monkeypatch, encodings, what
):
    _read(text, tokenizer)
    max_seq_length = 16
    if what == "text":
        text.write_text(text.read_text().replace("w1", "w2", 1))
    elif what == "vocabulary":
        path = tmp_path_factory.mktemp("other") / "vocab.txt"
        path.write_text((bert_dir / "vocab.txt").read_text() + "more\n")
        tokenizer = WordPieceTokenizer(path, do_lower_case=True)
    elif what == "casing":
        tokenizer = WordPieceTokenizer(bert_dir / "vocab.txt", do_lower_case=False)
    elif what == "max_seq_length":
        max_seq_length = 8
    else:
        monkeypatch.setattr(token_cache, "_VERSION", 2)
    rows, found = _read(text, tokenizer, max_seq_length)
    assert encodings.call_count == 2
    _assert_same(found, encode_examples(rows, tokenizer, max_seq_length))
    _read(text, tokenizer, max_seq_length)
    assert encodings.call_count == 2


@pytest.mark.parametrize("keep_bytes", [0, 100, -50])
def test_damaged_file_is_made_anew(text, tokenizer, encodings, keep_bytes):
    _read(text, tokenizer)
    cache = text.with_name("train.tsv.tokens.npz")
    whole = cache.read_bytes()
    cache.write_bytes(whole[:keep_bytes])
    rows, found = _read(text, tokenizer)
    assert encodings.call_count == 2
    _assert_same(found, encode_examples(rows, tokenizer, 16))
    assert len(cache.read_bytes()) == len(whole)


def test_folder_that_cannot_be_written_to_goes_without(
    text, tokenizer, encodings, monkeypatch, caplog
):
    """The file's creation is patched to fail, because root may write everywhere."""
    refuse = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    caplog.set_level(logging.INFO, "tensorflow.bert_finetune")
    monkeypatch.setattr(token_cache, "whole_file", refuse)
    rows, found = _read(text, tokenizer)
    _assert_same(found, encode_examples(rows, tokenizer, 16))
    message = f"tokens are not kept in {text}.tokens.npz: Permission denied"
    assert message in caplog.text
    assert os.listdir(text.parent) == ["train.tsv"]


def test_full_disk_leaves_no_half_file(text, tokenizer, monkeypatch):
    fail = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(token_cache.np, "savez", fail)
    _read(text, tokenizer)
    assert os.listdir(text.parent) == ["train.tsv"]
