"""Inputs of a run, checked before TensorFlow is imported."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from estimator_accum.programs.cluster import Cluster
from estimator_accum.reports._display import Display

_PART_ROWS = 4096
_SILENT_ROWS = 16_384  # long texts of so many rows are tokenized in about 5 s


@dataclass(frozen=True)
class Inputs:
    """Settings and examples of a run of a number of updates.

    Attributes:
        settings: The user's settings, with `train_updates`.
        cluster: Cluster of which this process is a task.
        train: Training examples.
        test: Test examples.
        checksum: Checksum of training and test examples.
    """

    settings: Any
    cluster: Cluster
    train: Any
    test: Any
    checksum: str


def shown_in_parts(examples: Sequence) -> Iterator[Sequence]:
    """Yields examples to tokenize in parts, and shows how many are done of many."""
    display = None
    if len(examples) > _SILENT_ROWS:
        display = Display("tokenizing", "example", len(examples))
        display.open()
    for start in range(0, len(examples), _PART_ROWS):
        part = examples[start : start + _PART_ROWS]
        yield part
        if display is not None:
            display.show(start + len(part))
    if display is not None:
        display.close()
