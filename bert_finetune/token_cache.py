"""Cache of tokenized examples, in a file beside their text.

    train.tsv  ->  train.tsv.tokens.npz

The file records what it was made from, texts and vocabulary by their SHA-256: the text,
the vocabulary, the casing, the longest input, and the version of the encoder. If one of
them differs, or if the tokens do not have their own SHA-256, it is rewritten. Labels are
not kept: a file may be read with and without.
"""

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from bert_finetune.encoding import EncodedExamples, encode_examples, labels_of
from bert_finetune.tasks import Example
from bert_finetune.tokenization import WordPieceTokenizer
from estimator_accum.programs.folder import whole_file

_logger = logging.getLogger("tensorflow.bert_finetune")

_VERSION = 3  # version of the output of `encode_examples`; raised when that changes
_SUFFIX = ".tokens.npz"
_ARRAYS = ("input_ids", "segment_ids", "offsets")


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
    stored = _read(cache, made_of, tokenizer.pad_id)
    if stored is not None:
        return dataclasses.replace(stored, labels=labels_of(examples))
    encoded = encode_examples(examples, tokenizer, max_seq_length)
    try:
        _write(cache, made_of, encoded)
    except OSError as error:
        _logger.info("tokens are not cached in %s: %s", cache, error.strerror)
    return encoded


def _made_of(
    examples: Sequence[Example], tokenizer: WordPieceTokenizer, max_seq_length: int
) -> str:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.text_a, example.text_b)).encode())
    return json.dumps(
        {
            "version": _VERSION,
            "examples": len(examples),
            "examples_checksum": digest.hexdigest(),
            "vocabulary_checksum": tokenizer.checksum,
            "do_lower_case": tokenizer.do_lower_case,
            "max_seq_length": max_seq_length,
        }
    )


def _read(cache: pathlib.Path, made_of: str, pad_id: int) -> EncodedExamples | None:
    """Returns the cached examples; None if the file is missing, damaged or outdated."""
    try:
        with np.load(cache) as arrays:
            if str(arrays["made_of"]) != made_of:
                return None
            encoded = EncodedExamples(
                **{name: arrays[name] for name in _ARRAYS},
                labels=None,
                pad_id=pad_id,
                truncated=int(arrays["truncated"]),
            )
            return encoded if str(arrays["checksum"]) == encoded.checksum else None
    except Exception:  # noqa: BLE001, a dozen kinds for damaged files
        return None


def _write(cache: pathlib.Path, made_of: str, encoded: EncodedExamples) -> None:
    """Writes the file atomically, even if other processes write it too."""
    checksum = dataclasses.replace(encoded, labels=None).checksum
    arrays = {name: getattr(encoded, name) for name in _ARRAYS}
    arrays |= {"made_of": np.array(made_of), "checksum": np.array(checksum)}
    arrays["truncated"] = np.array(encoded.truncated)
    with whole_file(cache) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)
