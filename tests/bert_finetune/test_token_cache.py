"""Tokens cached beside the text: content, invalidation, runs without the cache."""

import dataclasses
import io
import logging
import os
import pickle
import zipfile
import zlib
from unittest import mock

import numpy as np
import pytest

from bert_finetune import inputs, token_cache
from bert_finetune.encoding import encode_examples
from bert_finetune.tasks import Example, get_task, read_examples
from bert_finetune.token_cache import cached_examples
from bert_finetune.tokenization import WordPieceTokenizer
from estimator_accum.programs.cluster import Cluster
from tests.helpers.models import tiny_bert

pytestmark = pytest.mark.once


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
    assert ours.truncated == theirs.truncated


def test_text_is_tokenized_once(text, tokenizer, encodings):
    rows, first = _read(text, tokenizer)
    _, second = _read(text, tokenizer)
    assert encodings.call_count == 1
    names = sorted(path.name for path in text.parent.iterdir())
    assert names == ["train.tsv", "train.tsv.tokens.npz"]
    for examples in (first, second):
        _assert_same(examples, encode_examples(rows, tokenizer, 16))


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
        monkeypatch.setattr(token_cache, "_VERSION", 4)
    rows, examples = _read(text, tokenizer, max_seq_length)
    assert encodings.call_count == 2
    _assert_same(examples, encode_examples(rows, tokenizer, max_seq_length))
    _read(text, tokenizer, max_seq_length)
    assert encodings.call_count == 2


def test_texts_of_one_crc32_are_told_apart(tokenizer):
    texts = [[Example("0", text, None, 0)] for text in ("plumless", "buckeroo")]
    sums = [zlib.crc32(rows[0].text_a.encode()) for rows in texts]
    made_of = [token_cache._made_of(rows, tokenizer, 16) for rows in texts]
    assert sums[0] == sums[1] and made_of[0] != made_of[1]


def _array(content) -> bytes:
    file = io.BytesIO()
    np.save(file, content)
    return file.getvalue()


def _zipped(whole: bytes, **changes) -> bytes:
    """Returns a cache with other arrays, or other bytes in their place."""
    arrays = {name: _array(array) for name, array in np.load(io.BytesIO(whole)).items()}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in (arrays | changes).items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def _first_entry(whole: bytes, place: int, central_place: int, value: int) -> bytes:
    """Returns a cache whose first entry has another byte in both of its headers."""
    changed = bytearray(whole)
    for at in (place, whole.find(b"PK\1\2") + central_place):
        changed[at] = value
    return bytes(changed)


_HUGE = b"{'descr': '<i4', 'fortran_order': False, 'shape': (1000000000000,), }\n"


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda whole, n=n: whole[:n] for n in (0, 100, -50)),
        lambda whole: _array(np.arange(3)),
        lambda whole: _first_entry(whole, 8, 10, 99),  # unknown compression
        lambda whole: _first_entry(whole, 6, 8, 1),  # encrypted
        lambda whole: _zipped(
            whole,
            input_ids=b"\x93NUMPY\1\0" + len(_HUGE).to_bytes(2, "little") + _HUGE,
        ),
        lambda whole: _zipped(whole, checksum=_array(np.array([1, 2]))),
        lambda whole: _zipped(whole, offsets=_array(np.arange(3))),
        lambda whole: _zipped(whole, segment_ids=_array(np.array([[0.5]]))),
        lambda whole: _zipped(whole, input_ids=pickle.dumps(["A"])),
    ],
)
def test_damaged_file_is_made_anew(text, tokenizer, encodings, damage):
    _read(text, tokenizer)
    cache = text.with_name("train.tsv.tokens.npz")
    whole = cache.read_bytes()
    cache.write_bytes(damage(whole))
    rows, examples = _read(text, tokenizer)
    assert encodings.call_count == 2
    _assert_same(examples, encode_examples(rows, tokenizer, 16))
    assert len(cache.read_bytes()) == len(whole)


def test_folder_that_cannot_be_written_to_goes_without(
    text, tokenizer, encodings, monkeypatch, caplog
):
    """The file's creation is patched to fail, because root may write everywhere."""
    refuse = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    caplog.set_level(logging.INFO, "tensorflow.bert_finetune")
    monkeypatch.setattr(token_cache, "whole_file", refuse)
    rows, examples = _read(text, tokenizer)
    _assert_same(examples, encode_examples(rows, tokenizer, 16))
    message = f"tokens are not cached in {text}.tokens.npz: Permission denied"
    assert message in caplog.text
    assert os.listdir(text.parent) == ["train.tsv"]


def test_full_disk_leaves_no_half_file(text, tokenizer, monkeypatch):
    fail = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(token_cache.np, "savez", fail)
    _read(text, tokenizer)
    assert os.listdir(text.parent) == ["train.tsv"]


def test_the_share_of_long_texts_is_said_in_one_line(text, bert_dir, tmp_path, caplog):
    caplog.set_level(logging.INFO, "tensorflow.bert_finetune")
    (tmp_path / "dev.tsv").write_text("x\t0\t\tw1 w2\nx\t1\t\t" + "w1 " * 50 + "\n")
    settings = tiny_bert.make_settings(bert_dir, tmp_path, tmp_path / "output")
    jobs = {"do_train": True, "do_eval": True}
    for _ in range(2):  # from the cache, too
        inputs.read(dataclasses.replace(settings, **jobs, max_seq_length=16))
        (message,) = caplog.messages
        rule = "truncated, since longer than --max_seq_length=16: "
        assert message == f"{rule}1 of 2 examples in dev.tsv (50 %)"
        caplog.clear()
    worker = Cluster("a:1", ("b:1",), task_type="worker")
    inputs.read(dataclasses.replace(settings, **jobs, max_seq_length=16), worker)
    assert not caplog.messages
