"""Inputs of a run, read without TensorFlow."""

import dataclasses
import logging
import pathlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bert_finetune.bert_config import BertConfig
from bert_finetune.encoding import EncodedExamples
from bert_finetune.own_task import find_task
from bert_finetune.results import BEST, EVALUATIONS, EXPORT, prediction_files
from bert_finetune.settings import Settings
from bert_finetune.tasks import Example, Task, read_examples
from bert_finetune.token_cache import cached_examples
from bert_finetune.tokenization import (
    WordPieceTokenizer,
    check_case_matches_checkpoint,
    check_max_seq_length,
    check_token_types,
    check_vocabulary,
)
from estimator_accum.programs import inputs
from estimator_accum.programs.cluster import Cluster
from estimator_accum.programs.folder import (
    EVAL_RESULTS,
    SETTINGS_FILE,
    VOCABULARY_CHECKSUM,
    check_output_dir,
)

_ALONE = Cluster()
_logger = logging.getLogger("tensorflow.bert_finetune")


@dataclass(frozen=True)
class Inputs(inputs.Inputs):
    """Task, encoder and examples of a run, read and checked.

    Attributes:
        settings: The user's settings.
        cluster: Cluster of which this process is a task.
        train: Training examples; None without --do_train.
        test: Test rows and examples by name of their submission file.
        checksum: Checksum of the training examples; empty without --do_train.
        task: The task, of GLUE or of one's own.
        config: The encoder's architecture.
        tokenizer: Tokenizer of the examples.
        dev: Dev examples by suffix of their results.
    """

    train: EncodedExamples | None
    test: dict[str, tuple[list[Example], EncodedExamples]]
    task: Task
    config: BertConfig
    tokenizer: WordPieceTokenizer
    dev: dict[str, EncodedExamples]

    def describe_model(self) -> dict[str, Any]:
        """Returns the part of `run_settings.json` that any use of the model needs."""
        return {
            "do_lower_case": self.settings.do_lower_case,
            "task_name": self.task.name.lower().replace("-", ""),
            **(self._own_labels() if self.task.source else {}),
            "bert_config": dataclasses.asdict(self.config),
            VOCABULARY_CHECKSUM: self.tokenizer.checksum,
        }

    def _own_labels(self) -> dict[str, Any]:
        task = self.task
        return {"labels": list(task.class_names), "is_multi_label": task.is_multi_label}


def read(settings: Settings, cluster: Cluster = _ALONE) -> Inputs:
    """Reads and checks all inputs without TensorFlow; writes only the token cache.

    Args:
        settings: The user's settings, which `check` has accepted.
        cluster: Cluster of which this process is a task.

    Raises:
        ValueError: If an input does not fit; the message is one sentence.
    """
    task = find_task(settings.task_name)
    _check_files(settings, task)
    files, folders = _names_of_results(settings, task)
    check_output_dir(settings.output_dir, files=files, folders=folders)
    config = BertConfig.from_json_file(settings.bert_config_file)
    if settings.hidden_act is not None:
        config = dataclasses.replace(config, hidden_act=settings.hidden_act)
    tokenizer = WordPieceTokenizer(settings.vocab_file, settings.do_lower_case)
    check_vocabulary(tokenizer, config.vocab_size)
    is_pair = task.text_b is not None
    check_token_types(config.type_vocab_size, is_pair=is_pair)
    check_max_seq_length(
        settings.max_seq_length,
        is_pair=is_pair,
        max_position_embeddings=config.max_position_embeddings,
    )
    check_case_matches_checkpoint(settings.do_lower_case, settings.init_checkpoint)

    def read_file(file: str, labelled: bool):
        rows = read_examples(task, settings.data_dir, file, labelled=labelled)
        path = pathlib.Path(settings.data_dir) / file
        length = settings.max_seq_length
        return rows, cached_examples(path, rows, tokenizer, length)

    train = None
    if settings.do_train:
        _, train = read_file(task.train_file, labelled=True)
    has_dev = settings.do_eval or settings.evaluates_in_training
    dev = {
        suffix: read_file(file, labelled=True)[1]
        for suffix, file in (task.dev_files if has_dev else {}).items()
    }
    test = {
        name: read_file(file, labelled=False)
        for name, file in (task.test_files if settings.do_predict else {}).items()
    }
    if cluster.is_chief:
        examples = {} if train is None else {task.train_file: train}
        examples |= {task.dev_files[suffix]: dev[suffix] for suffix in dev}
        examples |= {task.test_files[name]: part for name, (_, part) in test.items()}
        _say_truncated(examples, settings.max_seq_length)
    checksum = train.checksum if train is not None else ""
    return Inputs(
        settings, cluster, train, test, checksum, task, config, tokenizer, dev
    )


def _say_truncated(examples: dict[str, EncodedExamples], max_seq_length: int) -> None:
    """Logs the share of each file's examples that are too long, if there are some."""
    shares = [
        f"{part.truncated:,} of {len(part):,} examples in {file} "
        f"({100 * part.truncated / len(part):.2g} %)"
        for file, part in examples.items()
        if part.truncated
    ]
    if shares:
        _logger.info(
            "truncated, since longer than --max_seq_length=%d: %s",
            max_seq_length,
            ", ".join(shares),
        )


def _check_files(settings: Settings, task: Task) -> None:
    """Raises ValueError if a task of one's own lacks a file that the run needs."""
    needed = {
        "train_file": (settings.do_train, task.train_file),
        "dev_file": (
            settings.do_eval or settings.evaluates_in_training,
            task.dev_files,
        ),
        "test_file": (settings.do_predict, task.test_files),
    }
    for key, (is_needed, file) in needed.items():
        if is_needed and not file:
            raise ValueError(
                f"`--task_name` {task.source} must name the {key} that this run needs. "
                "Received: none. Add it, or leave out the job that needs it."
            )


def _names_of_results(
    settings: Settings, task: Task
) -> tuple[Iterable[str], Iterable[str]]:
    """Returns the files and the folders that the run writes, maybe hours later."""
    files, folders = [], []
    if settings.do_train:
        files += ["checkpoint", SETTINGS_FILE]
    if settings.do_eval:
        files += [EVAL_RESULTS]
    if settings.evaluates_in_training:
        files += [EVALUATIONS, f"{BEST}/checkpoint", f"{BEST}/{SETTINGS_FILE}"]
        folders += [BEST]
    if settings.do_eval or settings.evaluates_in_training:
        folders += [f"eval{suffix}" for suffix in task.dev_files]
    if settings.do_predict:
        for names in prediction_files(task).items():
            files += names
    if settings.do_export:
        folders += [EXPORT]
    return files, folders
