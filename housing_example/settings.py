"""The settings of a run: one frozen dataclass, checked, remembered in the folder.

A run leaves `run_settings.json` in its output folder, and goes on there only with the
same settings and the same examples.
"""

import dataclasses
import json
import pathlib

from estimator_accum.batches import AUTO, Batches, share_out

_SETTINGS_FILE = "run_settings.json"
_CHECKSUM = "examples_checksum"
_DEFAULT_TRAIN_BATCH_SIZE, _DEFAULT_STEPS = 59, 3


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the flags of `main.py` say; each field is the flag of that name.

    `train_csv` None is the generated data; `clip_norm` None does not clip. Of
    `effective_batch_size` [examples per update], `train_batch_size` [examples], which may
    be `AUTO`, and `gradient_accumulation_steps` [micro-steps per update], None is what
    follows from the others: see `batches_of`.
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
    """Returns how the examples of each update are shared out; see `share_out`."""
    return share_out(
        settings.effective_batch_size,
        settings.train_batch_size,
        settings.gradient_accumulation_steps,
        num_replicas,
        default_micro_batch_size=_DEFAULT_TRAIN_BATCH_SIZE,
        default_gradient_accumulation_steps=_DEFAULT_STEPS,
        micro_flag="--train_batch_size",
    )


def check_settings(settings: Settings) -> None:
    """Raises ValueError with one sentence unless the values make sense.

    Files are not looked at here; those who read them check them.
    """
    if settings.test_csv and not settings.train_csv:
        raise ValueError(
            "`--test_csv` must come with `--train_csv`. "
            f"Received: --test_csv={settings.test_csv} alone. Name both, or neither "
            "for generated data."
        )
    for field in (
        "effective_batch_size",
        "train_batch_size",
        "gradient_accumulation_steps",
        "train_updates",
        "watchdog_secs",
    ):
        value = getattr(settings, field)
        if value not in (None, AUTO) and not 1 <= value < 2**31:
            remedy = (
                "Use 1 to turn accumulation off."
                if field == "gradient_accumulation_steps"
                else "See --help for the usual value."
            )
            raise ValueError(
                f"`--{field}` must be an integer >= 1 and < 2**31. "
                f"Received: {value}. {remedy}"
            )
    if not 0 < settings.learning_rate <= 1e9:
        raise ValueError(
            "`--learning_rate` must be a number > 0 and <= 1e9. "
            f"Received: {settings.learning_rate}. See --help for the usual value."
        )
    if not 0 <= settings.seed < 2**31:
        raise ValueError(
            "`--seed` must be an integer >= 0 and < 2**31. "
            f"Received: {settings.seed}. Use 0."
        )


def check_output_dir(settings: Settings, batches: Batches, checksum: str) -> None:
    """Raises ValueError unless the output folder is free, or this run's own.

    Args:
        settings: Of this run.
        batches: Of this run.
        checksum: Of its examples.
    """
    folder = pathlib.Path(settings.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"`--output_dir` must be a folder. Received: {folder}, a file. "
            "Use another one."
        )
    path = folder / _SETTINGS_FILE
    if not path.exists():
        others = sorted(other.name for other in folder.glob("[!.]*"))
        if others:
            raise ValueError(
                "`--output_dir` must be new, empty, or hold a run of this program. "
                f"Received: {folder} with {others[0]} and no {_SETTINGS_FILE}. "
                "Use another one."
            )
        return
    before = _read(path)
    for field, value in _what_decides(settings, batches, checksum).items():
        if before.get(field) == value:
            continue
        what = (
            "other examples"
            if field == _CHECKSUM
            else f"--{field}={before.get(field)}, not {value}"
        )
        raise ValueError(
            "`--output_dir` must be new or hold a run with the same settings. "
            f"Received: {folder}, whose run has {what}. Use another --output_dir, or "
            "the same settings to go on."
        )


def _read(path: pathlib.Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} must be what a run has written. Received: a file that cannot be "
            f"read ({error}). Use another --output_dir."
        ) from error
    return content if isinstance(content, dict) else {}


def is_remembered(settings: Settings) -> bool:
    """Returns whether the output folder is that of a run."""
    return (pathlib.Path(settings.output_dir) / _SETTINGS_FILE).exists()


def remember_settings(settings: Settings, batches: Batches, checksum: str) -> None:
    """Writes what the run goes on with."""
    values = _what_decides(settings, batches, checksum)
    path = pathlib.Path(settings.output_dir) / _SETTINGS_FILE
    write_text(path, json.dumps(values, indent=2) + "\n")


def make_output_dir(settings: Settings) -> None:
    """Makes the output folder.

    Raises:
        ValueError: If it cannot be made.
    """
    folder = pathlib.Path(settings.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            "`--output_dir` must be a folder, or a path where one can be made. "
            f"Received: {folder} ({error.strerror}). Use another one."
        ) from error


def _what_decides(settings: Settings, batches: Batches, checksum: str) -> dict:
    """Returns what decides the weights; into how many shares is no part of it."""
    return {
        "effective_batch_size": batches.effective_batch_size,
        "train_updates": settings.train_updates,
        "learning_rate": settings.learning_rate,
        "clip_norm": settings.clip_norm,
        "shuffle": settings.shuffle,
        "seed": settings.seed,
        _CHECKSUM: checksum,
    }


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file that is either whole or not there."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
