"""The settings of a run: one frozen dataclass, checked, remembered in the folder.

The effective batch is the same whatever the number of workers, unless both the
micro-batch and the micro-steps of an update are asked for.
"""

import dataclasses
import json
import pathlib

_SETTINGS_FILE = "run_settings.json"
_CHECKSUM = "examples_checksum"
_DEFAULT_EFFECTIVE_BATCH = 200
AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the flags of `main.py` say; each field is the flag of that name.

    `data_dir` None is generated data. Of the three sizes, None is what follows from the
    others: see `batches_of`. `micro_batch_size` may be `AUTO`.
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


@dataclasses.dataclass(frozen=True)
class Batches:
    """How each update's examples are shared out.

    Attributes:
        effective_batch_size: Examples of one update, over all workers.
        gradient_accumulation_steps: [micro-steps per update].
        num_workers: Tasks that train.
        is_auto: Whether a worker takes its share of an update as one batch, and cuts
            it into as many micro-batches as its memory asks for.
    """

    effective_batch_size: int
    gradient_accumulation_steps: int
    num_workers: int
    is_auto: bool = False

    @property
    def largest_micro_batch(self) -> int:
        """Examples that a worker takes in a micro-step, at most."""
        return -(-self.effective_batch_size // self._num_shares)

    @property
    def _num_shares(self) -> int:
        return self.gradient_accumulation_steps * self.num_workers

    def share(self, micro_step: int, rank: int) -> tuple[int, int]:
        """Returns the (first, behind the last) of an update's examples, by place.

        Shares differ by one example at most, and together they are the whole.

        Args:
            micro_step: In the window, from 0.
            rank: Of the worker, from 0.
        """
        number = micro_step * self.num_workers + rank
        first, behind = (
            self.effective_batch_size * n // self._num_shares
            for n in (number, number + 1)
        )
        return first, behind


def batches_of(settings: Settings, num_workers: int) -> Batches:
    """Returns how the examples of each update are shared out.

        effective_batch_size = micro_batch_size * gradient_accumulation_steps * workers

    A micro-batch alone says how many micro-steps it takes, the last ones smaller where
    they do not divide; micro-steps alone say how large the micro-batches are. With
    `AUTO` a micro-step is an update, and memory says the rest while training.

    Raises:
        ValueError: If the three sizes disagree, or there is less than an example for
            each.
    """
    effective = settings.effective_batch_size
    micro, steps = settings.micro_batch_size, settings.gradient_accumulation_steps
    is_auto = micro == AUTO
    if is_auto:
        if steps not in (None, 1):
            raise ValueError(
                "`--gradient_accumulation_steps` must be left out with "
                f"--micro_batch_size=auto, which decides. Received: {steps}. "
                "Leave one of the two out."
            )
        micro = None
    if micro and steps:
        product = micro * steps * num_workers
        if effective not in (None, product):
            raise ValueError(
                "`--effective_batch_size` must be micro_batch_size * "
                "gradient_accumulation_steps * workers. Received: "
                f"{effective}, not {micro} * {steps} * {num_workers} = {product}. "
                "Leave one of the three out."
            )
        effective = product
    effective = effective or _DEFAULT_EFFECTIVE_BATCH
    steps = steps or (-(-effective // (micro * num_workers)) if micro else 1)
    if steps * num_workers > effective:
        raise ValueError(
            "`--effective_batch_size` must have an example for each micro-step of each "
            f"worker. Received: {effective} for {steps} micro-steps of {num_workers} "
            "workers. Use a larger one, or fewer of them."
        )
    return Batches(effective, steps, num_workers, is_auto)


def check_settings(settings: Settings) -> None:
    """Raises ValueError with one sentence unless the values make sense.

    Files are not looked at here; those who read them check them.
    """
    for field in (
        "effective_batch_size",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "train_updates",
        "hidden_units",
        "save_checkpoints_updates",
        "watchdog_secs",
    ):
        value = getattr(settings, field)
        if value not in (None, AUTO) and not 1 <= value < 2**31:
            raise ValueError(
                f"`--{field}` must be an integer >= 1 and < 2**31. "
                f"Received: {value}. See --help for the usual value."
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
        # A worker may be here before the chief has written the file.
        others = sorted(folder.glob("*.ckpt*"))
        if others:
            raise ValueError(
                "`--output_dir` must be new, empty, or hold a run of this program. "
                f"Received: {folder} with {others[0].name} and no {_SETTINGS_FILE}. "
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


def remember_settings(settings: Settings, batches: Batches, checksum: str) -> None:
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
    values = _what_decides(settings, batches, checksum)
    write_text(folder / _SETTINGS_FILE, json.dumps(values, indent=2) + "\n")


def _what_decides(settings: Settings, batches: Batches, checksum: str) -> dict:
    """Returns what decides the weights; into how many shares is no part of it."""
    return {
        "effective_batch_size": batches.effective_batch_size,
        "train_updates": settings.train_updates,
        "learning_rate": settings.learning_rate,
        "hidden_units": settings.hidden_units,
        "shuffle": settings.shuffle,
        "seed": settings.seed,
        _CHECKSUM: checksum,
    }


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file that is either whole or not there."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
