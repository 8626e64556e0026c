"""WordPiece: the ids of transformers' Python tokenizer."""

import collections
import random
import re
import types
import unicodedata

import pytest

from bert_finetune import tokenization
from bert_finetune.tasks import get_task, read_examples
from bert_finetune.tokenization import WordPieceTokenizer

pytestmark = pytest.mark.once

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_WORDS = [*"abcdefghijklmnopqrstuvwxyz", "##s", "the", "book", "##ing", ".", "un", "["]

# Blocks whose characters have kept their categories since the library's Unicode 8.
_BLOCKS = {
    "ASCII, control characters included": (0x00, 0x7F),
    "Latin-1": (0x80, 0xFF),
    "Latin Extended A and B": (0x100, 0x24F),
    "modifiers and combining marks": (0x2B0, 0x36F),
    "Greek and Cyrillic": (0x370, 0x52F),
    "Hebrew and Arabic": (0x591, 0x600),
    "Devanagari": (0x904, 0x97F),
    "Hangul Jamo": (0x1100, 0x11FF),
    "Latin Extended Additional": (0x1E00, 0x1EFF),
    "Greek Extended": (0x1F00, 0x1FFF),
    "punctuation, formats and spaces": (0x2000, 0x2064),
    "letters, arrows, mathematics, boxes, dingbats": (0x2100, 0x27BF),
    "CJK punctuation and kana": (0x3000, 0x30FF),
    "CJK ideographs": (0x4E00, 0x4EFF),
    "Hangul syllables": (0xAC00, 0xADFF),
    "CJK compatibility and presentation forms": (0xF900, 0xFAD9),
    "fullwidth forms and specials": (0xFF01, 0xFFFD),
    "emoji": (0x1F300, 0x1F5FF),
    "CJK extension B": (0x20000, 0x200FF),
}


def _write_vocabulary(folder, words):
    path = folder / "vocab.txt"
    path.write_text("\n".join([*_SPECIAL, *words]) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(tmp_path):
    return WordPieceTokenizer(_write_vocabulary(tmp_path, _WORDS), do_lower_case=True)


def _tokens(tokenizer, ids):
    lines = tokenizer.vocab_file.read_text(encoding="utf-8").split("\n")
    return [lines[i] for i in ids]


def _learned_words(texts):
    """Returns frequent words and word ends of texts, and all their characters."""
    words = collections.Counter(w for text in texts for w in re.findall(r"\w+", text))
    ends = collections.Counter(f"##{word[-3:]}" for word in words)
    characters = sorted({c for text in texts for c in text if c.strip()})
    learned = [word for word, _ in words.most_common(1500)]
    learned += [end for end, _ in ends.most_common(300)]
    return [*dict.fromkeys([*characters, *(f"##{c}" for c in characters), *learned])]


def _assert_ids_of_transformers(vocab_file, do_lower_case, texts):
    transformers = pytest.importorskip(
        "transformers",
        reason="Hugging Face's tokenizer to compare with is not installed",
    )
    # The Python tokenizer, which restates google-research/bert's tokenization.py.
    reference = transformers.BertTokenizer(str(vocab_file), do_lower_case=do_lower_case)
    reference.wordpiece_tokenizer.max_input_chars_per_word = 200
    tokenizer = WordPieceTokenizer(vocab_file, do_lower_case)
    encodings = tokenizer.encode_batch(texts, None, 10_000)
    assert len(encodings) == len(texts)
    different = [
        (text, _tokens(tokenizer, encoding.input_ids), reference.tokenize(text))
        for text, encoding in zip(texts, encodings, strict=True)
        if encoding.input_ids != reference.encode(text)
    ]
    assert not different, f"{len(different)} of {len(texts)}: {different[:5]}"


@pytest.mark.parametrize("do_lower_case", [True, False])
def test_ids_of_real_cola_are_those_of_transformers(real_data, tmp_path, do_lower_case):
    cola, texts = get_task("cola"), []
    for name, labelled in (("train.tsv", True), ("dev.tsv", True), ("test.tsv", False)):
        examples = read_examples(cola, real_data / "cola", name, labelled=labelled)
        texts += [example.text_a for example in examples]
    learned = _learned_words([t.lower() if do_lower_case else t for t in texts])
    vocab_file = _write_vocabulary(tmp_path, learned)
    # Every fourth text, because transformers is slow.
    _assert_ids_of_transformers(vocab_file, do_lower_case, texts[::4])


def _generated_texts(first, last, do_lower_case):
    """Returns texts with a block's assigned characters in, after and beside words."""
    generator = random.Random(first)
    characters = [
        character
        for character in map(chr, range(first, last + 1))
        # transformers drops unassigned characters, google-research/bert does not.
        if unicodedata.category(character) not in ("Cn", "Co")
    ]
    texts = [f"ab{c}cd Xy{c} {c} {c}{c}Z." for c in characters]
    pool = [*characters, *"abC .,"]
    texts += ["".join(generator.choices(pool, k=40)) for _ in range(20)]
    if do_lower_case:
        return texts
    # transformers composes characters first, google-research/bert does not.
    return [text for text in texts if unicodedata.is_normalized("NFC", text)]


@pytest.mark.parametrize("do_lower_case", [True, False])
@pytest.mark.parametrize("block", _BLOCKS)
def test_ids_of_made_up_text_are_those_of_transformers(tmp_path, block, do_lower_case):
    texts = _generated_texts(*_BLOCKS[block], do_lower_case)
    assert texts
    variants = [*texts]
    if do_lower_case:
        variants += [unicodedata.normalize("NFD", text.lower()) for text in texts]
    learned = [w for w in _learned_words(variants) if not {"\n", "\r"} & {*w}]
    vocab_file = _write_vocabulary(tmp_path, learned)
    _assert_ids_of_transformers(vocab_file, do_lower_case, texts)


def test_uncased_lower_cases_and_strips_accents(tmp_path):
    path = _write_vocabulary(tmp_path, ["cafe", "ecole", "École"])
    uncased = WordPieceTokenizer(path, do_lower_case=True)
    cased = WordPieceTokenizer(path, do_lower_case=False)
    text = "École CAFÉ"
    ids = uncased.encode(text, None, 9).input_ids
    assert _tokens(uncased, ids) == ["[CLS]", "ecole", "cafe", "[SEP]"]
    ids = cased.encode(text, None, 9).input_ids
    assert _tokens(cased, ids) == ["[CLS]", "École", "[UNK]", "[SEP]"]


@pytest.mark.parametrize(
    ("text_a", "text_b", "max_seq_length", "expected", "segment_ids"),
    [
        ("a [SEP] b", None, 20, "[CLS] a [ [UNK] [UNK] b [SEP]", [0] * 7),
        ("the book.", "un", 20, "[CLS] the book . [SEP] un [SEP]", [0] * 5 + [1] * 2),
        ("a b c d e", None, 5, "[CLS] a b c [SEP]", [0] * 5),
        ("", None, 8, "[CLS] [SEP]", [0] * 2),
    ],
    ids=["special tokens in a text are text", "pair", "cut at its end", "empty"],
)
def test_text_becomes_tokens_and_segments(
    tokenizer, text_a, text_b, max_seq_length, expected, segment_ids
):
    encoding = tokenizer.encode(text_a, text_b, max_seq_length)
    assert _tokens(tokenizer, encoding.input_ids) == expected.split()
    assert encoding.segment_ids == segment_ids


def test_words_beyond_200_characters_are_unknown(tmp_path):
    tokenizer = WordPieceTokenizer(_write_vocabulary(tmp_path, ["a", "##a"]), True)
    at_limit = tokenizer.encode("a" * 200, None, 300).input_ids
    beyond = tokenizer.encode("a" * 201, None, 300).input_ids
    assert len(at_limit) == 202
    assert _tokens(tokenizer, beyond) == ["[CLS]", "[UNK]", "[SEP]"]


def test_pair_is_cut_from_the_longer_text_token_by_token(tokenizer):
    for num_a in range(1, 8):
        for num_b in range(1, 8):
            for max_seq_length in range(5, 18):
                a, b = [*"abcdefg"[:num_a]], [*"tuvwxyz"[:num_b]]
                encoding = tokenizer.encode(" ".join(a), " ".join(b), max_seq_length)
                while len(a) + len(b) > max_seq_length - 3:
                    (a if len(a) > len(b) else b).pop()
                expected = ["[CLS]", *a, "[SEP]", *b, "[SEP]"]
                assert _tokens(tokenizer, encoding.input_ids) == expected
                assert encoding.segment_ids == [0] * (len(a) + 2) + [1] * (len(b) + 1)


def test_batch_beyond_one_chunk_equals_single_encodings(tokenizer):
    texts_a = [f"the {'book ' * (i % 5)}" for i in range(4099)]
    texts_b = [f"un {'s ' * (i % 7)}" for i in range(4099)]
    encodings = tokenizer.encode_batch(texts_a, texts_b, 9)
    assert len(encodings) == 4099
    for i in (0, 1, 17, 4095, 4096, 4098):
        assert encodings[i] == tokenizer.encode(texts_a[i], texts_b[i], 9)


@pytest.mark.parametrize(("text_b", "shortest"), [(None, 3), ("a", 5)])
def test_max_seq_length_leaves_each_sentence_a_token(tokenizer, text_b, shortest):
    assert len(tokenizer.encode("a b", text_b, shortest).input_ids) == shortest
    sentence = f"`--max_seq_length` must be >= {shortest} for .*: {shortest - 1}. Use"
    with pytest.raises(ValueError, match=sentence):
        tokenizer.encode("a b", text_b, shortest - 1)


def test_max_seq_length_beyond_the_position_table_is_refused():
    options = {"is_pair": True, "max_position_embeddings": 512}
    tokenization.check_max_seq_length(512, **options)
    sentence = "must be at most `max_position_embeddings` in .*, 512. Received: 513."
    with pytest.raises(ValueError, match=sentence):
        tokenization.check_max_seq_length(513, **options)


_PARTS = r"must hold \[PAD\], \[UNK\], \[CLS\], \[SEP\], one .*\. Received: no "


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "`--vocab_file` must be an existing file. Received: .*vocab.txt. Use"),
        (b"", r"Received: .*vocab\.txt, empty\. Use"),
        (b"\n\n", r"Received: .*vocab\.txt, empty\. Use"),
        (b"[PAD]\n\xff\xfe", r"`--vocab_file` must be UTF-8 text\. Rec"),
        ("\n".join([*_SPECIAL, "x", "a", "x"]).encode(), "'x' in lines 6 and 8 of "),
        *(
            ("\n".join(t for t in _SPECIAL if t != one).encode(), f"{_PARTS}.{one[1:]}")
            for one in _SPECIAL[:4]
        ),
    ],
)
def test_unfit_vocabulary_is_refused(tmp_path, content, sentence):
    path = tmp_path / "vocab.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        WordPieceTokenizer(path, do_lower_case=True)


def test_ids_are_line_numbers_of_any_line_end(tmp_path):
    path = tmp_path / "vocab.txt"
    # U+2028 is a token of multilingual vocabularies, not the end of a line.
    path.write_bytes("\r\n".join([*_SPECIAL, "\u2028", "", "a", "b", ""]).encode())
    tokenizer = WordPieceTokenizer(path, do_lower_case=True)
    assert tokenizer.num_entries == 9
    assert tokenizer.pad_id == 0
    assert tokenizer.encode("b a", None, 9).input_ids == [2, 8, 7, 3]


def _check_sizes(tokens: int, rows: int) -> None:
    tokenizer = types.SimpleNamespace(num_entries=tokens, vocab_file="vocab.txt")
    tokenization.check_vocabulary(tokenizer, rows)


@pytest.mark.parametrize(
    ("tokens", "rows", "warning"),
    [
        (30_522, 30_522, None),
        (30_522, 30_528, None),  # rounded up to a multiple of 8
        (17_964, 18_000, None),
        (30_522, 30_524, "the last 2 are never used"),
        (
            31_102,
            32_102,
            "31,102 tokens, and the model 32,102 embeddings: the last 1,0",
        ),
        (30_521, 50_000, "vocab.txt has 30,521 tokens, .*: the last 19,479 are never"),
    ],
)
def test_a_vocabulary_that_may_fit_the_table_is_taken(caplog, tokens, rows, warning):
    _check_sizes(tokens, rows)
    assert re.search(warning, caplog.text) if warning else not caplog.text


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        (164_931, 119_547),
        (30_523, 30_522),
        (28_996, 30_522),  # cased for uncased
        (30_521, 30_522),  # cut off
        (28_996, 30_528),
        (21_128, 28_996),
    ],
)
def test_vocabulary_that_does_not_fit_the_table_names_both_sizes(tokens, rows):
    sizes = f"{tokens} tokens in vocab.txt and vocab_size {rows}"
    with pytest.raises(ValueError, match=f"must fit `vocab_size` in .*: {sizes}. Use"):
        _check_sizes(tokens, rows)


@pytest.mark.parametrize(
    ("folder", "is_uncased"),
    [
        ("uncased_L-12_H-768_A-12", True),
        ("cased_L-12_H-768_A-12", False),
        ("wwm_uncased_L-24_H-1024_A-16", True),
        ("wwm_cased_L-24_H-1024_A-16", False),
        ("multi_cased_L-12_H-768_A-12", False),
        ("multilingual_L-12_H-768_A-12", True),
        ("chinese_L-12_H-768_A-12", True),
        ("bert-base-multilingual-cased", False),
        ("BERT-Base-Uncased", True),
    ],
)
def test_case_that_does_not_match_the_checkpoints_name_is_refused(folder, is_uncased):
    checkpoint = f"/models/{folder}/bert_model.ckpt"
    tokenization.check_case_matches_checkpoint(is_uncased, checkpoint)
    said = "uncased" if is_uncased else "cased"
    sentence = f"{checkpoint}, whose name says {said}. Use --do_lower_case={is_uncased}"
    with pytest.raises(ValueError, match=sentence):
        tokenization.check_case_matches_checkpoint(not is_uncased, checkpoint)


@pytest.mark.parametrize(
    "checkpoint",
    [None, "", "bert_model.ckpt", "all-MiniLM-L6-v2/bert_model.ckpt", "encased/x.ckpt"],
)
def test_names_that_say_nothing_about_case_are_not_judged(checkpoint):
    tokenization.check_case_matches_checkpoint(True, checkpoint)
    tokenization.check_case_matches_checkpoint(False, checkpoint)


def test_checksum_tells_vocabularies_apart(tmp_path):
    def checksum(*words):
        path = tmp_path / "vocab.txt"
        path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]))
        return WordPieceTokenizer(path, do_lower_case=True).checksum

    assert checksum("a", "b") == checksum("a", "b")
    assert len({checksum("a", "b"), checksum("b", "a"), checksum("ab")}) == 3
