"""Settings of a run: one frozen dataclass, checked and saved in the output folder.

The effective batch does not depend on the number of workers, unless it is left out and
both the micro-batch and the micro-steps of an update are given.
"""

import dataclasses
from typing import Any

from estimator_accum.programs.batches import AUTO, Batches, share_out
from estimator_accum.programs.config import FLAGS
from estimator_accum.programs.config import flags_of as _flags_of
from estimator_accum.programs.folder import (
    EXAMPLES_CHECKSUM,
    check_run_folder,
    make_run_folder,
    write_settings,
)
from estimator_accum.programs.settings import check_positive, check_seed

_DEFAULT_EFFECTIVE_BATCH = 200


@dataclasses.dataclass(frozen=True)
class Settings:
    """Values of the flags of `main.py`; each field is the flag of that name.

    `data_dir` None is generated data. A batch size of None follows from the others; see
    `batches_of`. `micro_batch_size` may be `AUTO`.
    """

    data_dir: str | None
    output_dir: str
    effective_batch_size: int | None
    micro_batch_size: int | str | None
    gradient_accumulation_steps: int | None
    train_updates: int
    learning_rate: float
    hidden_units: int
    shuffle: bool
    seed: int
    save_checkpoints_updates: int
    watchdog_secs: int
    log_examples: bool


def batches_of(settings: Settings, num_workers: int) -> Batches:
    """Returns how the examples of each update are divided; see `share_out`.

    An update has 200 examples unless the effective batch or both other sizes are given.
    """
    effective = settings.effective_batch_size
    micro, steps = settings.micro_batch_size, settings.gradient_accumulation_steps
    if effective is None and (micro in (None, AUTO) or steps is None):
        effective = _DEFAULT_EFFECTIVE_BATCH
    return share_out(effective, micro, steps, num_workers)


def flags_of(settings: Settings) -> dict[str, Any]:
    """Returns the settings as values of flags, for `--config`."""
    return _flags_of(settings, ("data_dir",))


_POSITIVE = (
    "effective_batch_size",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "train_updates",
    "hidden_units",
    "save_checkpoints_updates",
    "watchdog_secs",
    "learning_rate",
)


def check_settings(settings: Settings) -> None:
    """Raises ValueError with one sentence if a value is invalid.

    Files are checked later, by the functions that read them.
    """
    check_positive(settings, _POSITIVE)
    if settings.log_examples and settings.micro_batch_size == AUTO:
        raise ValueError(
            "`--log_examples` must have micro-batches that are never run again. "
            f"Received: --micro_batch_size={AUTO}. Use a number."
        )
    check_seed(settings.seed)


def check_output_dir(settings: Settings, batches: Batches, checksum: str) -> None:
    """Raises ValueError unless the output folder is free or holds this same run.

    Args:
        settings: Settings of this run.
        batches: Division of each update's examples.
        checksum: Checksum of the run's examples.
    """
    # A worker may get here before the chief has written the settings.
    decisive = _what_decides(settings, batches, checksum)
    check_run_folder(settings.output_dir, decisive, foreign="*.ckpt*")


def remember_settings(settings: Settings, batches: Batches, checksum: str) -> None:
    """Makes the output folder and writes the settings with which the run can resume.

    Raises:
        ValueError: If the folder cannot be made.
    """
    make_run_folder(settings.output_dir)
    decisive = _what_decides(settings, batches, checksum)
    write_settings(settings.output_dir, decisive | {FLAGS: flags_of(settings)})


def _what_decides(settings: Settings, batches: Batches, checksum: str) -> dict:
    """Returns the values that determine the weights; the number of shares does not."""
    return {
        "effective_batch_size": batches.effective_batch_size,
        "train_updates": settings.train_updates,
        "learning_rate": settings.learning_rate,
        "hidden_units": settings.hidden_units,
        "shuffle": settings.shuffle,
        "seed": settings.seed,
        EXAMPLES_CHECKSUM: checksum,
    }
