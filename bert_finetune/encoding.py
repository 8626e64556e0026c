"""Tokenized examples: made once, kept without padding, padded per batch.

Shapes: B = examples of a batch, T = tokens of a padded row.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bert_finetune.tasks import Example
from bert_finetune.tokenization import WordPieceTokenizer
from estimator_accum.programs.inputs import shown_in_parts


@dataclass(frozen=True, eq=False)
class EncodedExamples:
    """Tokenized examples, one after the other without padding; see `encode_examples`.

    Attributes:
        input_ids: int32 [tokens of all examples].
        segment_ids: int8 [tokens of all examples].
        offsets: int64 [examples + 1]; example i is `offsets[i]:offsets[i + 1]`.
        labels: Classes, int32, or numbers, float32 [examples], or 0 and 1, int32
            [examples, C]; None if there are no labels.
        pad_id: Id that pads a row.
        truncated: Number of the examples that are longer.
    """

    input_ids: np.ndarray
    segment_ids: np.ndarray
    offsets: np.ndarray
    labels: np.ndarray | None
    pad_id: int
    truncated: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, special tokens included: int64 [examples]."""
        return np.diff(self.offsets)

    @property
    def checksum(self) -> str:
        """SHA-256 of the examples, their labels and their order."""
        digest = hashlib.sha256()
        for part in (self.input_ids, self.segment_ids, self.offsets, self.labels):
            if part is not None:
                digest.update(f"{part.dtype}{part.shape}".encode())
                digest.update(np.ascontiguousarray(part))
        return digest.hexdigest()

    def features(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Returns the features of some examples, int32 [B, T].

        Args:
            rows: Numbers of the examples, int64 [B].
            length: T [tokens], at least that of the longest example.
        """
        starts = self.offsets[rows, np.newaxis]  # [B, 1]
        ends = self.offsets[rows + 1, np.newaxis]
        tokens = starts + np.arange(length)  # [B, length]
        is_token = tokens < ends
        input_ids = np.full(is_token.shape, self.pad_id, np.int32)
        segment_ids = np.zeros(is_token.shape, np.int32)
        input_ids[is_token] = self.input_ids[tokens[is_token]]
        segment_ids[is_token] = self.segment_ids[tokens[is_token]]
        return {
            "input_ids": input_ids,
            "input_mask": is_token.astype(np.int32),
            "segment_ids": segment_ids,
        }


def encode_examples(
    examples: Sequence[Example], tokenizer: WordPieceTokenizer, max_seq_length: int
) -> EncodedExamples:
    """Tokenizes examples of one task, all with a label or all without.

    Args:
        examples: At least one, in the order that evaluation and prediction keep.
        tokenizer: Tokenizer that turns text into ids.
        max_seq_length: Most tokens of an example; longer ones are truncated.
    """
    is_pair = examples[0].text_b is not None
    input_ids, segment_ids, lengths, truncated = [], [], [0], 0
    # In parts, because encodings take much more memory than their arrays.
    for part in shown_in_parts(examples):
        encodings = tokenizer.encode_batch(
            [example.text_a for example in part],
            [example.text_b for example in part] if is_pair else None,
            max_seq_length,
        )
        lengths += [len(encoding.input_ids) for encoding in encodings]
        truncated += sum(encoding.is_truncated for encoding in encodings)
        input_ids.append(_flat((e.input_ids for e in encodings), np.int32))
        segment_ids.append(_flat((e.segment_ids for e in encodings), np.int8))
    return EncodedExamples(
        input_ids=np.concatenate(input_ids),
        segment_ids=np.concatenate(segment_ids),
        offsets=np.cumsum(lengths, dtype=np.int64),
        labels=labels_of(examples),
        pad_id=tokenizer.pad_id,
        truncated=truncated,
    )


def labels_of(examples: Sequence[Example]) -> np.ndarray | None:
    """Returns the labels of `EncodedExamples`."""
    if examples[0].label is None:
        return None
    labels = np.array([example.label for example in examples])
    return labels.astype(np.float32 if labels.dtype.kind == "f" else np.int32)


def _flat(rows: Iterable[list[int]], dtype: type) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(rows), dtype)
