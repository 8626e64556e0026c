"""The settings of a run: one frozen dataclass, checked, remembered in the folder.

A training run leaves `run_settings.json` in its output folder. Training goes on there
only with the same settings, since the order of the examples, the schedule and the
window of a checkpoint mean something else under others.
"""

import dataclasses
import json
import os
import pathlib

import tensorflow as tf

_SETTINGS_FILE = "run_settings.json"
_CHECKSUM = "training_examples_checksum"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the flags of `run_classifier.py` say; each field is the flag of that name.

    Sizes are in examples, except `max_seq_length` [tokens], `save_checkpoints_steps`
    [micro-steps] and `gradient_accumulation_steps` [micro-steps per update].
    """

    task_name: str
    data_dir: str
    vocab_file: str
    bert_config_file: str
    output_dir: str
    init_checkpoint: str | None
    do_lower_case: bool
    max_seq_length: int
    do_train: bool
    do_eval: bool
    do_predict: bool
    do_export: bool
    train_batch_size: int
    eval_batch_size: int
    predict_batch_size: int
    learning_rate: float
    num_train_epochs: float
    warmup_proportion: float
    clip_norm: float | None
    gradient_accumulation_steps: int
    save_checkpoints_steps: int
    dropout: bool
    seed: int

    @property
    def effective_batch_size(self) -> int:
        """Examples per update."""
        return self.train_batch_size * self.gradient_accumulation_steps


# What decides the weights of a trained model.
_TRAINING_FIELDS = (
    "task_name",
    "init_checkpoint",
    "do_lower_case",
    "max_seq_length",
    "train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "num_train_epochs",
    "warmup_proportion",
    "clip_norm",
    "dropout",
    "seed",
)

_POSITIVE = (
    "max_seq_length",
    "train_batch_size",
    "eval_batch_size",
    "predict_batch_size",
    "gradient_accumulation_steps",
    "save_checkpoints_steps",
    "learning_rate",
    "num_train_epochs",
)


def check_settings(settings: Settings) -> None:
    """Raises ValueError with one sentence unless the values make sense.

    Files are not looked at here; those who read them check them.
    """
    jobs = ("do_train", "do_eval", "do_predict", "do_export")
    if not any(getattr(settings, job) for job in jobs):
        raise ValueError(
            "At least one of --do_train, --do_eval, --do_predict and --do_export must "
            "be true. Received: none of them. Use --do_train=true to train."
        )
    for field in _POSITIVE:
        value = getattr(settings, field)
        most = 2**31 - 1 if isinstance(value, int) else 1e9
        if not 0 < value <= most:
            kind = "an integer >= 1" if isinstance(value, int) else "a number > 0"
            if value > most:
                kind += f" and <= {most:g}"
            remedy = (
                "Use 1 to turn accumulation off."
                if field == "gradient_accumulation_steps"
                else "See --help for the usual value."
            )
            raise ValueError(f"`--{field}` must be {kind}. Received: {value}. {remedy}")
    if not 0 <= settings.warmup_proportion <= 1:
        raise ValueError(
            "`--warmup_proportion` must be from 0 to 1. "
            f"Received: {settings.warmup_proportion}. Use 0.1 for a tenth of training."
        )
    if not 0 <= settings.seed < 2**31:
        raise ValueError(
            "`--seed` must be an integer >= 0 and < 2**31. "
            f"Received: {settings.seed}. Use 0."
        )


def check_same_settings(settings: Settings, data_checksum: str) -> None:
    """Raises ValueError if the output folder's run was begun with other settings.

    Args:
        settings: Of this run.
        data_checksum: Of the tokenized training examples.
    """
    folder = pathlib.Path(settings.output_dir)
    path = folder / _SETTINGS_FILE
    if not path.exists():
        if tf.train.latest_checkpoint(settings.output_dir):
            raise ValueError(
                "`--output_dir` must be new or hold a run of this program. Received: "
                f"{folder}, with checkpoints but no {_SETTINGS_FILE}. "
                "Use another --output_dir, and this one's checkpoint as "
                "--init_checkpoint to start from it."
            )
        return
    before = _read(path)
    for field, value in _training_settings(settings).items():
        if before.get(field) != value:
            raise ValueError(
                "`--output_dir` must be new or hold a run with the same settings. "
                f"Received: {folder}, whose run has --{field}={before.get(field)}, not "
                f"{value}. Use another --output_dir, or the same settings to go on."
            )
    if before.get(_CHECKSUM) != data_checksum:
        raise ValueError(
            "`--output_dir` must be new or hold a run on the same examples. Received: "
            f"{folder}, whose run began with other training examples or another "
            "vocabulary. Use another --output_dir, or the same files to go on."
        )


def _read(path: pathlib.Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} must be what a run has written. Received: a file that cannot be "
            f"read ({error}). Use another --output_dir."
        ) from error
    return content if isinstance(content, dict) else {}


def remember_settings(settings: Settings, data_checksum: str) -> None:
    """Writes the settings that training goes on with into the output folder."""
    values = _training_settings(settings) | {_CHECKSUM: data_checksum}
    text = json.dumps(values, indent=2) + "\n"
    write_text(pathlib.Path(settings.output_dir) / _SETTINGS_FILE, text)


def _training_settings(settings: Settings) -> dict:
    values = {field: getattr(settings, field) for field in _TRAINING_FIELDS}
    values["task_name"] = values["task_name"].lower().replace("-", "")
    if values["init_checkpoint"]:
        values["init_checkpoint"] = os.path.abspath(values["init_checkpoint"])
    return values


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file that is either whole or not there."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
