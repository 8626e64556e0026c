"""The part `cola` of `scripts/benchmark.py`: fine-tuning, with the bound of its pace.

The bound of an update is the time of its arithmetic, at the measured rate of the best
matrix products, and of its traffic, at the measured pace of memory:

    dense kernels   6 FLOPs per weight and token that passes it: forward, two gradients;
                    in the last layer all tokens pass keys and values, and only the
                    first one of a sentence passes the rest, and the pooler
    attention       12 H FLOPs per pair of tokens, H numbers wide
    micro-step      reads the kernels' weights, writes their gradients
    update          reads and writes both slots of kernels and word embeddings
"""

import dataclasses
import functools
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator

import numpy as np

from bert_finetune.tokenization import WordPieceTokenizer
from scripts.benchmarks.base import (
    ARRAY_BYTES,
    Row,
    make_rows,
    run_script,
    started,
    take_turns,
    update_secs,
)
from scripts.benchmarks.models import SIZES, Size, bert_config

# Precision -> (flags of Trainer, flags of this project)
PRECISIONS = {
    "float32": ([], []),
    "bfloat16": (["--bf16"], ["--precision=bfloat16"]),
}
_BATCH, _MAX_TOKENS = 32, 128  # examples of an update; tokens of an example
_CUTS = {"8 x 4": (8, 4), "32 x 1": (32, 1)}  # examples and micro-steps
_BY_LENGTH = ["--train_sampling_strategy=group_by_length"]
_DEFAULT = f"--effective_batch_size={_BATCH}"
_BY_TOKENS = "--tokens_per_micro_batch=1024"
# Contender -> (split of its bound, flags)
_TRAINER = {
    "Trainer, 8 x 4": ("8 x 4", []),
    "Trainer, 8 x 4, group_by_length": ("8 x 4", _BY_LENGTH),
    "Trainer, 32 x 1, group_by_length": ("32 x 1", _BY_LENGTH),
}
_OURS = {
    "this project, 8 x 4": (
        "8 x 4",
        ["--train_batch_size=8", "--gradient_accumulation_steps=4"],
    ),
    f"this project, {_DEFAULT}": ("32 x 1", [_DEFAULT]),
    f"this project, {_BY_TOKENS}": ("32 x 1", [_DEFAULT, _BY_TOKENS]),
}


def cola(size: str, flags) -> Iterator[list[Row]]:
    """Compares Hugging Face's Trainer, this project and the bound."""
    with tempfile.TemporaryDirectory() as folder:
        lengths = _write_cola(pathlib.Path(folder), size, flags)
        runs, bound_of = {}, {}
        for way, bound, *command in _ways(folder, flags):
            runs[way] = functools.partial(_examples_per_sec, *command)
            bound_of[way] = bound
        tokens = {cut: round(n * lengths.mean()) for cut, (n, _) in _CUTS.items()}
        spec = {"hidden": SIZES[size].hidden, "tokens": tokens}
        spec["precisions"] = flags.precisions
        meters = {"products": ("products", spec)}
        meters["memory"] = ("bandwidth", {"array_bytes": ARRAY_BYTES})
        with started(meters) as contenders:
            products, memory = contenders["products"], contenders["memory"]
            runs["products"] = products.run
            # The best of some calls: after a pause the first takes three times as long.
            runs["memory"] = lambda: min(memory.run()["secs"] for _ in range(9))
            values = take_turns(runs, flags.starts)
    paces = list(zip(values.pop("products"), values.pop("memory"), strict=True))
    bounds = {}
    for name in paces[0][0]:  # "bound, 8 x 4, float32"
        fixed = SIZES[size], lengths, _CUTS[name.split(", ")[1]][1]
        bounds[name] = [
            bound_examples_per_sec(*fixed, per_flop[name], per_byte)
            for per_flop, per_byte in paces
        ]
    setting = f"BERT-{size}, {_BATCH} sentences of {lengths.mean():.1f} tokens"
    shared = "CoLA", setting, "examples a second", values | bounds, next(iter(values))
    yield make_rows(*shared, {way: bounds[bound_of[way]] for way in bound_of})


def _ways(folder: str, flags) -> Iterator[tuple]:
    """Yields (contender, its bound, its Python, that Python's command line)."""
    trainer = ["scripts.benchmarks.trainer", folder, "--use_cpu", "--disable_tqdm=true"]
    trainer += ["--save_strategy=no", "--report_to=none"]
    ours = ["bert_finetune.run_classifier", "--task_name=CoLA", "--do_train"]
    ours += [f"--data_dir={folder}", f"--vocab_file={folder}/vocab.txt"]
    ours += [f"--bert_config_file={folder}/bert_config.json"]
    ours += [f"--max_seq_length={_MAX_TOKENS}", "--save_checkpoints_steps=1000000"]
    for precision in flags.precisions:
        low_trainer, low_ours = PRECISIONS[precision]
        ways = []
        for name, (cut, more) in _TRAINER.items() if flags.trainer_python else ():
            batch, steps = _CUTS[cut]
            sizes = [f"--per_device_train_batch_size={batch}"]
            sizes += [f"--gradient_accumulation_steps={steps}"]
            command = trainer + more + sizes + low_trainer
            ways.append((name, cut, flags.trainer_python, command))
        for name, (cut, more) in _OURS.items():
            ways.append((name, cut, sys.executable, ours + more + low_ours))
        for name, cut, *program in ways:
            yield f"{name}, {precision}", f"bound, {cut}, {precision}", *program


def _examples_per_sec(python: str, command: list[str]) -> float:
    """Trains for an epoch; the first fifth of the updates is not timed."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", *command, "--num_train_epochs=1", f"--output_dir={folder}"]
        run_script(command, python)
        timed = update_secs(pathlib.Path(folder))
    return sum(e for e, _ in timed) / sum(secs for _, secs in timed)


def _write_cola(folder: pathlib.Path, size: str, flags) -> np.ndarray:
    """Writes data, vocabulary and configuration; returns each sentence's tokens."""
    lines = (flags.cola_dir / "train.tsv").read_text().splitlines()
    lines = lines[:: max(1, len(lines) // flags.cola_examples)][: flags.cola_examples]
    (folder / "train.tsv").write_text("".join(f"{line}\n" for line in lines))
    # A vocabulary of the sentences' own words gives as many tokens as a real one.
    words = sorted(set(re.findall(r"\w+|[^\w\s]", " ".join(lines).lower())))
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    unused = range(SIZES[size].vocabulary - len(tokens))
    tokens += [f"[unused{number}]" for number in unused]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    config = dataclasses.asdict(bert_config(SIZES[size], dropout=0.1))
    (folder / "bert_config.json").write_text(json.dumps(config))
    tokenizer = WordPieceTokenizer(folder / "vocab.txt", do_lower_case=True)
    sentences = [line.split("\t")[3] for line in lines]
    encoded = tokenizer.encode_batch(sentences, None, _MAX_TOKENS)
    return np.array([len(example.input_ids) for example in encoded])


def bound_examples_per_sec(
    size: Size,
    lengths: np.ndarray,
    steps: int,
    secs_per_flop: float,
    secs_per_byte: float,
) -> float:
    """Returns the bound; `lengths` are the tokens of each example, `steps` is K."""
    kernels = (12 * size.layers + 1) * size.hidden**2  # weights; the pooler has H * H
    slots = 2 * (kernels + size.vocabulary * size.hidden)
    update_bytes = 4 * (2 * steps * kernels + 2 * slots)
    example_secs = secs_per_flop * flops(size, lengths).mean()
    return 1 / (example_secs + secs_per_byte * update_bytes / _BATCH)


def flops(size: Size, tokens: np.ndarray) -> np.ndarray:
    """Returns FLOPs of one sentence's forward and backward pass by its tokens."""
    layers, hidden = size.layers - 1, size.hidden  # all but the last one
    weights = hidden**2 * ((12 * layers + 2) * tokens + 11)
    return 6 * weights + 12 * hidden * tokens * (layers * tokens + 1)
