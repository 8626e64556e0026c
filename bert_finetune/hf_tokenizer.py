"""Options of the tokenizer in a Hugging Face folder."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from bert_finetune.bert_config import read_json_object
from bert_finetune.hf_names import TOKENIZER_CONFIG

USED = {"model_max_length", "max_len", "strip_accents"}

# Other values would change the tokens. None, like an absent key, is the first one.
ONLY = {
    "do_lower_case": (True, False),  # used, too
    "tokenize_chinese_chars": (True,),
    "do_basic_tokenize": (True,),
    "never_split": ([],),
    "word_tokenizer_type": ("basic",),
    "subword_tokenizer_type": ("wordpiece",),
    "wordpieces_prefix": ("##",),
    "unk_token": ("[UNK]",),
    "sep_token": ("[SEP]",),
    "pad_token": ("[PAD]",),
    "cls_token": ("[CLS]",),
    "mask_token": ("[MASK]",),
    "bos_token": ("[CLS]",),
    "eos_token": ("[SEP]",),
    "additional_special_tokens": ([],),
    "extra_special_tokens": ({}, []),
    "tokenizer_class": tuple(
        f"{name}Tokenizer{kind}"
        for name in ("Bert", "DistilBert", "Electra")
        for kind in ("", "Fast")
    ),
}

# Names, defaults of calls, decoding: no token of a text depends on them.
MEANINGLESS = {
    *("name_or_path", "_name_or_path", "special_tokens_map_file", "tokenizer_file"),
    *("vocab_file", "init_inputs", "model_input_names", "processor_class", "use_fast"),
    *("clean_up_tokenization_spaces", "clean_text", "from_slow", "backend", "is_local"),
    *("padding", "padding_side", "pad_to_multiple_of", "pad_token_type_id"),
    *("truncation", "truncation_side", "truncation_strategy", "stride"),
    *("max_length", "chat_template", "device_map", "transformers_version"),
}
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class TokenizerOptions(NamedTuple):
    """Options of a tokenizer that splits texts as this project does."""

    is_lower_case: bool | None  # None if the folder does not say
    model_max_length: int | None
    unknown: list[str]


def read_tokenizer_options(folder: pathlib.Path) -> TokenizerOptions:
    """Returns the options; refuses those that would make other tokens.

    Raises:
        TypeError, ValueError: If an option does not fit. The message names it.
    """
    path = folder / TOKENIZER_CONFIG
    content = read_json_object(str(path)) if path.is_file() else {}
    is_lower_case = content.get("do_lower_case")
    only = ONLY | {"strip_accents": (is_lower_case is not False,)}
    for name, allowed in only.items():
        value = _text_of(content.get(name))
        if value is not None and value not in allowed:
            raise ValueError(_other_tokens(path, name, allowed, value))
    added = content.get("added_tokens_decoder") or {}
    if not isinstance(added, Mapping):
        raise TypeError(_other_tokens(path, "added_tokens_decoder", ({},), added))
    for token in map(_text_of, added.values()):
        if token not in _SPECIAL:
            raise ValueError(
                f"`added_tokens_decoder` in {path} must hold {', '.join(_SPECIAL)} "
                f"alone. Received: {token!r}. Tokens that are added to vocab.txt have no "
                "place in a BERT checkpoint: use a BERT without them."
            )
    most = content.get("model_max_length", content.get("max_len"))
    is_number = isinstance(most, int) and not isinstance(most, bool) and most > 0
    names = USED | ONLY.keys() | MEANINGLESS | {"added_tokens_decoder"}
    return TokenizerOptions(
        is_lower_case, most if is_number else None, sorted(content.keys() - names)
    )


def _text_of(token: Any) -> Any:
    """Returns the text of a token, which may be a mapping with more about it."""
    return token.get("content", token) if isinstance(token, Mapping) else token


def _other_tokens(path: pathlib.Path, name: str, allowed: tuple, value: Any) -> str:
    return (
        f"`{name}` in {path} must be {' or '.join(map(repr, allowed))}. "
        f"Received: {value!r}. Texts would be split otherwise than when the model was "
        "trained: use a BERT that splits words as google-research/bert does."
    )
