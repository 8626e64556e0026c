"""Corpus of the demo: minimal pairs of acceptable and unacceptable simple English.

An unacceptable sentence differs from an acceptable one in one point: a verb or
determiner of the wrong number, a reflexive that does not fit its subject, words in the
wrong order, a superfluous or a missing object. Each word is as frequent in acceptable
sentences as in unacceptable ones, or nearly: the words alone do not reveal the label,
only their positions do.
"""

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

_SHARE_OF_PAIRS = 2 / 3  # share of acceptable sentences with an unacceptable twin

# Every pair is (singular, plural). No word that "a" may precede starts with a vowel.
_MARKED_DETERMINERS = (["a", "this", "every"], ["many", "several", "these"])
_DETERMINERS = (["the", *_MARKED_DETERMINERS[0]], ["the", *_MARKED_DETERMINERS[1]])
_ADJECTIVES = ["clever", "happy", "quiet", "tall", "young"]
_GENDERS = {
    "himself": ["boy", "brother", "father", "king"],
    "herself": ["girl", "mother", "queen", "sister"],
}
_REFLEXIVES = [*_GENDERS, "themselves"]
# In the vocabulary these nouns are two pieces: farm ##er, farm ##ers.
_STEMS = ["farm", "garden", "paint", "sing", "teach"]
_ER_NOUNS = [f"{stem}er" for stem in _STEMS]
_NOUNS = [
    *["bird", "cat", "doctor", "dog", "horse", "lawyer", "pilot"],
    *_ER_NOUNS,
    *[noun for nouns in _GENDERS.values() for noun in nouns],
]
_WITHOUT_OBJECT = ["arrive", "cough", "laugh", "shiver", "sleep", "smile", "yawn"]
_WITH_OBJECT = ["admire", "blame", "describe", "mention", "praise", "thank"]
_PREPOSITIONS = ["behind", "beside", "near"]

_ADVERB = "again"

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

Words = list[str]


class Sentence(NamedTuple):
    """One line of the corpus.

    Attributes:
        source: Phenomenon that the sentence tests, one of `PHENOMENA`.
        is_acceptable: Label of the sentence.
        text: The sentence, with its full stop.
    """

    source: str
    is_acceptable: bool
    text: str


class Corpus(NamedTuple):
    """The demo's sentences; none occurs twice, and a pair is never split over parts.

    Attributes:
        train: Sentences to train on.
        dev: Sentences to evaluate on.
        test: Sentences to predict.
        unlabelled: Acceptable texts to pre-train on.
    """

    train: list[Sentence]
    dev: list[Sentence]
    test: list[Sentence]
    unlabelled: list[str]


def make_corpus(
    seed: int, num_train: int, num_dev: int, num_test: int, num_unlabelled: int
) -> Corpus:
    """Returns sentences that depend only on the arguments.

    Args:
        seed: Random seed.
        num_train: Sentences to train on.
        num_dev: Sentences to evaluate on.
        num_test: Sentences to predict.
        num_unlabelled: Texts to pre-train on.
    """
    random = Random(seed)
    pairs = _pairs(random)
    parts = [_part(random, pairs, size) for size in (num_train, num_dev, num_test)]
    return Corpus(*parts, [next(pairs)[0].text for _ in range(num_unlabelled)])


def _pairs(random: Random) -> Iterator[tuple[Sentence, Sentence]]:
    """Yields pairs of sentences that no earlier pair contains."""
    grammar = Grammar(random)
    seen = set()
    while True:
        source = _choice(random, list(PHENOMENA))
        good, bad = (_text(words) for words in PHENOMENA[source](grammar))
        if seen.isdisjoint((good, bad)):
            seen |= {good, bad}
            yield Sentence(source, True, good), Sentence(source, False, bad)


def _part(random: Random, pairs: Iterator, size: int) -> list[Sentence]:
    sentences = []
    while len(sentences) < size:
        good, bad = next(pairs)
        sentences.append(good)
        if random.random() < _SHARE_OF_PAIRS and len(sentences) < size:
            sentences.append(bad)
    # Not shuffle(): Python guarantees only that random() never changes.
    return sorted(sentences, key=lambda _: random.random())


def vocabulary() -> list[str]:
    """Returns the tokens of vocab.txt: special ones, whole words and pieces."""
    whole_nouns = [noun for noun in _NOUNS if noun not in _ER_NOUNS]
    both_numbers = [*whole_nouns, *_WITH_OBJECT, *_WITHOUT_OBJECT]
    words = {
        *["the", "that", _ADVERB, *_STEMS, *_ADJECTIVES, *_PREPOSITIONS, *_REFLEXIVES],
        *[word for number in _DETERMINERS for word in number],
        *[word + ending for word in both_numbers for ending in ("", "s")],
    }
    return [*SPECIAL_TOKENS, ".", *sorted(words), "##er", "##ers"]


def _choice(random: Random, options: list):
    return options[int(random.random() * len(options))]


class Grammar:
    """Makes minimal pairs: (acceptable words, unacceptable words).

    Args:
        random: Source of the choices; only its `random()` is called, whose numbers are
            the same in every Python version.
    """

    def __init__(self, random: Random):
        self._random = random

    def agreement(self) -> tuple[Words, Words]:
        """Returns a pair such as: The dog near the cats sleeps / * sleep."""
        number, subject = self._subject(modified=0.5)
        verbs, rest = self._predicate()
        return subject + [verbs[number]] + rest, subject + [verbs[1 - number]] + rest

    def determiner(self) -> tuple[Words, Words]:
        """Returns a pair such as: This dog / * These dog sleeps."""
        number = self._number()
        good = self._noun_phrase(number, _MARKED_DETERMINERS)
        bad = [self._choice(_MARKED_DETERMINERS[1 - number]), *good[1:]]
        if self._happens(0.5):
            verbs, rest = self._predicate()
            after = [verbs[number], *rest]
            return good + after, bad + after
        subject_number, subject = self._subject(modified=0.2)
        before = [*subject, self._verb(_WITH_OBJECT)[subject_number]]
        place = self._place()
        return before + good + place, before + bad + place

    def order(self) -> tuple[Words, Words]:
        """Returns a pair such as: The boy thanks the girl / * The boy the girl thanks.

        Other unacceptable orders: * Boy the thanks ...
        """
        number, subject = self._subject(modified=0.0)
        verb = [self._verb(_WITH_OBJECT)[number]]
        obj = self._noun_phrase(self._number())
        place = self._place()
        bad = self._choice(
            [
                subject + obj + verb,
                _last_two_swapped(subject) + verb + obj,
                subject + verb + _last_two_swapped(obj),
            ]
        )
        return subject + verb + obj + place, bad + place

    def reflexive(self) -> tuple[Words, Words]:
        """Returns a pair such as: The queen praises herself / * himself."""
        number = self._number()
        singular = self._choice(list(_GENDERS))
        fitting = "themselves" if number else singular
        other = self._choice([word for word in _REFLEXIVES if word != fitting])
        subject = self._noun_phrase(number, nouns=_GENDERS[singular])
        subject += self._modifier(number, 0.4)
        before = [*subject, self._verb(_WITH_OBJECT)[number]]
        place = self._place()
        return [*before, fitting, *place], [*before, other, *place]

    def object(self) -> tuple[Words, Words]:
        """Returns a pair such as: The dog sleeps / * The dog blames.

        Or with an object: The dog blames the cat / * The dog sleeps the cat.
        """
        number, subject = self._subject(modified=0.4)
        alone = [self._verb(_WITHOUT_OBJECT)[number]]
        with_object = [self._verb(_WITH_OBJECT)[number]]
        rest = self._noun_phrase(self._number()) if self._happens(0.5) else []
        good, bad = (with_object, alone) if rest else (alone, with_object)
        rest += self._place()
        return subject + good + rest, subject + bad + rest

    def _happens(self, probability: float) -> bool:
        return self._random.random() < probability

    def _choice(self, options: list):
        return _choice(self._random, options)

    def _number(self) -> int:
        return int(self._happens(0.5))

    def _noun_phrase(
        self, number: int, determiners=_DETERMINERS, nouns: list[str] = _NOUNS
    ) -> Words:
        adjective = [self._choice(_ADJECTIVES)] if self._happens(0.25) else []
        noun = self._choice(nouns) + ("s" if number else "")
        return [self._choice(determiners[number]), *adjective, noun]

    def _subject(self, modified: float) -> tuple[int, Words]:
        number = self._number()
        return number, self._noun_phrase(number) + self._modifier(number, modified)

    def _modifier(self, number: int, probability: float) -> Words:
        """Returns the words between subject and verb, mostly of the other number."""
        if not self._happens(probability):
            return []
        other = 1 - number if self._happens(0.7) else number
        phrase = self._noun_phrase(other)
        if self._happens(0.6):
            return [self._choice(_PREPOSITIONS), *phrase]
        return ["that", *phrase, self._verb(_WITH_OBJECT)[other]]

    def _verb(self, verbs: list[str]) -> tuple[str, str]:
        verb = self._choice(verbs)
        return f"{verb}s", verb

    def _predicate(self) -> tuple[tuple[str, str], Words]:
        """Returns both forms of a verb, and the words that follow."""
        if self._happens(0.5):
            return self._verb(_WITHOUT_OBJECT), self._place()
        obj = self._noun_phrase(self._number())
        return self._verb(_WITH_OBJECT), obj + self._place()

    def _place(self) -> Words:
        if self._happens(0.35):
            return [self._choice(_PREPOSITIONS), *self._noun_phrase(self._number())]
        return [_ADVERB] if self._happens(0.4) else []


PHENOMENA: dict[str, Callable[[Grammar], tuple[Words, Words]]] = {
    "agree": Grammar.agreement,
    "det": Grammar.determiner,
    "order": Grammar.order,
    "refl": Grammar.reflexive,
    "obj": Grammar.object,
}


def _last_two_swapped(words: Words) -> Words:
    return [*words[:-2], words[-1], words[-2]]


def _text(words: Words) -> str:
    text = " ".join(words)
    return f"{text[0].upper()}{text[1:]}."
