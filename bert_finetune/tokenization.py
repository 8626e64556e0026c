"""WordPiece tokenization as google-research/bert does it, through `tokenizers`.

    [CLS] text_a [SEP]                   segment ids 0
    [CLS] text_a [SEP] text_b [SEP]      segment ids 0 up to the first [SEP], then 1

Uncased text is lower-cased and its accents are stripped; cased text keeps both. In
either, control characters are removed, and punctuation marks and CJK characters are
tokens of their own. The text `[SEP]` is three ordinary tokens: only this module writes
special tokens.
"""

import hashlib
import logging
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
MAX_WORD_CHARACTERS = 200  # a longer word is [UNK], as in google-research/bert
# Some converters round the table's rows up to a multiple of 8, 16, ... or 128.
_ROUNDED_TO, _MAX_SPARE_ROWS = 8, 127
# Rows of google-research/bert's tables, each of which has a token: English uncased and
# cased, Chinese, multilingual uncased and cased.
_FULL_TABLES = (30_522, 28_996, 21_128, 105_879, 119_547)

_logger = logging.getLogger("tensorflow.bert_finetune")


class Encoding(NamedTuple):
    """One tokenized example, not padded.

    Attributes:
        input_ids: Positions in the vocabulary, [CLS] and [SEP] included.
        segment_ids: 0 or 1 for each of them.
        is_truncated: Whether the example has lost tokens.
    """

    input_ids: list[int]
    segment_ids: list[int]
    is_truncated: bool


class WordPieceTokenizer:
    """Turns text into ids of one vocabulary.

    Attributes:
        vocab_file: File of the vocabulary.
        do_lower_case: Whether text is lower-cased.
        num_entries: Lines of the vocabulary; every id is smaller.
        pad_id: The id of [PAD].
        checksum: SHA-256 of the tokens and their ids.
    """

    def __init__(self, vocab_file: str | pathlib.Path, do_lower_case: bool):
        """Loads a vocabulary.

        Args:
            vocab_file: UTF-8 text, one token a line; the line's number is its id.
            do_lower_case: Whether the vocabulary is an uncased one.

        Raises:
            ValueError: If the file is missing, empty, not UTF-8, lacks one of
                [PAD], [UNK], [CLS], [SEP], or has a token twice.
        """
        self.vocab_file = pathlib.Path(vocab_file)
        self.do_lower_case = do_lower_case
        tokens = _read_vocabulary(self.vocab_file)
        ids = {token: number for number, token in enumerate(tokens)}
        _check_special_tokens(self.vocab_file, ids)
        _check_each_token_once(self.vocab_file, tokens)
        self.num_entries = len(tokens)
        text = "\n".join(tokens)
        self.checksum = hashlib.sha256(text.encode()).hexdigest()
        self.pad_id = ids["[PAD]"]
        self._cls_id = ids["[CLS]"]
        self._sep_id = ids["[SEP]"]
        self._tokenizer = Tokenizer(
            models.WordPiece(
                ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS
            )
        )
        self._tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=True,
            strip_accents=do_lower_case,
            lowercase=do_lower_case,
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, text_a: str, text_b: str | None, max_seq_length: int) -> Encoding:
        """Encodes one example; see `encode_batch`."""
        texts_b = None if text_b is None else [text_b]
        return self.encode_batch([text_a], texts_b, max_seq_length)[0]

    def encode_batch(
        self, texts_a: Sequence[str], texts_b: Sequence[str] | None, max_seq_length: int
    ) -> list[Encoding]:
        """Encodes examples, on all cores.

        An example that is too long loses its last tokens; in a pair, the longer text
        loses tokens until both are equally long, then both do in turn.

        Args:
            texts_a: The first or only sentences.
            texts_b: As many second sentences; None for single-sentence tasks.
            max_seq_length: Most ids of an example, special tokens included.

        Raises:
            ValueError: If `max_seq_length` leaves no token for a sentence.
        """
        check_max_seq_length(max_seq_length, is_pair=texts_b is not None)
        if texts_b is None:
            limit = max_seq_length - 2
            return [self._single(ids, limit) for ids in self._ids(texts_a)]
        pairs = zip(self._ids(texts_a), self._ids(texts_b), strict=True)
        return [self._pair(a, b, max_seq_length - 3) for a, b in pairs]

    def save(self, path: pathlib.Path) -> None:
        """Writes Hugging Face's `tokenizer.json`, which tokenizes alike.

        There, the text `[SEP]` is the special token.
        """
        saved = Tokenizer.from_str(self._tokenizer.to_str())
        saved.decoder = decoders.WordPiece()
        saved.post_processor = processors.BertProcessing(
            ("[SEP]", self._sep_id), ("[CLS]", self._cls_id)
        )
        saved.add_special_tokens(list(_SPECIAL_TOKENS))
        saved.save(str(path))

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _single(self, ids: list[int], limit: int) -> Encoding:
        input_ids = [self._cls_id, *ids[:limit], self._sep_id]
        return Encoding(input_ids, [0] * len(input_ids), len(ids) > limit)

    def _pair(self, a: list[int], b: list[int], limit: int) -> Encoding:
        is_truncated = len(a) + len(b) > limit
        if is_truncated:
            kept_b = max(min(len(b), limit // 2), limit - len(a))
            a, b = a[: limit - kept_b], b[:kept_b]
        input_ids = [self._cls_id, *a, self._sep_id, *b, self._sep_id]
        segment_ids = [0] * (len(a) + 2) + [1] * (len(b) + 1)
        return Encoding(input_ids, segment_ids, is_truncated)


def _read_vocabulary(path: pathlib.Path) -> list[str]:
    if not path.is_file():
        raise ValueError(
            f"`--vocab_file` must be an existing file. Received: {path}. "
            "Use the vocab.txt that came with the checkpoint."
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`--vocab_file` must be UTF-8 text. Received: {path} ({error}). "
            "Use the vocab.txt that came with the checkpoint."
        ) from error
    # Not splitlines(): some vocabularies hold U+2028 and the like as tokens.
    tokens = [line.strip() for line in text.split("\n")]
    while tokens and not tokens[-1]:
        tokens.pop()
    return tokens


def _check_special_tokens(path: pathlib.Path, ids: dict[str, int]) -> None:
    missing = [token for token in _SPECIAL_TOKENS if token not in ids]
    if missing:
        content = f"no {', '.join(missing)} in {path}" if ids else f"{path}, empty"
        raise ValueError(
            f"`--vocab_file` must hold {', '.join(_SPECIAL_TOKENS)}, one token a line. "
            f"Received: {content}. Use the vocab.txt that came with the checkpoint."
        )


def _check_each_token_once(path: pathlib.Path, tokens: list[str]) -> None:
    lines = {}
    for line, token in enumerate(tokens, 1):
        # Spaces of other scripts are tokens too; strip() has made them all empty.
        if lines.setdefault(token, line) != line and token:
            raise ValueError(
                "`--vocab_file` must hold each token once, since its line is its id. "
                f"Received: {token!r} in lines {lines[token]} and {line} of {path}. Use "
                "the vocab.txt that came with the checkpoint."
            )


def check_vocabulary(tokenizer: WordPieceTokenizer, vocab_size: int) -> None:
    """Raises ValueError unless the vocabulary fits a model of `vocab_size` embeddings.

    A token beyond the embedding table has no embedding. google-research/bert's tables
    have a token for each row, so a smaller vocabulary is another model's, or was cut off
    (28,996 cased entries for 30,522 embeddings would train and learn nothing). Other
    models have larger tables than vocabularies (IndoBERT: 50,000 and 30,521): they are
    taken, with a warning unless the table is only rounded up.

    Args:
        tokenizer: Tokenizer with the vocabulary.
        vocab_size: Rows of the embedding table, from the model's configuration.
    """
    spare_rows = vocab_size - tokenizer.num_entries
    is_rounded = vocab_size % _ROUNDED_TO == 0 and spare_rows <= _MAX_SPARE_ROWS
    needed = [n for n in _FULL_TABLES if 0 <= vocab_size - n <= _MAX_SPARE_ROWS]
    if spare_rows < 0 or tokenizer.num_entries < max(needed, default=0):
        raise ValueError(
            "`--vocab_file` must fit `vocab_size` in `--bert_config_file`. Received: "
            f"{tokenizer.num_entries} tokens in {tokenizer.vocab_file} and vocab_size "
            f"{vocab_size}. Use the two files that came with the checkpoint."
        )
    if spare_rows and not is_rounded:
        _logger.warning(
            "%s has %s tokens, and the model %s embeddings: the last %s are never used. "
            "That is right for some published models; check that the file is whole.",
            tokenizer.vocab_file,
            f"{tokenizer.num_entries:,}",
            f"{vocab_size:,}",
            f"{spare_rows:,}",
        )


def check_max_seq_length(
    max_seq_length: int, *, is_pair: bool, max_position_embeddings: int | None = None
) -> None:
    """Raises ValueError unless `max_seq_length` suits the examples and the model.

    Args:
        max_seq_length: Most ids of an example, special tokens included.
        is_pair: Whether examples are pairs of sentences.
        max_position_embeddings: Rows of the position table; None skips this check.
    """
    shortest = 5 if is_pair else 3
    if max_seq_length < shortest:
        content = "two sentences" if is_pair else "a sentence"
        raise ValueError(
            f"`--max_seq_length` must be >= {shortest} for {content} and the special "
            f"tokens. Received: {max_seq_length}. Use 128, google-research/bert's own."
        )
    if max_position_embeddings is not None and max_seq_length > max_position_embeddings:
        raise ValueError(
            "`--max_seq_length` must be at most `max_position_embeddings` in "
            f"`--bert_config_file`, {max_position_embeddings}. Received: "
            f"{max_seq_length}. Use a smaller one, or a model with more positions."
        )


def check_token_types(type_vocab_size: int, *, is_pair: bool) -> None:
    """Raises ValueError unless the model tells two sentences apart.

    Args:
        type_vocab_size: Rows of the table of token types.
        is_pair: Whether examples are pairs of sentences.
    """
    if is_pair and type_vocab_size < 2:
        raise ValueError(
            "`type_vocab_size` in `--bert_config_file` must be >= 2 for pairs of "
            f"sentences. Received: {type_vocab_size}. Use a model with two token types, "
            "or a task of single sentences."
        )


def check_case_matches_checkpoint(
    do_lower_case: bool, init_checkpoint: str | None
) -> None:
    """Raises ValueError if the name of the checkpoint's folder says the other case.

    Known names have `cased` or `uncased` as a word, or Google's `multilingual_L-` or
    `chinese_L-`, which are uncased. Other names are not checked.

    Args:
        do_lower_case: Value of `--do_lower_case`.
        init_checkpoint: Path of `bert_model.ckpt`; None skips the check.
    """
    if not init_checkpoint:
        return
    name = pathlib.PurePath(init_checkpoint).parent.name
    match = re.search(
        r"(?<![a-z0-9])(uncased|cased|multilingual_L-|chinese_L-)", name, re.IGNORECASE
    )
    if not match:
        return
    is_uncased = match[1].lower() != "cased"
    if is_uncased != do_lower_case:
        raise ValueError(
            f"`--do_lower_case` must fit the checkpoint. Received: {do_lower_case} "
            f"with {init_checkpoint}, whose name says "
            f"{'uncased' if is_uncased else 'cased'}. "
            f"Use --do_lower_case={is_uncased}, or another --init_checkpoint."
        )
