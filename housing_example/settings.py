"""Settings of a run: one frozen dataclass, checked and saved in the output folder.

A run writes `run_settings.json` to its output folder, and resumes there only with the
same settings and the same examples.
"""

import dataclasses
import pathlib
from typing import Any

from estimator_accum.programs.batches import Batches, share_out
from estimator_accum.programs.config import FLAGS
from estimator_accum.programs.config import flags_of as _flags_of
from estimator_accum.programs.folder import (
    EXAMPLES_CHECKSUM,
    SETTINGS_FILE,
    check_run_folder,
    write_settings,
)
from estimator_accum.programs.settings import check_positive, check_seed

_DEFAULT_TRAIN_BATCH_SIZE, _DEFAULT_STEPS = 59, 3


@dataclasses.dataclass(frozen=True)
class Settings:
    """Values of the flags of `main.py`; each field is the flag of that name.

    `train_csv` None is the generated data; `clip_norm` None does not clip. The three
    batch sizes are `effective_batch_size` [examples per update], `train_batch_size`
    [examples], which may be `AUTO`, and `gradient_accumulation_steps` [micro-steps per
    update]; None follows from the others, see `batches_of`.
    """

    train_csv: str | None
    test_csv: str | None
    output_dir: str
    strategy: str
    effective_batch_size: int | None
    train_batch_size: int | str | None
    gradient_accumulation_steps: int | None
    train_updates: int
    learning_rate: float
    clip_norm: float | None
    shuffle: bool
    seed: int
    watchdog_secs: int


def batches_of(settings: Settings, num_replicas: int) -> Batches:
    """Returns how the examples of each update are divided; see `share_out`."""
    return share_out(
        settings.effective_batch_size,
        settings.train_batch_size,
        settings.gradient_accumulation_steps,
        num_replicas,
        default_micro_batch_size=_DEFAULT_TRAIN_BATCH_SIZE,
        default_gradient_accumulation_steps=_DEFAULT_STEPS,
        micro_flag="--train_batch_size",
    )


def flags_of(settings: Settings) -> dict[str, Any]:
    """Returns the settings as values of flags, for `--config`."""
    return _flags_of(
        settings,
        ("train_csv", "test_csv"),
        clip_norm=settings.clip_norm or 0.0,
    )


_POSITIVE = (
    "effective_batch_size",
    "train_batch_size",
    "gradient_accumulation_steps",
    "train_updates",
    "watchdog_secs",
    "learning_rate",
)


def check_settings(settings: Settings) -> None:
    """Raises ValueError with one sentence if a value is invalid.

    Files are checked later, by the functions that read them.
    """
    if settings.test_csv and not settings.train_csv:
        raise ValueError(
            "`--test_csv` must come with `--train_csv`. "
            f"Received: --test_csv={settings.test_csv} alone. Name both, or neither "
            "for generated data."
        )
    check_positive(settings, _POSITIVE)
    check_seed(settings.seed)


def check_output_dir(settings: Settings, batches: Batches, checksum: str) -> None:
    """Raises ValueError unless the output folder is free or holds this same run.

    Args:
        settings: Settings of this run.
        batches: Division of each update's examples.
        checksum: Checksum of the run's examples.
    """
    decisive = _what_decides(settings, batches, checksum)
    check_run_folder(settings.output_dir, decisive, foreign="[!.]*")


def is_remembered(settings: Settings) -> bool:
    """Returns whether the output folder holds a run's settings."""
    return (pathlib.Path(settings.output_dir) / SETTINGS_FILE).exists()


def remember_settings(settings: Settings, batches: Batches, checksum: str) -> None:
    """Writes the settings with which the run can resume."""
    decisive = _what_decides(settings, batches, checksum)
    write_settings(settings.output_dir, decisive | {FLAGS: flags_of(settings)})


def _what_decides(settings: Settings, batches: Batches, checksum: str) -> dict:
    """Returns the values that determine the weights; the number of shares does not."""
    return {
        "effective_batch_size": batches.effective_batch_size,
        "train_updates": settings.train_updates,
        "learning_rate": settings.learning_rate,
        "clip_norm": settings.clip_norm,
        "shuffle": settings.shuffle,
        "seed": settings.seed,
        EXAMPLES_CHECKSUM: checksum,
    }
