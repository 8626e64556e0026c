"""Output folder of a run: checks that it can be used, and the run's settings in it.

A training run writes `run_settings.json` beside its checkpoints. Training resumes there
only with the same settings, since other settings give another meaning to the order of
the examples, the schedule and the window of a checkpoint; a finished run trains on with
more epochs. Evaluation, prediction and export need the same task, tokenization and
architecture. The number of micro-batches and replicas of an update may change, but not
within an update.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from bert_finetune.bert_config import BertConfig
from bert_finetune.settings import Settings
from bert_finetune.tasks import Task
from bert_finetune.tokenization import WordPieceTokenizer
from estimator_accum.programs.batches import AUTO, Batches
from estimator_accum.programs.folder import (
    EXAMPLES_CHECKSUM,
    SAME_RUN,
    SETTINGS_FILE,
    VOCABULARY_CHECKSUM,
    check_same,
    read_settings,
    write_settings,
)
from estimator_accum.programs.progress import (
    ends_at,
    latest_checkpoint,
    read_progress,
)
from estimator_accum.programs.settings import FLAGS

# Settings needed to use a trained model, and settings that say how an update is cut.
_MODEL_FIELDS = (
    *("task_name", "labels", "do_lower_case", "bert_config", VOCABULARY_CHECKSUM),
)
_EPOCHS, EARLIER_EPOCHS = "num_train_epochs", "earlier_epochs"
_CUT_FIELDS = (
    "micro_batch_size",
    "gradient_accumulation_steps",
    "replicas",
    "pad_to_max_length",
    "tokens_per_micro_batch",
)


def describe_run(
    settings: Settings, task: Task, config: BertConfig, tokenizer: WordPieceTokenizer
) -> dict:
    """Returns `run_settings.json` without the part of `describe_training`."""
    return settings.decisive() | {
        "task_name": task.name.lower().replace("-", ""),
        **({"labels": list(task.class_names)} if task.source else {}),
        "bert_config": dataclasses.asdict(config),
        VOCABULARY_CHECKSUM: tokenizer.checksum,
    }


def describe_training(
    settings: Settings, examples_checksum: str, batches: Batches
) -> dict:
    """Returns the part of `run_settings.json` about the data and the batches."""
    return {
        "effective_batch_size": batches.effective_batch_size,
        EXAMPLES_CHECKSUM: examples_checksum,
        "micro_batch_size": AUTO if batches.is_auto else batches.largest_share,
        "gradient_accumulation_steps": batches.gradient_accumulation_steps,
        "replicas": batches.num_replicas,
        "pad_to_max_length": settings.pad_to_max_length,
        "tokens_per_micro_batch": settings.tokens_per_micro_batch,
        FLAGS: settings.as_flags(),
    }


def earlier_epochs(
    output_dir: str,
    num_train_epochs: float,
    count_updates: Callable[[float, Sequence[float]], int],
) -> list[float]:
    """Returns the epochs of the folder's shorter runs, which this one trains on.

    Args:
        output_dir: Output folder of this run.
        num_train_epochs: Epochs of this run.
        count_updates: Function of a run's epochs and those of its shorter runs that
            returns the number of its updates.
    """
    path = pathlib.Path(output_dir) / SETTINGS_FILE
    before = read_settings(path) if path.exists() else {}
    earlier, epochs = before.get(EARLIER_EPOCHS, []), before.get(_EPOCHS, math.inf)
    if num_train_epochs <= epochs:
        return earlier
    is_finished = ends_at(output_dir, count_updates(epochs, earlier))
    return [*earlier, epochs] if is_finished else earlier


def check_same_run(output_dir: str, description: dict) -> bool:
    """Checks that the folder is free, or its run begun with the same settings and files.

    A finished run may have had fewer epochs.

    Args:
        output_dir: Output folder of this run.
        description: Description of this run, training examples and `earlier_epochs`
            included.

    Returns:
        Whether a finished run is trained on.

    Raises:
        ValueError: If it is neither.
    """
    path = pathlib.Path(output_dir) / SETTINGS_FILE
    if path.exists():
        before = read_settings(path)
        now = {k: v for k, v in description.items() if k not in {FLAGS, *_CUT_FIELDS}}
        earlier = before.get(EARLIER_EPOCHS, []), now.pop(EARLIER_EPOCHS)
        if is_trained_on := earlier[0] != earlier[1]:
            del now[_EPOCHS]
        rule, _ = SAME_RUN
        start = latest_checkpoint(output_dir) or f"{output_dir}/model.ckpt-*"
        check_same(
            path,
            now,
            rule,
            "Use the same settings and files (a finished run trains on with more "
            "--num_train_epochs), or another --output_dir, and --init_checkpoint="
            f"{start} there to start from this run's weights.",
        )
        return is_trained_on
    if latest_checkpoint(output_dir):
        raise ValueError(
            "`--output_dir` must be new or hold a run of this program. Received: "
            f"{output_dir}, with checkpoints but no {SETTINGS_FILE}. "
            "Use another --output_dir, and this one's checkpoint as "
            "--init_checkpoint to start from it."
        )
    return False


def check_same_cut(output_dir: str, description: dict) -> None:
    """Raises ValueError if an unfinished update would resume with another cut.

    Args:
        output_dir: Output folder of this run, whose checkpoint can be read.
        description: Description of this run, batches included.
    """
    if read_progress(output_dir).micro_step:
        check_same(
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
        now = {name: description[name] for name in _MODEL_FIELDS if name in description}
        check_same(
            path,
            now,
            "A trained classifier must be used for what it was trained on.",
            "Use the same settings and files, or another classifier.",
        )


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
