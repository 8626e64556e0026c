"""The demo's sentences."""

import hashlib
import json

import numpy as np
import pytest

from bert_finetune.bert_config import BertConfig
from bert_finetune.demo_data import (
    CONFIG,
    MAX_SEQ_LENGTH,
    VOCABULARY,
    make_sentences,
    write_demo_data,
)
from bert_finetune.tasks import get_task, read_examples
from bert_finetune.tokenization import WordPieceTokenizer

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "data"
    write_demo_data(folder)
    return folder


def test_the_same_seed_makes_the_same_sentences_on_every_machine():
    digest = hashlib.sha256(repr(make_sentences(1850)).encode()).hexdigest()
    # A fixed digest: two runs in one process would not show a change between Pythons.
    assert digest == (
        "a8b54653e02da1019dde1d9774d010ddcc26e9c34251c9110f1c69c960691f66"
    )
    assert make_sentences(5, seed=1) != make_sentences(5)


def test_an_unacceptable_sentence_is_the_one_before_with_two_neighbours_swapped():
    sentences = make_sentences(1000)
    assert [label for label, _ in sentences] == [1, 0] * 1000
    texts = [text for _, text in sentences]
    assert len(set(texts[::2])) == 1000 and not set(texts[::2]) & set(texts[1::2])
    for good, bad in zip(texts[::2], texts[1::2], strict=True):
        good, bad = (np.array(text.lower().rstrip(".").split()) for text in (good, bad))
        (places,) = np.nonzero(good != bad)
        assert list(np.diff(places)) == [1]
        np.testing.assert_array_equal(good[places], bad[places[::-1]])


def test_the_files_are_what_train_reads(folder):
    task = get_task("CoLA")
    tokenizer = WordPieceTokenizer(folder / "vocab.txt", do_lower_case=True)
    texts = {}
    for name, count in (("train.tsv", 4096), ("dev.tsv", 500)):
        examples = read_examples(task, folder, name, labelled=True)
        assert len(examples) == count
        assert np.mean([example.label for example in examples]) == 0.5
        texts[name] = [example.text_a for example in examples]
    assert not set(texts["train.tsv"]) & set(texts["dev.tsv"])
    encodings = tokenizer.encode_batch(texts["train.tsv"] + texts["dev.tsv"], None, 512)
    used = {id for encoding in encodings for id in encoding.input_ids}
    unused = [token for id, token in enumerate(VOCABULARY) if id not in used]
    assert unused == ["[PAD]", "[UNK]", "[MASK]"]
    assert max(len(encoding.input_ids) for encoding in encodings) <= MAX_SEQ_LENGTH
    assert BertConfig.from_json_file(str(folder / "bert_config.json")) == CONFIG
    assert json.loads((folder / "bert_config.json").read_text())["hidden_size"] == 64
