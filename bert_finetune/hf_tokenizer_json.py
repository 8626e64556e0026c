"""The file `tokenizer.json` of a Hugging Face folder.

It contains the vocabulary, and all options that decide which tokens a text becomes.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from bert_finetune.bert_config import read_json_object
from bert_finetune.hf_names import ONE_MODEL, VOCABULARY

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# Values that make this project's tokens. None stands for an absent key.
ONLY = {
    "normalizer": {
        "type": ("BertNormalizer",),
        "clean_text": (True,),
        "handle_chinese_chars": (True,),
        "lowercase": (True, False),  # used, too
    },
    "pre_tokenizer": {"type": ("BertPreTokenizer",)},
    "model": {
        "type": ("WordPiece", None),
        "unk_token": ("[UNK]",),
        "continuing_subword_prefix": ("##",),
        "max_input_chars_per_word": (100, 200),  # used, too
    },
}
USED = {"normalizer": {"strip_accents"}, "model": {"vocab"}}
# Defaults of calls but for their direction, and decoding: no token depends on them.
MEANINGLESS = {"version", "truncation", "padding", "decoder"}
# Only this project writes special tokens; in a text they are ordinary words. How they
# are found in a text means nothing, therefore.
ADDED_TOKEN = {
    *("id", "content", "special"),
    *("single_word", "lstrip", "rstrip", "normalized"),
}


class TokenizerFile(NamedTuple):
    """Content of a `tokenizer.json` that splits texts as this project does."""

    tokens: list[str]  # by their ids; "" where no text has the token
    is_lower_case: bool
    max_word_characters: int  # a longer word is [UNK]


def read_tokenizer_file(path: pathlib.Path, vocab_size: int) -> TokenizerFile | None:
    """Returns the content; None if there is no such file.

    Args:
        path: Path of a `tokenizer.json`.
        vocab_size: Rows of the model's embedding table.

    Raises:
        TypeError, ValueError: If an option is unknown, or would make other tokens. The
            message names it.
    """
    if not path.is_file():
        return None
    content = read_json_object(str(path))
    parts = {name: _part(path, content, name) for name in ONLY}
    names = {*ONLY, *MEANINGLESS, "added_tokens", "post_processor"}
    check_names(path, "", content, names)
    is_lower_case = parts["normalizer"]["lowercase"]
    accents = parts["normalizer"].get("strip_accents")
    check_option(path, "normalizer.strip_accents", accents, (is_lower_case, None))
    ids = _ids(path, content, parts["model"].get("vocab"), vocab_size)
    for name in ("padding", "truncation"):
        if isinstance(content.get(name), Mapping):
            side = content[name].get("direction")
            check_option(path, f"{name}.direction", side, ("Right", None))
    _check_post_processor(path, content.get("post_processor"), ids)
    tokens = [""] * (max(ids.values()) + 1)
    for token, number in ids.items():
        tokens[number] = matched(token)
    most = parts["model"]["max_input_chars_per_word"]
    return TokenizerFile(tokens, is_lower_case, most)


def matched(token: str) -> str:
    """Returns the token, or "" if no text has it: words contain no white space."""
    return "" if any(character.isspace() for character in token) else token


def is_allowed(value: Any, allowed: tuple) -> bool:
    """Returns whether an option has one of the values, and its type: 1 is not True."""
    return any(value == other and type(value) is type(other) for other in allowed)


def check_option(path: pathlib.Path, name: str, value: Any, allowed: tuple) -> None:
    """Raises ValueError unless the value of an option is one of those allowed."""
    if is_allowed(value, allowed):
        return
    raise ValueError(
        f"`{name}` in {path} must be {' or '.join(map(repr, allowed))}. Received: "
        f"{value!r}. Texts would be split otherwise than when the model was trained: "
        "use a BERT that splits words as google-research/bert does."
    )


def _part(path: pathlib.Path, content: Mapping[str, Any], name: str) -> Mapping:
    part = content.get(name)
    if not isinstance(part, Mapping):
        check_option(path, f"{name}.type", None, ONLY[name]["type"][:1])
    for option, allowed in ONLY[name].items():
        check_option(path, f"{name}.{option}", part.get(option), allowed)
    check_names(path, f"{name}.", part, ONLY[name].keys() | USED.get(name, set()))
    return part


def check_names(
    path: pathlib.Path, prefix: str, content: Mapping[str, Any], names: set[str]
) -> None:
    """Raises ValueError if the name of an option is unknown."""
    for name in sorted(content.keys() - names):
        raise ValueError(
            f"Each option in {path} must be a known one. Received: `{prefix}{name}`, "
            "which may split texts otherwise than when the model was trained. Use a "
            "BERT with the tokenizer of google-research/bert, or remove the option if "
            "tokens do not depend on it."
        )


def _ids(
    path: pathlib.Path, content: Mapping[str, Any], vocabulary: Any, vocab_size: int
) -> dict[str, int]:
    """Returns the id of each token, added special ones included."""
    ids = dict(vocabulary) if isinstance(vocabulary, Mapping) else {}
    added = content.get("added_tokens") or []
    for token in added if isinstance(added, list) else [added]:
        text = token.get("content") if isinstance(token, Mapping) else None
        if text not in SPECIAL:
            raise ValueError(must_be_special(f"`added_tokens` in {path}", token))
        check_names(path, "added_tokens.", token, ADDED_TOKEN)
        if ids.setdefault(text, token.get("id")) != token.get("id"):
            raise ValueError(
                f"{text} in {path} must have one id. Received: {ids[text]} in "
                f"`model.vocab` and {token.get('id')} in `added_tokens`. {ONE_MODEL}"
            )
    tokens = {}
    for token, number in ids.items():
        is_row = type(number) is int and 0 <= number < vocab_size
        if not is_row or tokens.setdefault(number, token) != token:
            raise ValueError(
                f"`model.vocab` in {path} must give each token an id of its own, below "
                f"`vocab_size` = {vocab_size}. Received: {number!r} for {token!r}. "
                f"{ONE_MODEL}"
            )
    if not isinstance(vocabulary, Mapping) or not vocabulary:
        raise ValueError(
            f"`model.vocab` in {path} must hold the ids of 1 to `vocab_size` = "
            f"{vocab_size} tokens. Received: none. {ONE_MODEL}"
        )
    return ids


def must_be_special(option: str, token: Any) -> str:
    """Returns the sentence about an added token that is not a special one of BERT."""
    return (
        f"{option} must hold {', '.join(SPECIAL)} alone. Received: {token!r}. Tokens "
        f"that are added to {VOCABULARY} have no place in a BERT checkpoint: use a BERT "
        "without them."
    )


def _check_post_processor(
    path: pathlib.Path, value: Any, ids: Mapping[str, int]
) -> None:
    """Raises ValueError unless it writes [CLS] a [SEP] and [CLS] a [SEP] b [SEP]."""
    cls, sep = (ids.get(token) for token in ("[CLS]", "[SEP]"))

    def special(token: str, segment: int) -> dict:
        return {"SpecialToken": {"id": token, "type_id": segment}}

    def text(name: str, segment: int) -> dict:
        return {"Sequence": {"id": name, "type_id": segment}}

    single = [special("[CLS]", 0), text("A", 0), special("[SEP]", 0)]
    bert = {"type": "BertProcessing", "sep": ["[SEP]", sep], "cls": ["[CLS]", cls]}
    template = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, text("B", 1), special("[SEP]", 1)],
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]}
            for token, number in (("[CLS]", cls), ("[SEP]", sep))
        },
    }
    # Without one, transformers writes no [CLS] and no [SEP], or its version decides.
    if value not in (bert, template):
        name = value.get("type") if isinstance(value, Mapping) else value
        raise ValueError(
            f"`post_processor` in {path} must write [CLS] a [SEP], and for a pair [CLS] a "
            f"[SEP] b [SEP] with the segments 0 and 1. Received: {name!r}, which writes "
            "other tokens. Use a BERT with the tokenizer of google-research/bert."
        )
