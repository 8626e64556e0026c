"""Tokenizers of Hugging Face folders: the tokens of the library `tokenizers`."""

import copy
import json
import re

import pytest
from tokenizers import Tokenizer

from bert_finetune import hf_tokenizer_json
from bert_finetune.hf_import import _read_vocabulary
from bert_finetune.hf_tokenizer import read_tokenizer_options
from bert_finetune.hf_tokenizer_json import read_tokenizer_file
from bert_finetune.tokenization import WordPieceTokenizer
from tests.helpers.models.hugging_face_folder import tokenizer_json

pytestmark = pytest.mark.once

_WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "the", "un", "The", "é"),
    *("cafe", "café", "Café", "##s", "##able", "東", "京", "東京", "x", "y", "xy", "."),
    *("##,", "##x", "e", "##é"),
]
_TEXTS = [
    *(
        "the Cafés, unables. THE",
        "Café cafe caFÉ é É e\u0301",
        "東京 a東b",
        "x\x00y x\ty",
    ),
    *("x\u200by \ufffd \xa0 a\u2028b", "", "x-y unx" + "x" * 60, "[ CLS ] ##s"),
]


@pytest.fixture
def accept(tmp_path):
    """Reads a file, which must be taken; returns this project's tokenizer."""

    def run(content):
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(content))
        file = read_tokenizer_file(path, vocab_size=40)
        vocab_file = tmp_path / "made.txt"
        vocab_file.write_bytes(_read_vocabulary(tmp_path / "vocab.txt", None, file))
        return WordPieceTokenizer(vocab_file, file.is_lower_case)

    return run


def _content(**changes):
    return json.loads(tokenizer_json(_WORDS)) | changes


def _theirs(content):
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encodings(content, ours):
    """Returns both tokenizers' ids and segments of texts and pairs."""
    theirs = _theirs(content)
    pairs = [(text, None) for text in _TEXTS]
    pairs += zip(_TEXTS, _TEXTS[::-1], strict=True)
    reference = [
        theirs.encode(a) if b is None else theirs.encode(a, b) for a, b in pairs
    ]
    got = [ours.encode(a, b, 1000) for a, b in pairs]
    ours = [(e.input_ids, e.segment_ids) for e in got]
    return ours, [(e.ids, e.type_ids) for e in reference]


@pytest.mark.parametrize("lowercase", [True, False])
def test_tokens_are_those_of_the_file(accept, lowercase):
    content = json.loads(tokenizer_json(_WORDS, lowercase))
    ours = accept(content)
    assert ours.do_lower_case == lowercase
    assert ours.vocab_file.read_text(encoding="utf-8").split("\n")[:-1] == _WORDS
    got, expected = _encodings(content, ours)
    assert got == expected


def _leaves(value, path=()):
    if path[-1:] == ("vocab",) or not isinstance(value, dict | list):
        yield path
    else:
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _leaves(value[key], (*path, key))


def _other_values(value):
    if isinstance(value, bool):
        return [not value, None, 1, "true"]
    if isinstance(value, int):
        return [value + 1, 0, 200, None]
    return [None, False, True, f"{value}x", "", {}, []]


def _changed(content):
    """Yields copies of a file, each with one other, missing or additional option."""
    for *parents, name in _leaves(content):
        for kind in ("other", "missing", "new"):
            value = content
            for key in [*parents, name]:
                value = value[key]
            for other in _other_values(value) if kind == "other" else [None]:
                changed = copy.deepcopy(content)
                part = changed
                for key in parents:
                    part = part[key]
                if kind == "other":
                    part[name] = other
                elif kind == "missing":
                    del part[name]
                elif isinstance(part, dict):
                    part["new_option"] = 1
                yield ".".join(map(str, [*parents, name])), changed


def test_each_other_option_is_refused_or_makes_the_same_tokens(accept):
    taken = set()
    for name, changed in _changed(_content()):
        part = name.split(".")[0]
        try:
            ours = accept(changed)
        except (TypeError, ValueError) as error:
            assert re.search(f"added_tokens|new_option|{part}", str(error)), name
            continue
        taken.add(name)
        if part not in hf_tokenizer_json.MEANINGLESS and _is_read(changed):
            got, expected = _encodings(changed, ours)
            assert got == expected, (name, changed)
    meaningless = {"version", "truncation", "padding"}
    meaningless |= {f"decoder.{name}" for name in ("type", "prefix", "cleanup")}
    assert taken >= meaningless
    assert "normalizer.lowercase" in taken  # which is used


def _is_read(content):
    try:
        Tokenizer.from_str(json.dumps(content)).encode("a word of none")
    except Exception:  # noqa: BLE001 - of no class of its own
        return False
    return True


def _vocabulary(ids, **changes):
    content = _content(**changes)
    content["model"]["vocab"] = ids
    return content


def test_ids_without_a_word_are_empty_lines(accept):
    ids = {token: number for number, token in enumerate(_WORDS)}
    del ids["cafe"]  # a hole
    ids["\u2028"] = ids.pop("un")
    ids["x y"] = ids.pop("x")
    content = _vocabulary(ids)
    ours = accept(content)
    lines = ours.vocab_file.read_text(encoding="utf-8").split("\n")
    assert {lines[_WORDS.index(word)] for word in ("cafe", "un", "x")} == {""}
    got, expected = _encodings(content, ours)
    assert got == expected


def test_special_tokens_may_be_added_ones_alone(accept):
    ids = {token: number for number, token in enumerate(_WORDS)}
    content = _vocabulary({t: n for t, n in ids.items() if not t.startswith("[")})
    ours = accept(content)
    assert ours.encode("a", None, 9).input_ids == [
        ids[t] for t in ("[CLS]", "a", "[SEP]")
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            _content(model={"type": "BPE"}),
            "`model.type` in .* 'WordPiece' or None. Rec",
        ),
        (
            _vocabulary({}),
            "must hold the ids of 1 to .* Received: none",
        ),
        (_vocabulary({"a": 40}), "below `vocab_size` = 40. Received: 40 for 'a'"),
        (_vocabulary({"a": 9, "b": 9}), "an id of its own, .* Received: 9 for 'b'"),
        (_vocabulary({"a": True}), "Received: True for 'a'"),
        (
            _vocabulary({"[PAD]": 9}),
            r"\[PAD\] in .* Received: 9 in `model.vocab` and 0",
        ),
        (_content(normalizer=None), "`normalizer.type` in .* be 'BertNormalizer'. Rec"),
        (
            _content(normalizer={"type": "Sequence", "normalizers": []}),
            "`normalizer.type` in .* must be 'BertNormalizer'. Received: 'Sequence'",
        ),
        (_content(added_tokens=["[PAD]"]), r"must hold .* alone. Received: '\[PAD\]'"),
        (
            _content(post_processor={"type": "RobertaProcessing"}),
            "`post_processor` in .* Received: 'RobertaProcessing', which",
        ),
        (_content(post_processor=None), "`post_processor` in .* Received: None, which"),
    ],
)
def test_file_that_makes_other_tokens_is_refused(accept, content, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        accept(content)


def test_vocabulary_beside_the_file_has_its_tokens(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(_WORDS))
    file = read_tokenizer_file(tmp_path / "tokenizer.json", 40)
    config = type("Config", (), {"vocab_size": 40})
    path = tmp_path / "vocab.txt"
    for end in ("\n", "\r\n"):
        path.write_bytes(end.join([*_WORDS, "", ""]).encode())
        assert _read_vocabulary(path, config, file) == path.read_bytes()
    path.write_text("\n".join([*_WORDS, "more"]))
    with pytest.raises(ValueError, match="'more' in line 28, and '' with the id 27"):
        _read_vocabulary(path, config, file)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        (
            "tokenizer_config",
            {"do_lower_case": False},
            "be `normalizer.lowercase` in to",
        ),
        ("tokenizer_config", {"strip_accents": False}, "`strip_accents` in .* be True"),
        ("sentence_bert_config", {"do_lower_case": True}, "`do_lower_case` in .*False"),
        ("special_tokens_map", {"unk_token": "<unk>"}, r"must be '\[UNK\]'. Rec"),
        ("added_tokens", {"[NEW]": 30}, r"added_tokens.json must hold .*: '\[NEW\]'"),
        ("added_tokens", {"[CLS]": 5}, r"give \[CLS\] its id .*, 2. Received: 5"),
    ],
)
def test_files_beside_it_may_not_contradict_it(tmp_path, name, options, sentence):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(_WORDS))
    file = read_tokenizer_file(tmp_path / "tokenizer.json", 40)
    (tmp_path / f"{name}.json").write_text(json.dumps(options))
    with pytest.raises(ValueError, match=sentence):
        read_tokenizer_options(tmp_path, _WORDS, file)


@pytest.mark.parametrize("part", ["padding", "truncation"])
def test_texts_are_padded_and_truncated_on_the_right(tmp_path, part):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(_content(**{part: {"direction": "Right"}})))
    read_tokenizer_file(path, 40)
    path.write_text(json.dumps(_content(**{part: {"direction": "Left"}})))
    with pytest.raises(ValueError, match=f"`{part}.direction` in .*Received: 'Left'"):
        read_tokenizer_file(path, 40)


def test_a_class_of_bert_lowers_the_case_unless_told_otherwise(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_json(_WORDS))
    file = read_tokenizer_file(path, 40)
    assert read_tokenizer_options(tmp_path, _WORDS, file).is_lower_case is True
    file = file._replace(is_lower_case=False)
    with pytest.raises(ValueError, match="json, False. Received: none, which a BERT"):
        read_tokenizer_options(tmp_path, _WORDS, file)


def test_classes_without_options_take_those_of_the_file(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(_WORDS, lowercase=False))
    file = read_tokenizer_file(tmp_path / "tokenizer.json", 40)
    for name in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        config = json.dumps({"tokenizer_class": name})
        (tmp_path / "tokenizer_config.json").write_text(config)
        assert read_tokenizer_options(tmp_path, _WORDS, file).is_lower_case is False
        with pytest.raises(ValueError, match="`tokenizer_class` in"):
            read_tokenizer_options(tmp_path, _WORDS)
