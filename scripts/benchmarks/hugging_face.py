"""The program of Hugging Face's Trainer: one epoch with dynamic padding.

It prints, as its last line, the examples per second of all updates after the first
fifth, as JSON. Weights are random, of the size given in `bert_config.json`.
"""

import json
import pathlib
import sys
import tempfile
import time

import transformers

from scripts.benchmarks.script_runs import examples_per_sec


class _Clock(transformers.TrainerCallback):
    def __init__(self):
        self.times = []

    def on_step_end(self, *_, **__):
        """Notes the time after every update."""
        self.times.append(time.perf_counter())


def main() -> None:
    """Reads JSON from the command line: the folder and the sizes."""
    spec = json.loads(sys.argv[1])
    folder = pathlib.Path(spec["folder"])
    tokenizer = transformers.BertTokenizerFast(vocab_file=str(folder / "vocab.txt"))
    rows = [
        line.split("\t") for line in (folder / "train.tsv").read_text().splitlines()
    ]
    encoded = tokenizer(
        [row[3] for row in rows], truncation=True, max_length=spec["max_seq_length"]
    )
    examples = [
        {name: values[number] for name, values in encoded.items()}
        | {"labels": int(row[1])}
        for number, row in enumerate(rows)
    ]
    config = transformers.BertConfig.from_json_file(str(folder / "bert_config.json"))
    clock = _Clock()
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = transformers.Trainer(
            model=transformers.BertForSequenceClassification(config),
            args=transformers.TrainingArguments(
                output_dir=output_dir,
                per_device_train_batch_size=spec["micro_batch_size"],
                gradient_accumulation_steps=spec["steps"],
                num_train_epochs=1,
                max_grad_norm=1.0,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=examples,
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
            callbacks=[clock],
        )
        trainer.train()
    examples = spec["micro_batch_size"] * spec["steps"]
    rate = examples_per_sec(clock.times, examples)
    print(json.dumps({"examples_per_sec": rate}))


if __name__ == "__main__":
    main()
