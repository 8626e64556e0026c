"""Runs of a tiny BERT on a corpus in CoLA's layout."""

import csv
import dataclasses
import json
import pathlib
import shutil

import numpy as np
import tensorflow as tf

from bert_finetune import inputs, jobs
from bert_finetune.bert_config import BertConfig
from bert_finetune.checkpoint import encoder_shapes, write_checkpoint
from bert_finetune.settings import Settings
from estimator_accum.programs.folder import make_run_folder

WORDS = [f"w{number}" for number in range(20)]
_SIZES = {"vocab_size": 5 + len(WORDS), "hidden_size": 16, "num_hidden_layers": 1}
_SIZES |= {"num_attention_heads": 2, "intermediate_size": 32}
CONFIG = BertConfig(**_SIZES, max_position_embeddings=24)


def write_rows(path: pathlib.Path, count: int, seed: int, make_row) -> None:
    """Writes `count` lines of `make_row(number, label, text)`."""
    random = np.random.default_rng(seed)
    lines = []
    for number in range(count):
        label = int(random.integers(0, 2))
        words = random.choice(WORDS[:10] if label else WORDS[10:], 3 + number % 9)
        lines.append(make_row(number, label, " ".join(words)))
    path.write_text("".join(line + "\n" for line in lines))


def write_cola(folder: pathlib.Path, count: int = 50) -> None:
    """Writes `count` training examples, 20 of dev and 10 of test."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, size, seed in (("train.tsv", count, 0), ("dev.tsv", 20, 1)):
        write_rows(folder / file, size, seed, lambda _, y, text: f"gen\t{y}\t\t{text}")
    write_rows(folder / "test.tsv", 10, 2, lambda number, _, text: f"{number}\t{text}")
    test = folder / "test.tsv"
    test.write_text("index\tsentence\n" + test.read_text())


def write_bert(folder: pathlib.Path, config: BertConfig = CONFIG) -> None:
    """Writes `bert_config.json`, `vocab.txt` and a random `bert_model.ckpt`."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    arrays = {
        name: np.ones(shape, np.float32)
        if name.endswith("gamma")
        else random.normal(0, 0.05, shape).astype(np.float32)
        for name, shape in encoder_shapes(config).items()
    }
    write_checkpoint(arrays, str(folder / "bert_model.ckpt"))
    (folder / "bert_config.json").write_text(json.dumps(dataclasses.asdict(config)))
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("".join(token + "\n" for token in tokens))


def make_settings(
    bert_dir: pathlib.Path, cola_dir: pathlib.Path, output_dir: pathlib.Path
) -> Settings:
    """Returns settings with no job; training is 7 updates in 13 micro-steps of 4."""
    return Settings(
        task_name="CoLA",
        data_dir=str(cola_dir),
        vocab_file=str(bert_dir / "vocab.txt"),
        bert_config_file=str(bert_dir / "bert_config.json"),
        output_dir=str(output_dir),
        init_checkpoint=str(bert_dir / "bert_model.ckpt"),
        max_seq_length=16,
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        num_train_epochs=1.0,
        dropout=False,
        watchdog_secs=60,
    )


def command_line(bert_dir, data_dir, output_dir) -> dict:
    """Returns the flags of `run_classifier.py` needed for training: name -> value."""
    return {
        "task_name": "CoLA",
        "do_train": "true",
        "data_dir": data_dir,
        "vocab_file": bert_dir / "vocab.txt",
        "bert_config_file": bert_dir / "bert_config.json",
        "init_checkpoint": bert_dir / "bert_model.ckpt",
        "max_seq_length": 16,
        "output_dir": output_dir,
    }


def run(settings: Settings, **changes) -> pathlib.Path:
    """Executes a run in this process; returns its output folder."""
    settings = dataclasses.replace(settings, **changes)
    prepared = jobs.prepare(inputs.read(settings))
    make_run_folder(settings.output_dir)
    jobs.execute(prepared)
    return pathlib.Path(settings.output_dir)


def flags_of(settings: Settings, **changes) -> list[str]:
    """Returns the command line of the same run."""
    settings = dataclasses.replace(settings, **changes)
    values = settings.as_flags() | {"output_dir": settings.output_dir}
    return [f"--{name}={value}" for name, value in values.items()]


def copy_at_step(source, folder: pathlib.Path, step: int) -> pathlib.Path:
    """Copies a run as after a kill: the checkpoint of `step` is the last one."""
    shutil.copytree(source, folder)
    for file in folder.glob("model.ckpt-*"):
        if not file.name.startswith(f"model.ckpt-{step}."):
            file.unlink()
    (folder / "checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{step}"\n')
    return folder


def all_variables(folder) -> dict[str, np.ndarray]:
    """Returns every variable of a folder's last checkpoint."""
    reader = tf.train.load_checkpoint(str(folder))
    return {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}


def variables(folder) -> dict[str, np.ndarray]:
    """Returns `all_variables` without the sums of a window."""
    return {n: v for n, v in all_variables(folder).items() if "accumul" not in n}


def metrics(folder) -> list[dict[str, str]]:
    """Returns the rows of `train_metrics.csv`."""
    with open(f"{folder}/train_metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def results(folder) -> dict[str, float]:
    """Returns the content of `eval_results.txt`."""
    lines = pathlib.Path(folder, "eval_results.txt").read_text().splitlines()
    return {name: float(value) for name, value in (line.split(" = ") for line in lines)}
