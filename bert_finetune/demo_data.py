"""Data of the demo: made-up sentences in CoLA's layout, for a small BERT.

An unacceptable sentence is an acceptable one in which two neighbouring words have changed
places: The cat admires the king / * The admires cat the king. Both have the same words,
so only their order tells which is which. The same seed makes the same sentences on every
machine.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from random import Random

from bert_finetune.bert_config import BertConfig

_NOUNS = [
    *["bird", "boy", "brother", "cat", "doctor", "dog", "father", "girl", "horse"],
    *["king", "mother", "pilot", "queen", "sister"],
]
_VERBS = ["admires", "blames", "describes", "mentions", "praises", "thanks"]
_ADJECTIVES = ["clever", "happy", "quiet", "tall", "young"]
_DETERMINERS = ["a", "every", "the", "this"]
_PREPOSITIONS = ["behind", "beside", "near"]
_SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [
    *[*_SPECIAL_TOKENS, "."],
    *sorted(_NOUNS + _VERBS + _ADJECTIVES + _DETERMINERS + _PREPOSITIONS),
]
MAX_SEQ_LENGTH = 32
CONFIG = BertConfig(
    vocab_size=len(VOCABULARY),
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=256,
    # Runs of the demo are compared number by number.
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    max_position_embeddings=MAX_SEQ_LENGTH,
    # Wider than BERT's 0.02: the weights are not pre-trained.
    initializer_range=0.1,
)


def make_sentences(pairs: int, seed: int = 0) -> list[tuple[int, str]]:
    """Returns 2 * `pairs` sentences, each with its label: 1 if it is acceptable.

    Each unacceptable sentence follows the acceptable one that it was made of; no
    acceptable sentence occurs twice.

    Args:
        pairs: Number of acceptable sentences, at most 100,000.
        seed: Random seed.
    """
    random, swapped_by_text = Random(seed), {}
    while len(swapped_by_text) < pairs:
        words = _acceptable(random)
        place = _choose(random, range(len(words) - 1))
        swapped = [*words[:place], words[place + 1], words[place], *words[place + 2 :]]
        swapped_by_text[_text(words)] = _text(swapped)
    return [
        labelled
        for good, bad in swapped_by_text.items()
        for labelled in ((1, good), (0, bad))
    ]


def _acceptable(random: Random) -> list[str]:
    """Returns the words of: The young cat admires this king [near every horse]."""

    def noun_phrase():
        adjective = [_choose(random, _ADJECTIVES)] * _choose(random, (0, 1))
        return [_choose(random, _DETERMINERS), *adjective, _choose(random, _NOUNS)]

    words = [*noun_phrase(), _choose(random, _VERBS), *noun_phrase()]
    if _choose(random, (False, True)):
        words += [_choose(random, _PREPOSITIONS), *noun_phrase()]
    return words


def _choose(random: Random, options: Sequence):
    """Chooses by `random()`, whose numbers are the same in every version of Python."""
    return options[int(random.random() * len(options))]


def _text(words: list[str]) -> str:
    text = " ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def write_demo_data(folder: pathlib.Path, train: int = 4096, dev: int = 500) -> None:
    """Writes train.tsv, dev.tsv, vocab.txt and bert_config.json into a new folder.

    Args:
        folder: Folder that does not exist.
        train: Number of sentences to train on, even.
        dev: Number of sentences to evaluate on, even.
    """
    folder.mkdir(parents=True)
    sentences = make_sentences((train + dev) // 2)
    for name, part in (("train", sentences[:train]), ("dev", sentences[train:])):
        rows = (
            f"demo\t{label}\t{'' if label else '*'}\t{text}\n" for label, text in part
        )
        (folder / f"{name}.tsv").write_text("".join(rows), encoding="utf-8")
    vocabulary = "".join(f"{token}\n" for token in VOCABULARY)
    (folder / "vocab.txt").write_text(vocabulary, encoding="utf-8")
    config = json.dumps(dataclasses.asdict(CONFIG), indent=2)
    (folder / "bert_config.json").write_text(f"{config}\n", encoding="utf-8")
