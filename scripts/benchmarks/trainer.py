"""The program of Hugging Face's Trainer, for a Python with transformers 5.

    python -m scripts.benchmarks.trainer FOLDER --output_dir=output --use_cpu --bf16 \
        --per_device_train_batch_size=8 --gradient_accumulation_steps=4

It trains BERT from random weights on FOLDER's train.tsv, with its vocab.txt and
bert_config.json; flags are those of Trainer. `train_metrics.csv` in the output folder
gets the columns that `update_secs` reads.
"""

import csv
import json
import pathlib
import sys
import time

import transformers


def main() -> None:
    """Reads the command line, trains, writes the table."""
    folder, *flags = sys.argv[1:]
    folder = pathlib.Path(folder)
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (arguments,) = parser.parse_args_into_dataclasses(flags)
    tokenizer = transformers.BertTokenizerFast(vocab_file=str(folder / "vocab.txt"))
    rows = [line.split("\t") for line in (folder / "train.tsv").open()]
    examples = [
        {
            **tokenizer(text.strip(), truncation=True, max_length=128),
            "labels": int(label),
        }
        for _, label, _, text in rows
    ]
    config = json.loads((folder / "bert_config.json").read_text())
    config = transformers.BertConfig(**config)
    trainer = transformers.Trainer(
        transformers.BertForSequenceClassification(config),
        arguments,
        train_dataset=examples,
        processing_class=tokenizer,  # pads a micro-batch to its longest example
        callbacks=[_Table(len(examples))],
    )
    trainer.train()


class _Table(transformers.TrainerCallback):
    """Writes examples so far and examples per second of every update."""

    def __init__(self, num_examples: int):
        self._num_examples = num_examples
        self._rows = [("examples", "examples_per_sec")]

    def on_train_begin(self, args, state, control, **_):
        self._done, self._begin = 0, time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        end, batch = time.perf_counter(), args.train_batch_size
        new = batch * args.gradient_accumulation_steps
        new = min(new, self._num_examples - self._done)
        self._done += new
        self._rows.append((self._done, new / (end - self._begin)))
        self._begin = end

    def on_train_end(self, args, state, control, **_):
        path = pathlib.Path(args.output_dir) / "train_metrics.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(self._rows)


if __name__ == "__main__":
    main()
