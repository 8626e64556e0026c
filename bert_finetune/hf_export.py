"""Writes a trained classifier as a Hugging Face folder, the inverse of `hf_import`.

    transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(folder)

take the folder as it is.
"""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
from safetensors.numpy import save_file

from bert_finetune.bert_config import BertConfig
from bert_finetune.checkpoint import encoder_shapes
from bert_finetune.hf_names import (
    BERT,
    CONFIG,
    HEAD,
    TENSORS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VOCABULARY,
    is_transposed,
)
from bert_finetune.tasks import Task
from bert_finetune.tokenization import WordPieceTokenizer
from estimator_accum.programs.progress import DamagedCheckpointError, read_values

_HEAD_DROPOUT = 0.1  # of google-research/bert's classifier, for every config


def export_classifier(
    checkpoint: str,
    config: BertConfig,
    task: Task,
    tokenizer: WordPieceTokenizer,
    folder: pathlib.Path,
) -> pathlib.Path:
    """Writes `config.json`, `model.safetensors`, `vocab.txt` and the tokenizer's files.

    Args:
        checkpoint: Checkpoint of a trained classifier of `task`.
        config: Configuration of its encoder.
        task: The task, which names the labels.
        tokenizer: Tokenizer of the texts that it was trained on.
        folder: Folder to write; one from an earlier export is replaced at the end.

    Returns:
        `folder`.
    """
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        tensors = _tensors(checkpoint, config)
        save_file(tensors, staging / TENSORS, metadata={"format": "pt"})
        _write_json(staging / CONFIG, _config(config, task, tokenizer))
        # safetensors makes a file for its owner alone.
        shutil.copymode(staging / CONFIG, staging / TENSORS)
        _write_json(staging / TOKENIZER_CONFIG, _tokenizer_config(config, tokenizer))
        tokenizer.save(staging / TOKENIZER)
        vocabulary = tokenizer.vocab_file.read_bytes().decode("utf-8-sig")
        text = vocabulary.replace("\r\n", "\n")
        (staging / VOCABULARY).write_text(text, encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _tensors(checkpoint: str, config: BertConfig) -> dict[str, np.ndarray]:
    encoder = encoder_shapes(config)
    arrays = read_values(checkpoint, [*HEAD, *encoder])
    if missing := {*HEAD, *encoder} - arrays.keys():
        raise DamagedCheckpointError(
            "A checkpoint for export must have all variables of the classifier. "
            f"Received: {checkpoint} without {min(missing)}. Export a checkpoint of this "
            "program's training, with its --bert_config_file."
        )
    tensors = {name: arrays[variable] for variable, name in HEAD.items()}
    for variable in encoder:
        array = arrays.pop(variable)
        if is_transposed(variable):
            array = np.ascontiguousarray(array.T)
        tensors[BERT.prefix + BERT.tensor_names(variable)[0]] = array
    return tensors


def _config(config: BertConfig, task: Task, tokenizer: WordPieceTokenizer) -> dict:
    kind = "multi_label" if task.is_multi_label else "single_label"
    kind = "regression" if task.is_regression else f"{kind}_classification"
    labels = task.class_names or ("LABEL_0",)  # as transformers names one output
    names = {str(number): label for number, label in enumerate(labels)}
    return {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        **dataclasses.asdict(config),
        "position_embedding_type": "absolute",
        "pad_token_id": tokenizer.pad_id,
        "classifier_dropout": _HEAD_DROPOUT,
        "problem_type": kind,
        "finetuning_task": task.name,
        "num_labels": task.num_outputs,
        "id2label": names,
        "label2id": {label: int(number) for number, label in names.items()},
    }


def _tokenizer_config(config: BertConfig, tokenizer: WordPieceTokenizer) -> dict:
    return {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": tokenizer.do_lower_case,
        "model_max_length": config.max_position_embeddings,
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    }


def _write_json(path: pathlib.Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
