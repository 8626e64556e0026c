"""Cache of tokenized examples, in a file beside their text.

    train.tsv  ->  train.tsv.tokens.npz

The file records what it was made from: the text, the vocabulary, the casing, the
longest input, and the version of the encoder. If one of them differs, it is rewritten.
Labels are not kept: a file may be read with and without.
"""

import json
import logging
import os
import pathlib
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

from bert_finetune.encoding import EncodedExamples, encode_examples, labels_of
from bert_finetune.tasks import Example
from bert_finetune.tokenization import WordPieceTokenizer
from estimator_accum.programs.folder import whole_file

_logger = logging.getLogger("tensorflow.bert_finetune")

_VERSION = 1  # version of the output of `encode_examples`; raised when that changes
_SUFFIX = ".tokens.npz"


def cached_examples(
    path: str | os.PathLike,
    examples: Sequence[Example],
    tokenizer: WordPieceTokenizer,
    max_seq_length: int,
) -> EncodedExamples:
    """Returns `encode_examples(examples, tokenizer, max_seq_length)`, cached in a file.

    In a folder that cannot be written to there is no cache, and the log says so.

    Args:
        path: Path of the text file that `examples` were read from.
        examples: As for `encode_examples`.
        tokenizer: As for `encode_examples`.
        max_seq_length: As for `encode_examples`.
    """
    cache = pathlib.Path(f"{path}{_SUFFIX}")
    made_of = _made_of(examples, tokenizer, max_seq_length)
    found = _read(cache, made_of, labels_of(examples))
    if found is not None:
        return found
    encoded = encode_examples(examples, tokenizer, max_seq_length)
    try:
        _write(cache, made_of, encoded)
    except OSError as error:
        _logger.info("tokens are not kept in %s: %s", cache, error.strerror)
    return encoded


def _made_of(
    examples: Sequence[Example], tokenizer: WordPieceTokenizer, max_seq_length: int
) -> str:
    code = 0
    for example in examples:
        row = example.text_a, example.text_b
        code = zlib.crc32(repr(row).encode("utf-8", "surrogatepass"), code)
    return json.dumps(
        {
            "version": _VERSION,
            "examples": len(examples),
            "examples_checksum": f"{code:08x}",
            "vocabulary_checksum": tokenizer.checksum,
            "do_lower_case": tokenizer.do_lower_case,
            "max_seq_length": max_seq_length,
        }
    )


def _read(
    cache: pathlib.Path, made_of: str, labels: np.ndarray | None
) -> EncodedExamples | None:
    """Returns the cached examples; None if the file is missing, damaged or outdated."""
    try:
        with np.load(cache) as arrays:
            if str(arrays["made_of"]) != made_of:
                return None
            return EncodedExamples(
                input_ids=arrays["input_ids"],
                segment_ids=arrays["segment_ids"],
                offsets=arrays["offsets"],
                labels=labels,
                pad_id=int(arrays["pad_id"]),
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def _write(cache: pathlib.Path, made_of: str, encoded: EncodedExamples) -> None:
    """Writes the file atomically, even if other processes write it too."""
    arrays = {
        "made_of": np.array(made_of),
        "input_ids": encoded.input_ids,
        "segment_ids": encoded.segment_ids,
        "offsets": encoded.offsets,
        "pad_id": np.array(encoded.pad_id),
    }
    with whole_file(cache) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)
