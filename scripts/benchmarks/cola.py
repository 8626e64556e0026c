"""Examples per second of CoLA fine-tuning: this project, padded, and other projects."""

import dataclasses
import importlib.util
import json
import pathlib
import re
import tempfile

from scripts.benchmarks.models import SIZES, bert_config
from scripts.benchmarks.script_runs import run, update_secs
from scripts.benchmarks.table import Row, make_rows
from scripts.benchmarks.turns import take_turns

_MICRO_BATCH_SIZE, _STEPS, _MAX_SEQ_LENGTH = 8, 4, 128
_OURS, _PADDED, _TRAINER = "this project", "padded to 128", "Hugging Face Trainer"
_ORIGINAL = "original patch, google-research/bert"
# The number of tokens in a micro-batch of the padded run.
_TOKENS = _MICRO_BATCH_SIZE * _MAX_SEQ_LENGTH
_BY_TOKENS = f"this project, --tokens_per_micro_batch={_TOKENS}"
_OPTIONAL = ("torch", "transformers", "accelerate")


def why_not_hugging_face() -> str | None:
    """Returns a sentence that says why the Trainer cannot run here; None if it can."""
    missing = [name for name in _OPTIONAL if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"{_TRAINER} is left out: {', '.join(missing)} cannot be imported."


def cola(size: str, cola_dir: pathlib.Path, examples: int, rounds: int) -> list[Row]:
    """Fine-tunes from random weights with 8 x 4, without evaluating.

    Args:
        size: A name of SIZES.
        cola_dir: Folder with CoLA's train.tsv.
        examples: Number of examples, taken at even distances from the training file.
        rounds: Number of runs of each way, each in its own process.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        _write_inputs(folder, size, cola_dir, examples)
        runs = {
            _PADDED: lambda: _ours(folder, ["--pad_to_max_length"]),
            _OURS: lambda: _ours(folder, []),
            _BY_TOKENS: lambda: _ours(folder, [f"--tokens_per_micro_batch={_TOKENS}"]),
            _ORIGINAL: lambda: _others(folder, "original_bert"),
        }
        if why_not_hugging_face() is None:
            runs[_TRAINER] = lambda: _others(folder, "hugging_face")
        values = take_turns(runs, rounds)
    setting = f"BERT-{size}, {_MICRO_BATCH_SIZE} x {_STEPS}"
    return make_rows("CoLA", setting, "examples a second", values, _PADDED)


def _write_inputs(folder, size: str, cola_dir: pathlib.Path, examples: int) -> None:
    lines = (cola_dir / "train.tsv").read_text().splitlines()
    lines = lines[:: max(1, len(lines) // examples)][:examples]
    (folder / "train.tsv").write_text("".join(f"{line}\n" for line in lines))
    # A vocabulary of the sentences' own words gives as many tokens as a real one.
    words = sorted(set(re.findall(r"\w+|[^\w\s]", " ".join(lines).lower())))
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    unused = range(SIZES[size].vocabulary - len(tokens))
    tokens += [f"[unused{number}]" for number in unused]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    config = dataclasses.replace(
        bert_config(SIZES[size]),
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    (folder / "bert_config.json").write_text(json.dumps(dataclasses.asdict(config)))


def _ours(folder: pathlib.Path, more_flags: list[str]) -> float:
    with tempfile.TemporaryDirectory() as output_dir:
        flags = {
            "task_name": "CoLA",
            "do_train": "true",
            "data_dir": folder,
            "vocab_file": folder / "vocab.txt",
            "bert_config_file": folder / "bert_config.json",
            "max_seq_length": _MAX_SEQ_LENGTH,
            "train_batch_size": _MICRO_BATCH_SIZE,
            "gradient_accumulation_steps": _STEPS,
            "num_train_epochs": 1,
            "save_checkpoints_steps": 10**6,
            "output_dir": output_dir,
        }
        flags = [f"--{name}={value}" for name, value in flags.items()]
        run(["bert_finetune/run_classifier.py", *flags, *more_flags])
        timed = update_secs(pathlib.Path(output_dir))
    return sum(e for e, _ in timed) / sum(secs for _, secs in timed)


def _others(folder: pathlib.Path, module: str) -> float:
    spec = {
        "folder": str(folder),
        "micro_batch_size": _MICRO_BATCH_SIZE,
        "steps": _STEPS,
        "max_seq_length": _MAX_SEQ_LENGTH,
    }
    output = run(["-m", f"scripts.benchmarks.{module}", json.dumps(spec)])
    return json.loads(output.splitlines()[-1])["examples_per_sec"]
