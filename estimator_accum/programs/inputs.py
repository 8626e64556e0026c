"""Inputs of a run, read and checked before TensorFlow is imported."""

from dataclasses import dataclass
from typing import Any

from estimator_accum.programs.cluster import Cluster


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
