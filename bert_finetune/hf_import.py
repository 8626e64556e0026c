"""Converts a Hugging Face folder to a checkpoint of google-research/bert's layout.

Every variable of the encoder is looked up under its Hugging Face name; every encoder
tensor in the folder must be used.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from bert_finetune.bert_config import BertConfig
from bert_finetune.download import staging_folder
from bert_finetune.hf_config import read_config
from bert_finetune.hf_names import (
    ADAPTER,
    CONFIG,
    ONE_MODEL,
    POOLER,
    TENSORS,
    TOKEN_TYPES,
    TOKENIZER,
    VOCABULARY,
    Architecture,
    is_transposed,
)
from bert_finetune.hf_tokenizer import TokenizerOptions, read_tokenizer_options
from bert_finetune.hf_tokenizer_json import TokenizerFile, matched, read_tokenizer_file
from bert_finetune.tokenization import MAX_WORD_CHARACTERS
from estimator_accum.compat import prefer_keras_2
from estimator_accum.programs.folder import fault_of_checkpoints, fault_of_place
from estimator_accum.programs.program import quiet_import

_CONSTANTS = (".position_ids", ".token_type_ids")  # in some files; not weights
_PARTS = ("embeddings", "encoder.", "transformer.", "pooler.")  # of encoders
_DTYPES = ("F32", "F16", "BF16", "F64")
_TO_SAFETENSORS = (
    "To convert it, run once where PyTorch is: `from transformers import {model}; "
    '{model}.from_pretrained("{folder}").save_pretrained("{folder}")`.'
)


class ImportSummary(NamedTuple):
    """Summary of a checkpoint that `import_checkpoint` has written."""

    config: BertConfig
    num_variables: int
    is_pooler_new: bool  # the folder has no pooler: it starts untrained
    are_token_types_new: bool  # the model has none: they start at zero
    options: TokenizerOptions
    tokenizer_file: TokenizerFile | None  # None: the folder has no tokenizer.json

    @property
    def warnings(self) -> list[str]:
        """Sentences about the checkpoint, for its user; may be empty."""
        sentences = []
        if self.is_pooler_new:
            sentences.append(
                "The model has no pooler: bert/pooler/dense is new and untrained."
            )
        if self.are_token_types_new:
            sentences.append(
                f"The model has no token types: {TOKEN_TYPES} is new and zero."
            )
        if self.options.is_lower_case is False:
            sentences.append(
                "Its vocabulary is cased: fine-tune it with --do_lower_case=false."
            )
        most = self.options.model_max_length
        if most is not None and most < self.config.max_position_embeddings:
            sentences.append(
                f"It is for texts of at most {most} tokens: fine-tune it with "
                f"--max_seq_length={most} or less."
            )
        file = self.tokenizer_file
        if file is not None and file.max_word_characters < MAX_WORD_CHARACTERS:
            sentences.append(
                f"A word of {file.max_word_characters + 1} to {MAX_WORD_CHARACTERS} "
                "characters is split as in google-research/bert; in Hugging Face it is "
                "[UNK]."
            )
        return sentences


def import_checkpoint(
    input_dir: str | pathlib.Path, output_dir: str | pathlib.Path
) -> ImportSummary:
    """Writes `bert_model.ckpt`, `bert_config.json` and `vocab.txt`.

    For a folder without a pooler, such as that of a masked language model, the pooler
    is untrained, as in Hugging Face: truncated normal kernel (seed 0), zero bias. For
    a DistilBERT, the embeddings of token types are zero.

    Args:
        input_dir: Folder with `config.json`, `vocab.txt` or `tokenizer.json`, and
            `model.safetensors`, of a BERT, of a DistilBERT or of an ELECTRA whose
            embeddings are as wide as its layers, with or without a head.
        output_dir: A new or an empty folder. It is made or filled at the end.

    Raises:
        TypeError, ValueError: If a file is missing or does not fit, the model is another
            one, or `output_dir` is not empty. The message is for the user.
    """
    absolute = os.path.abspath(output_dir)
    if fault := fault_of_place(output_dir) or fault_of_checkpoints(absolute):
        raise ValueError(f"`--output_dir` {fault}")
    source, destination = pathlib.Path(input_dir), pathlib.Path(output_dir).resolve()
    _check_empty(destination)
    _check_files(source, [CONFIG])
    _check_no_adapter(source / ADAPTER)
    config, architecture = read_config(source / CONFIG)
    has_file = (source / TOKENIZER).is_file()
    names = [TENSORS] if has_file else [VOCABULARY, TENSORS]
    _check_files(source, names, f"{architecture.class_name}Model")
    file = read_tokenizer_file(source / TOKENIZER, config.vocab_size)
    vocabulary = _read_vocabulary(source / VOCABULARY, config, file)
    has_token_types = TOKEN_TYPES not in architecture.absent
    text = vocabulary.decode("utf-8-sig", "replace")
    tokens = [line.strip() for line in text.split("\n")]
    options = read_tokenizer_options(source, tokens, file, has_token_types)
    prefer_keras_2()
    with quiet_import(sys.argv[1:]):  # of TensorFlow: seconds
        from bert_finetune import checkpoint

    shapes = checkpoint.encoder_shapes(config)
    arrays = _read_variables(source / TENSORS, shapes, architecture)
    is_pooler_new = not any(variable.startswith(POOLER) for variable in arrays)
    if is_pooler_new:
        arrays |= _untrained_pooler(config)
    if not has_token_types:
        arrays[TOKEN_TYPES] = np.zeros(shapes[TOKEN_TYPES], np.float32)
    with staging_folder(destination) as staging:
        content = staging / "content"
        checkpoint.write_checkpoint(arrays, str(content / "bert_model.ckpt"))
        text = json.dumps(dataclasses.asdict(config), indent=2)
        (content / "bert_config.json").write_text(text + "\n", encoding="utf-8")
        (content / VOCABULARY).write_bytes(vocabulary)
    return ImportSummary(
        config, len(arrays), is_pooler_new, not has_token_types, options, file
    )


def _check_files(
    folder: pathlib.Path, names: Sequence[str], model: str = "BertModel"
) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return
    remedy = "Give the folder of the model, with all its files."
    received = f"{folder}, without {' and '.join(missing)}"
    if missing == [TENSORS] and (folder / "pytorch_model.bin").is_file():
        received = f"{folder}, with pytorch_model.bin alone"
        remedy = _TO_SAFETENSORS.format(folder=folder, model=model)
    elif missing == [TENSORS] and (folder / f"{TENSORS}.index.json").is_file():
        received = f"{folder}, with {TENSORS} in several pieces"
        remedy = 'Save the model with `save_pretrained(..., max_shard_size="100GB")`.'
    raise ValueError(
        f"`--input_dir` must hold {CONFIG}, {VOCABULARY} or {TOKENIZER}, and {TENSORS}. "
        f"Received: {received}. {remedy}"
    )


def _check_no_adapter(path: pathlib.Path) -> None:
    if path.exists():
        raise ValueError(
            "`--input_dir` must hold a model without an adapter, which changes the "
            f"weights in {TENSORS}. Received: {path}. Merge it where PyTorch is, with "
            "peft's `merge_and_unload`, and save the model with `save_pretrained`."
        )


def _check_empty(folder: pathlib.Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            "`--output_dir` must be a new or an empty folder. Received: "
            f"{folder}, which holds something. Remove it or name another one."
        )


def _read_vocabulary(
    path: pathlib.Path, config: BertConfig, file: TokenizerFile | None
) -> bytes:
    """Returns the content of `vocab.txt`, from `tokenizer.json` where there is none."""
    if not path.is_file():
        return "".join(f"{token}\n" for token in file.tokens).encode()
    content = path.read_bytes()
    tokens = content.rstrip(b"\r\n").split(b"\n")
    if not tokens[0] or len(tokens) > config.vocab_size:
        count = len(tokens) if tokens[0] else 0
        raise ValueError(
            f"{path} must hold 1 to `vocab_size` = {config.vocab_size} tokens, one a "
            f"line. Received: {count}. {ONE_MODEL}"
        )
    if file is not None:
        _check_same(path, content.decode("utf-8-sig", "replace"), file.tokens)
    return content


def _check_same(path: pathlib.Path, text: str, tokens: Sequence[str]) -> None:
    """Raises ValueError unless `vocab.txt` has the tokens of `tokenizer.json`."""
    lines = [matched(line.strip()) for line in text.split("\n")]
    pairs = itertools.zip_longest(lines, tokens, fillvalue="")
    for number, (line, token) in enumerate(pairs):
        if line != token:
            raise ValueError(
                f"{path} must hold the tokens of {TOKENIZER}, one a line. Received: "
                f"{line!r} in line {number + 1}, and {token!r} with the id {number}. "
                f"{ONE_MODEL}"
            )


def _read_variables(
    path: pathlib.Path,
    shapes: Mapping[str, tuple[int, ...]],
    architecture: Architecture,
) -> dict[str, np.ndarray]:
    """Returns BERT's variables that the encoder has; a BERT may have no pooler."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = set(file.keys())
            is_headed = any(name.startswith(architecture.prefix) for name in names)
            prefix = architecture.prefix if is_headed else ""
            absent = architecture.absent
            if not any(name.startswith(f"{prefix}pooler.") for name in names):
                absent += (POOLER,)
            candidates = {
                variable: [
                    prefix + name for name in architecture.tensor_names(variable)
                ]
                for variable in shapes
                if not variable.startswith(absent)
            }
            sources = {v: _find(path, names, c) for v, c in candidates.items()}
            _check_all_used(path, names - set(sources.values()), prefix)
            return {
                variable: _read(path, file, name, variable, shapes[variable])
                for variable, name in sources.items()
            }
    except SafetensorError as error:
        raise ValueError(
            f"{path} must be a safetensors file. Received: one that cannot be read "
            f"({error}). Download it again."
        ) from error


def _find(path: pathlib.Path, names: set[str], candidates: Sequence[str]) -> str:
    for name in candidates:
        if name in names:
            return name
    raise ValueError(
        f"{path} must hold the tensor {' or '.join(candidates)}. Received: "
        f"{len(names)} others. {ONE_MODEL}"
    )


def _check_all_used(path: pathlib.Path, unused: set[str], prefix: str) -> None:
    """Raises ValueError for layers beyond config.json's, adapters and the like."""
    parts = tuple(prefix + part for part in _PARTS)
    surplus = sorted(
        name
        for name in unused
        if name.startswith(parts) and not name.endswith(_CONSTANTS)
    )
    if surplus:
        raise ValueError(
            f"{path} must hold no tensors of an encoder that {CONFIG} does not describe. "
            f"Received: {len(surplus)} more tensors, such as {surplus[0]}. {ONE_MODEL}"
        )


def _read(
    path: pathlib.Path, file, name: str, variable: str, shape: tuple[int, ...]
) -> np.ndarray:
    transposes = is_transposed(variable)
    expected = list(shape[::-1] if transposes else shape)
    stored = file.get_slice(name)
    if list(stored.get_shape()) != expected or stored.get_dtype() not in _DTYPES:
        raise ValueError(
            f"{name} in {path} must have the shape {expected} and one of the types "
            f"{', '.join(_DTYPES)}. Received: {stored.get_shape()}, "
            f"{stored.get_dtype()}. {ONE_MODEL}"
        )
    array = file.get_tensor(name).astype(np.float32)
    return np.ascontiguousarray(array.T) if transposes else array


def _untrained_pooler(config: BertConfig) -> dict[str, np.ndarray]:
    width = config.hidden_size
    generator = np.random.default_rng(seed=0)
    kernel = generator.standard_normal([width, width])
    while (is_far := np.abs(kernel) > 2).any():  # truncated at two deviations
        kernel[is_far] = generator.standard_normal(is_far.sum())
    return {
        "bert/pooler/dense/kernel": np.float32(kernel * config.initializer_range),
        "bert/pooler/dense/bias": np.zeros([width], np.float32),
    }
