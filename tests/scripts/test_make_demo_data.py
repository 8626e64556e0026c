"""scripts/make_demo_data.py: the corpus, its labels, the checkpoint, the refusals."""

import collections
import hashlib
import os
import pathlib
import random

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune.demo_grammar import PHENOMENA, Grammar, make_corpus, vocabulary
from bert_finetune.modeling import BertConfig
from bert_finetune.tasks import get_task, read_examples
from bert_finetune.tokenization import WordPieceTokenizer
from scripts import make_demo_data

_FILES = ("train.tsv", "dev.tsv", "test.tsv", "vocab.txt")


@pytest.fixture(scope="module")
def corpus():
    return make_corpus(0, **make_demo_data.SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("demo_data")
    make_demo_data.write_corpus(folder, corpus)
    return folder


def _digest(folder: pathlib.Path) -> str:
    content = b"".join((folder / name).read_bytes() for name in _FILES)
    return hashlib.sha256(content).hexdigest()


def test_same_seed_writes_the_same_bytes_on_every_machine(folder):
    # A fixed digest: two runs in one process would not show a change between Pythons.
    assert _digest(folder) == (
        "935a1edd3c885e2d8062529037d3aa84e5413f53d6a7e7909f8aaefa54092ad5"
    )


def test_another_seed_writes_other_sentences(tmp_path, folder):
    make_demo_data.write_corpus(tmp_path, make_corpus(1, **make_demo_data.SIZES))
    assert _digest(tmp_path) != _digest(folder)


def test_files_are_in_glues_layout_of_cola(folder):
    task = get_task("CoLA")
    for name, num_examples in (("train.tsv", 3200), ("dev.tsv", 500)):
        examples = read_examples(task, folder, name, labelled=True)
        assert len(examples) == num_examples
        assert 0.5 < np.mean([example.label for example in examples]) < 0.7
        for line in (folder / name).read_text().splitlines():
            source, label, mark, sentence = line.split("\t")
            assert source in PHENOMENA
            assert (label, mark) in (("1", ""), ("0", "*"))
            assert sentence[0].isupper() and sentence.endswith(".")
    assert (folder / "test.tsv").read_text().startswith("index\tsentence\n0\t")
    tests = read_examples(task, folder, "test.tsv", labelled=False)
    assert [example.guid for example in tests] == [str(i) for i in range(len(tests))]


def test_no_sentence_is_in_two_parts_or_twice(corpus):
    texts = [sentence.text for part in corpus[:3] for sentence in part]
    texts += corpus.unlabelled
    assert len(set(texts)) == len(texts)


def _is_twin(good: list[str], bad: list[str]) -> bool:
    if len(good) != len(bad):
        return False
    changed = sum(a != b for a, b in zip(good, bad, strict=True))
    return changed == 1 or (changed > 1 and sorted(good) == sorted(bad))


@pytest.mark.parametrize("source", PHENOMENA)
def test_unacceptable_sentence_differs_in_one_point(source):
    grammar = Grammar(random.Random(0))
    for _ in range(300):
        good, bad = PHENOMENA[source](grammar)
        assert _is_twin(good, bad), (good, bad)


def test_unacceptable_sentence_has_its_twin_in_the_same_part(corpus):
    for part in (corpus.train, corpus.dev, corpus.test):
        good = collections.defaultdict(list)
        for sentence in part:
            if sentence.is_acceptable:
                good[sentence.source, len(_words(sentence))].append(_words(sentence))
        for sentence in part:
            words = _words(sentence)
            if not sentence.is_acceptable:
                candidates = good[sentence.source, len(words)]
                assert any(_is_twin(other, words) for other in candidates), sentence


def test_vocabulary_knows_every_word_and_splits_some(folder, corpus):
    tokenizer = WordPieceTokenizer(folder / "vocab.txt", do_lower_case=True)
    tokens = vocabulary()
    assert tokens[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    texts = [sentence.text for part in corpus[:3] for sentence in part]
    encodings = tokenizer.encode_batch(texts + corpus.unlabelled, None, 512)
    used = collections.Counter(id for e in encodings for id in e.input_ids)
    unused = [token for id, token in enumerate(tokens) if not used[id]]
    assert unused == ["[PAD]", "[UNK]", "[MASK]"]
    assert used[tokens.index("##er")] > 100 < used[tokens.index("##ers")]
    longest = max(len(encoding.input_ids) for encoding in encodings)
    assert longest <= make_demo_data.MAX_SEQ_LENGTH


def test_words_alone_do_not_give_unacceptable_sentences_away(corpus):
    columns = _columns(corpus.train)
    weights = _ridge_regression(*_bags(corpus.train, columns))
    bags, labels = _bags(corpus.dev, columns)
    assert abs(_matthews_correlation(bags @ weights > 0, labels)) < 0.2


def _words(sentence) -> list[str]:
    return sentence.text.lower().rstrip(".").split()


def _columns(sentences) -> dict[str, int]:
    """Returns the column of each word in a bag of words."""
    words = sorted({word for sentence in sentences for word in _words(sentence)})
    return {word: column for column, word in enumerate(words)}


def _bags(sentences, columns) -> tuple[np.ndarray, np.ndarray]:
    """Returns word counts and a constant, [sentences, words + 1], and labels."""
    bags = np.zeros((len(sentences), len(columns) + 1))
    bags[:, -1] = 1
    for bag, sentence in zip(bags, sentences, strict=True):
        for word in _words(sentence):
            bag[columns[word]] += 1
    return bags, np.array([s.is_acceptable for s in sentences])


def _ridge_regression(bags: np.ndarray, labels: np.ndarray) -> np.ndarray:
    products = bags.T @ bags + np.eye(bags.shape[1])
    return np.linalg.solve(products, bags.T @ (2 * labels - 1))


def _matthews_correlation(predicted: np.ndarray, labels: np.ndarray) -> float:
    return float(np.corrcoef(predicted, labels)[0, 1])


def test_bag_of_words_baseline_can_learn_what_words_do_tell(corpus):
    """The baseline is strong enough to learn a label that one word decides."""
    told = [s._replace(is_acceptable="again" in s.text) for s in corpus.train]
    bags, labels = _bags(told, _columns(told))
    weights = _ridge_regression(bags[:2500], labels[:2500])
    assert _matthews_correlation(bags[2500:] @ weights > 0, labels[2500:]) > 0.95


@pytest.mark.once
def test_folder_holds_what_run_classifier_takes(tmp_path, monkeypatch, folder):
    monkeypatch.setitem(make_demo_data.PRETRAINING, "num_updates", 2)
    output = tmp_path / "new" / "data"
    assert make_demo_data.main(["--output_dir", str(output)]) == 0
    checkpoint = [f"bert_model.ckpt.{end}" for end in ("index", "data-00000-of-00001")]
    names = sorted([*_FILES, "bert_config.json", *checkpoint])
    assert sorted(os.listdir(output)) == names
    assert os.listdir(output.parent) == ["data"]
    assert _digest(output) == _digest(folder)
    config = BertConfig.from_json_file(str(output / "bert_config.json"))
    assert config.vocab_size == len(vocabulary())
    shapes = dict(tf.train.list_variables(str(output / "bert_model.ckpt")))
    embeddings = [config.vocab_size, config.hidden_size]
    assert shapes["bert/embeddings/word_embeddings"] == embeddings
    assert shapes["cls/predictions/output_bias"] == [config.vocab_size]
    assert all(name.startswith(("bert/", "cls/predictions/")) for name in shapes)
