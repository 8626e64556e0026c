"""Options of the tokenizer in a Hugging Face folder."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bert_finetune.bert_config import read_json_object
from bert_finetune.hf_names import (
    ADDED_TOKENS,
    CONFIG,
    ONE_MODEL,
    SENTENCES,
    SPECIAL_TOKENS,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from bert_finetune.hf_tokenizer_json import (
    SPECIAL,
    TokenizerFile,
    check_names,
    check_option,
    must_be_special,
)

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
        for name in ("Bert", "Electra")
        for kind in ("", "Fast")
    ),
    # In the order of their names: without the second part's segment 1, for example, a
    # pair of texts would be one text.
    "model_input_names": (["attention_mask", "input_ids", "token_type_ids"],),
    "padding_side": ("right",),
    "truncation_side": ("right",),
    "auto_map": ({},),  # code of the folder in place of BERT's
}

# Names, defaults of calls, decoding: no token of a text depends on them.
MEANINGLESS = {
    *("name_or_path", "_name_or_path", "special_tokens_map_file", "tokenizer_file"),
    *("vocab_file", "init_inputs", "processor_class", "use_fast"),
    "split_special_tokens",
    *("clean_up_tokenization_spaces", "clean_text", "from_slow", "backend"),
    *("is_local", "local_files_only"),  # of the call that loaded it
    *("padding", "pad_to_multiple_of", "pad_token_type_id"),
    *("truncation", "truncation_strategy", "stride", "verbose"),
    *("max_length", "chat_template", "device_map", "transformers_version"),
}
# Of a model without token types, whose results do not depend on an example's segments.
WITHOUT_TOKEN_TYPES = {
    "tokenizer_class": ("DistilBertTokenizer", "DistilBertTokenizerFast"),
    "model_input_names": (["attention_mask", "input_ids"],),
}
# Classes that read everything from tokenizer.json.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


class TokenizerOptions(NamedTuple):
    """Options of a tokenizer that splits texts as this project does."""

    is_lower_case: bool | None  # None if the folder does not say
    model_max_length: int | None


def read_tokenizer_options(
    folder: pathlib.Path,
    tokens: Sequence[str],
    file: TokenizerFile | None = None,
    has_token_types: bool = True,
) -> TokenizerOptions:
    """Returns the options; refuses unknown ones, and those that make other tokens.

    Args:
        folder: Folder of the model.
        tokens: The vocabulary, by ids.
        file: Content of its `tokenizer.json`, if there is one.
        has_token_types: Whether its results depend on the segments of an example.

    Raises:
        TypeError, ValueError: If an option does not fit. The message names it.
    """
    path = folder / TOKENIZER_CONFIG
    content = _read(path)
    is_lower_case = content.get("do_lower_case")
    its_class, in_config = content.get("tokenizer_class"), {}
    if its_class is None:
        its_class = _read(folder / CONFIG).get("tokenizer_class")
        in_config = {"tokenizer_class": its_class}
    only = dict(ONLY)
    if file is not None:
        received = repr(is_lower_case)
        if is_lower_case is None and its_class in _GENERIC:
            is_lower_case = file.is_lower_case
        elif is_lower_case is None:  # whatever tokenizer.json contains
            is_lower_case = True
            received = "none, which a BERT tokenizer takes for True"
        if is_lower_case != file.is_lower_case:
            raise ValueError(
                f"`do_lower_case` in {path} must be `normalizer.lowercase` in "
                f"{TOKENIZER}, {file.is_lower_case}. Received: {received}. Give both the "
                "value with which the model was trained."
            )
        only["tokenizer_class"] += _GENERIC
    if not has_token_types:
        only |= {name: only[name] + more for name, more in WITHOUT_TOKEN_TYPES.items()}
    only["strip_accents"] = (is_lower_case is not False,)
    sources = [
        (path, content),
        (folder / SPECIAL_TOKENS, _read(folder / SPECIAL_TOKENS)),
        (folder / CONFIG, in_config),
    ]
    for source, options in sources:
        for name, allowed in only.items():
            value = _text_of(options.get(name))
            if name == "model_input_names" and isinstance(value, list):
                value = sorted(value, key=str)
            if value is not None:
                check_option(source, name, value, allowed)
    decoder = content.get("added_tokens_decoder") or {}
    if not isinstance(decoder, Mapping):
        check_option(path, "added_tokens_decoder", decoder, ({},))
    _check_added(
        f"`added_tokens_decoder` in {path}",
        [(_text_of(token), number) for number, token in decoder.items()],
        tokens,
    )
    added = _read(folder / ADDED_TOKENS).items()
    _check_added(str(folder / ADDED_TOKENS), added, tokens)
    sentences = _read(folder / SENTENCES)
    lowers = sentences.get("do_lower_case")  # before the tokenizer
    check_option(folder / SENTENCES, "do_lower_case", lowers, (False, None))
    lengths = [
        content.get("model_max_length", content.get("max_len")),
        sentences.get("max_seq_length"),
    ]
    lengths = [most for most in lengths if type(most) is int and most > 0]
    names = USED | ONLY.keys() | MEANINGLESS | {"added_tokens_decoder"}
    for source, options in sources:
        options = {name: value for name, value in options.items() if value is not None}
        check_names(source, "", options, names)
    return TokenizerOptions(is_lower_case, min(lengths, default=None))


def _check_added(
    option: str, added: Iterable[tuple[Any, Any]], tokens: Sequence[str]
) -> None:
    """Raises ValueError unless tokens are special ones, with the vocabulary's ids."""
    ids = {token: number for number, token in enumerate(tokens)}
    for token, number in added:
        if token not in SPECIAL:
            raise ValueError(must_be_special(option, token))
        if str(number) != str(ids.get(token, number)):
            raise ValueError(
                f"{option} must give {token} its id in the vocabulary, {ids[token]}. "
                f"Received: {number}. {ONE_MODEL}"
            )


def _read(path: pathlib.Path) -> dict[str, Any]:
    return read_json_object(str(path)) if path.is_file() else {}


def _text_of(token: Any) -> Any:
    """Returns the text of a token, which may be a mapping with more about it."""
    return token.get("content", token) if isinstance(token, Mapping) else token
