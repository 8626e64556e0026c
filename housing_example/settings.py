"""The settings of a run: one frozen dataclass, checked, remembered in the folder.

A run leaves `run_settings.json` in its output folder, and goes on there only with the
same settings and the same examples.
"""

import dataclasses
import json
import pathlib

_SETTINGS_FILE = "run_settings.json"
_CHECKSUM = "examples_checksum"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the flags of `main.py` say; each field is the flag of that name.

    `train_batch_size` is in examples, `gradient_accumulation_steps` in micro-steps per
    update. `train_csv` None is the generated data; `clip_norm` None does not clip.
    """

    train_csv: str | None
    test_csv: str | None
    output_dir: str
    train_batch_size: int
    gradient_accumulation_steps: int
    train_updates: int
    learning_rate: float
    clip_norm: float | None
    shuffle: bool
    seed: int

    @property
    def effective_batch_size(self) -> int:
        """Examples per update."""
        return self.train_batch_size * self.gradient_accumulation_steps

    @property
    def num_micro_steps(self) -> int:
        """Of the whole run."""
        return self.train_updates * self.gradient_accumulation_steps

    def without_accumulation(self) -> "Settings":
        """Returns the settings with which one micro-batch is the effective batch."""
        return dataclasses.replace(
            self,
            train_batch_size=self.effective_batch_size,
            gradient_accumulation_steps=1,
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
    for field in ("train_batch_size", "gradient_accumulation_steps", "train_updates"):
        value = getattr(settings, field)
        if not 1 <= value < 2**31:
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


def check_output_dir(settings: Settings, checksum: str) -> None:
    """Raises ValueError unless the output folder is free, or this run's own.

    Args:
        settings: Of this run.
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
    for field, value in _training_settings(settings, checksum).items():
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


def remember_settings(settings: Settings, checksum: str) -> None:
    """Makes the output folder and writes what the run goes on with.

    Raises:
        ValueError: If the folder cannot be made.
    """
    folder = pathlib.Path(settings.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            "`--output_dir` must be a folder, or a path where one can be made. "
            f"Received: {folder} ({error.strerror}). Use another one."
        ) from error
    values = _training_settings(settings, checksum)
    write_text(folder / _SETTINGS_FILE, json.dumps(values, indent=2) + "\n")


def _training_settings(settings: Settings, checksum: str) -> dict:
    """Returns what decides the weights: all but the places of the files."""
    values = dataclasses.asdict(settings) | {_CHECKSUM: checksum}
    for place in ("train_csv", "test_csv", "output_dir"):
        del values[place]
    return values


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file that is either whole or not there."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
