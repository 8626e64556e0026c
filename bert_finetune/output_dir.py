"""Output folder of a run: checks that it can be used, and the run's settings in it.

A training run writes `run_settings.json` beside its checkpoints. Training resumes there
only with the same settings, since other settings give another meaning to the order of
the examples, the schedule and the window of a checkpoint; evaluation, prediction and
export need the same task, tokenization and architecture. The number of micro-batches
and replicas of an update may change, but not within an update.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterable

import tensorflow as tf

from bert_finetune.bert_config import BertConfig
from bert_finetune.settings import Settings, flags_of
from bert_finetune.tokenization import WordPieceTokenizer
from estimator_accum.programs.batches import AUTO, Batches
from estimator_accum.programs.config import FLAGS
from estimator_accum.programs.folder import SETTINGS_FILE, read_settings, write_settings
from estimator_accum.programs.progress import latest_checkpoint, read_progress

# Settings that determine a trained model's weights, and settings needed to use one.
_TRAINING_FIELDS = (
    "task_name",
    "init_checkpoint",
    "do_lower_case",
    "max_seq_length",
    "learning_rate",
    "num_train_epochs",
    "warmup_proportion",
    "clip_norm",
    "dropout",
    "seed",
)
_MODEL_FIELDS = ("task_name", "do_lower_case", "bert_config", "vocabulary_checksum")
_CUT_FIELDS = (  # how an update is cut
    "train_batch_size",
    "gradient_accumulation_steps",
    "replicas",
    "pad_to_max_length",
    "tokens_per_micro_batch",
)
_CHECKSUMS = {
    "vocabulary_checksum": "another vocabulary",
    "training_examples_checksum": "other training examples",
}


def check_output_dir(
    output_dir: str, *, files: Iterable[str], folders: Iterable[str]
) -> None:
    """Raises ValueError unless a run can write its results; writes nothing.

    Args:
        output_dir: The folder, which need not exist.
        files: Names that must not be folders.
        folders: Names that must not be files.
    """
    folder = pathlib.Path(output_dir)
    place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    fault = "is not a folder" if not place.is_dir() else "cannot be written to"
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(_unfit(folder, f"{place} {fault}"))
    for name in files:
        if (folder / name).is_dir():
            raise ValueError(_unfit(folder, f"{folder / name} is a folder"))
    for name in folders:
        if (folder / name).exists() and not (folder / name).is_dir():
            raise ValueError(_unfit(folder, f"{folder / name} is not a folder"))


def _unfit(folder: str | os.PathLike, fault: str) -> str:
    return (
        "`--output_dir` must be a folder that a run can write to, or a path where one "
        f"can be made. Received: {folder}, but {fault}. Use another one."
    )


def describe_run(
    settings: Settings, config: BertConfig, tokenizer: WordPieceTokenizer
) -> dict:
    """Returns `run_settings.json` without the part of `describe_training`."""
    values = {field: getattr(settings, field) for field in _TRAINING_FIELDS}
    values["task_name"] = values["task_name"].lower().replace("-", "")
    if values["init_checkpoint"]:
        values["init_checkpoint"] = os.path.abspath(values["init_checkpoint"])
    return values | {
        "bert_config": dataclasses.asdict(config),
        "vocabulary_checksum": tokenizer.checksum,
    }


def describe_training(
    settings: Settings, examples_checksum: str, batches: Batches
) -> dict:
    """Returns the part of `run_settings.json` about the data and the batches."""
    return {
        "training_examples_checksum": examples_checksum,
        "effective_batch_size": batches.effective_batch_size,
        "train_batch_size": AUTO if batches.is_auto else batches.largest_share,
        "gradient_accumulation_steps": batches.gradient_accumulation_steps,
        "replicas": batches.num_replicas,
        "pad_to_max_length": settings.pad_to_max_length,
        "tokens_per_micro_batch": settings.tokens_per_micro_batch,
        FLAGS: flags_of(settings),
    }


def check_same_run(output_dir: str, description: dict) -> None:
    """Raises ValueError if the folder's run was begun with other settings or files.

    Args:
        output_dir: Output folder of this run.
        description: Description of this run, training examples included.
    """
    path = pathlib.Path(output_dir) / SETTINGS_FILE
    if path.exists():
        _check_same(
            path,
            {k: v for k, v in description.items() if k not in {FLAGS, *_CUT_FIELDS}},
            "`--output_dir` must be new or hold a run with the same settings.",
            "Use another --output_dir, or the same settings and files to resume.",
        )
    elif latest_checkpoint(output_dir):
        raise ValueError(
            "`--output_dir` must be new or hold a run of this program. Received: "
            f"{output_dir}, with checkpoints but no {SETTINGS_FILE}. "
            "Use another --output_dir, and this one's checkpoint as "
            "--init_checkpoint to start from it."
        )


def check_same_cut(output_dir: str, description: dict) -> None:
    """Raises ValueError if an unfinished update would resume with another cut.

    Args:
        output_dir: Output folder of this run, whose checkpoint can be read.
        description: Description of this run, batches included.
    """
    if read_progress(output_dir).micro_step:
        _check_same(
            pathlib.Path(output_dir) / SETTINGS_FILE,
            {field: description[field] for field in _CUT_FIELDS},
            "An update that a checkpoint holds half of must continue as it began.",
            "Use the same, or another --output_dir.",
        )


def check_same_model(checkpoint: str, description: dict) -> None:
    """Raises ValueError if a classifier is used on something it was not trained for.

    A folder without `run_settings.json` is not checked.

    Args:
        checkpoint: Checkpoint of the classifier.
        description: Description of this run.
    """
    path = pathlib.Path(checkpoint).parent / SETTINGS_FILE
    if path.exists():
        now = {field: description[field] for field in _MODEL_FIELDS}
        _check_same(
            path,
            now,
            "A trained classifier must be used for what it was trained on.",
            "Use the same settings and files, or another classifier.",
        )


def _check_same(path: pathlib.Path, now: dict, rule: str, remedy: str) -> None:
    before = _flat(read_settings(path))
    for name, value in _flat(now).items():
        if before.get(name) == value:
            continue
        difference = f"has {name}={before.get(name)}, not {value}"
        if name in _CHECKSUMS:
            difference = f"began with {_CHECKSUMS[name]}"
        raise ValueError(
            f"{rule} Received: {path.parent}, whose run {difference}. {remedy}"
        )


def _flat(values: dict) -> dict:
    """Returns flags by `--name`, and the numbers of `bert_config` one by one."""
    config = values.get("bert_config")
    numbers = config.items() if isinstance(config, dict) else ()
    return {
        name if name in _CHECKSUMS else f"--{name}": value
        for name, value in values.items()
        if name != "bert_config"
    } | {f"bert_config.{name}": value for name, value in numbers}


class RememberingHook(tf.compat.v1.train.SessionRunHook):
    """Writes `run_settings.json` after the graph is built, before any checkpoint.

    If the graph cannot be built, nothing is written.

    Args:
        output_dir: Output folder of the run.
        description: Description of the run.
    """

    def __init__(self, output_dir: str, description: dict):
        self._run = output_dir, description

    def begin(self) -> None:
        write_settings(*self._run)
