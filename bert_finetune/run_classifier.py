r"""Fine-tunes BERT on a GLUE task, with gradient accumulation.

The flags are those of google-research/bert's `run_classifier.py`, plus
`--gradient_accumulation_steps`: 8 x 4 trains like 32, in the memory of 8.

    estimator-accum train --task_name=CoLA --do_train=true \
        --do_eval=true --data_dir=glue/CoLA --vocab_file=bert/vocab.txt \
        --bert_config_file=bert/bert_config.json \
        --init_checkpoint=bert/bert_model.ckpt --max_seq_length=128 \
        --train_batch_size=8 --gradient_accumulation_steps=4 --output_dir=cola_output

A stopped run resumes from its last checkpoint when it is started again with the same
flags.
"""

import math
import os
import pathlib
import sys

if __name__ == "__main__":  # also runs from a clone that is not installed
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from absl import flags, logging  # noqa: F401, the second defines --verbosity

from bert_finetune.bert_config import ACTIVATIONS
from bert_finetune.settings import (
    HUGGING_FACE,
    NONE,
    RECOMPUTE,
    Settings,
    check_settings,
    flags_of,
)
from estimator_accum.programs.batches import micro_batch_size_of
from estimator_accum.programs.cluster import STRATEGIES, Cluster, read_cluster_of
from estimator_accum.programs.config import define_config_flags
from estimator_accum.programs.program import Program

FLAGS = flags.FLAGS

## Required
flags.DEFINE_string("task_name", None, "GLUE task: CoLA, SST-2, MRPC, ...; any case.")
flags.DEFINE_string("data_dir", None, "Folder with the task's .tsv files.")
flags.DEFINE_string("vocab_file", None, "vocab.txt that the BERT model was trained on.")
flags.DEFINE_string("bert_config_file", None, "bert_config.json: the architecture.")
flags.DEFINE_string("output_dir", None, "Folder for checkpoints and results.")

## What to do
flags.DEFINE_bool("do_train", False, "Train on the training set.")
flags.DEFINE_bool("do_eval", False, "Evaluate on the dev set.")
flags.DEFINE_bool("do_predict", False, "Predict the test set.")


class _ExportParser(flags.BooleanParser):
    syntactic_help = f"true, false or {HUGGING_FACE}"

    def parse(self, argument: str | int) -> bool | str:
        return HUGGING_FACE if argument == HUGGING_FACE else super().parse(argument)


flags.DEFINE_flag(
    flags.Flag(
        _ExportParser(),
        None,
        "do_export",
        False,
        f"Export a SavedModel; {HUGGING_FACE}: a folder for Hugging Face's "
        "transformers instead.",
        boolean=True,
    )
)

## Model
flags.DEFINE_string(
    "init_checkpoint", None, "Checkpoint to start from, e.g. bert_model.ckpt."
)
flags.DEFINE_enum(
    "hidden_act",
    None,
    ACTIVATIONS,
    "Activation of the encoder. None: that in --bert_config_file. gelu_new: GELU by "
    "tanh, as google-research/bert computes what its files call gelu.",
)
flags.DEFINE_bool(
    "do_lower_case", True, "Lower-case the text: true for uncased models."
)
flags.DEFINE_integer(
    "max_seq_length", 128, "Longest input [tokens]; longer ones are cut."
)
flags.DEFINE_bool(
    "pad_to_max_length",
    False,
    "Pad every example to --max_seq_length, for shapes that never change. False: pad "
    "examples of like length together, to the longest one, and leave padding out of "
    "layers where possible; the results are the same.",
)
flags.DEFINE_bool("dropout", True, "Use BERT's dropout in training.")

## Training
flags.DEFINE_integer(
    "train_batch_size",
    None,
    "Micro-batch: examples of one forward and backward pass of one replica. 32, unless "
    "--effective_batch_size and --gradient_accumulation_steps say otherwise.",
)
flags.DEFINE_string(
    "micro_batch_size",
    None,
    "Another name of --train_batch_size; auto: each replica takes its share of "
    "--effective_batch_size at once, in twice as many micro-batches whenever memory runs "
    "out.",
)
flags.DEFINE_integer(
    "effective_batch_size",
    None,
    "Examples of one update, over all micro-steps and replicas of any number. "
    "None: train_batch_size x gradient_accumulation_steps x replicas.",
)
flags.DEFINE_integer(
    "tokens_per_micro_batch",
    None,
    "Most tokens of a micro-batch, padding included. A replica's share of an update is "
    "cut into as few micro-batches as possible; --train_batch_size does not cut it.",
)
flags.DEFINE_integer(
    "gradient_accumulation_steps",
    None,
    "Micro-batches of one replica that make one update. 1, unless "
    "--effective_batch_size says otherwise.",
)
flags.DEFINE_integer(
    "gradient_accumulation_multiplier",
    None,
    "Another name of --gradient_accumulation_steps.",
)
flags.DEFINE_float("learning_rate", 5e-5, "Peak learning rate of AdamW.")
flags.DEFINE_float("num_train_epochs", 3.0, "Passes over the training examples.")
flags.DEFINE_float(
    "warmup_proportion", 0.1, "Share of the updates in which the rate rises linearly."
)
flags.DEFINE_float(
    "clip_norm", 1.0, "Largest global norm of an update's gradient; 0 does not clip."
)
flags.DEFINE_integer(
    "save_checkpoints_steps",
    1000,
    "Micro-steps from one checkpoint to the next; with a --strategy rounded up to whole "
    "updates (not with --tokens_per_micro_batch); with --micro_batch_size=auto updates.",
)
flags.DEFINE_integer(
    "seed",
    0,
    "Random seed of the examples' order, dropout and the classifier's first weights.",
)

## Several devices
flags.DEFINE_enum(
    "strategy",
    "none",
    STRATEGIES,
    "Devices that train. none: one; mirrored: each GPU of this machine; multi_worker: "
    "the tasks of a TF_CONFIG cluster or a Slurm step, each started with the same flags.",
)
flags.DEFINE_integer(
    "watchdog_secs",
    300,
    "Seconds without a micro-step after which a task of a cluster ends itself, with "
    "exit code 75. Without this end, a task that has lost another one waits for ever.",
)

flags.DEFINE_enum(
    "recompute",
    NONE,
    RECOMPUTE,
    "Recomputation of activations in the backward pass: less memory, more time, the same "
    "weights. none: keep the activations; layers: recompute each layer part by part; "
    "auto: with --micro_batch_size=auto where memory runs out or time is saved, else "
    "where a micro-batch would not fit by the planner.",
)

## Evaluation and prediction
flags.DEFINE_integer(
    "eval_every_updates",
    None,
    "Updates from one evaluation during training to the next; the best checkpoint is "
    "kept in best/, and used afterwards. None: no evaluation during training.",
)
flags.DEFINE_integer(
    "early_stopping",
    None,
    "Evaluations in a row without a better metric after which training stops. None: "
    "training does not stop early.",
)
flags.DEFINE_integer("eval_batch_size", 8, "Examples per evaluation batch.")
flags.DEFINE_integer("predict_batch_size", 8, "Examples per prediction batch.")

## The program itself
define_config_flags(FLAGS)
flags.declare_key_flag("verbosity")  # so that --help shows it

_REQUIRED = ("task_name", "data_dir", "vocab_file", "bert_config_file", "output_dir")


def settings_from_flags() -> Settings:
    """Returns the flags as settings.

    Raises:
        ValueError: If a required flag is missing, or a value is out of its range.
    """
    missing = [f"--{name}" for name in _REQUIRED if not FLAGS[name].value]
    if missing:
        raise ValueError(
            f"The flags {', '.join('--' + name for name in _REQUIRED)} must be given. "
            f"Received: none for {', '.join(missing)}. See --help."
        )
    if not 0 <= FLAGS.clip_norm < math.inf:
        raise ValueError(
            "`--clip_norm` must be a finite number >= 0. "
            f"Received: {FLAGS.clip_norm}. Use 0 to turn clipping off."
        )
    values = {name: FLAGS[name].value for name in Settings.__dataclass_fields__}
    values["clip_norm"] = FLAGS.clip_norm or None
    values["train_batch_size"] = _train_batch_size()
    values["gradient_accumulation_steps"] = _gradient_accumulation_steps()
    return Settings(**values)


def _train_batch_size() -> int | str | None:
    size, other_name = FLAGS.train_batch_size, FLAGS.micro_batch_size
    if other_name is None:
        return size
    other_name = micro_batch_size_of(other_name)
    if size not in (None, other_name):
        raise ValueError(
            "`--train_batch_size` and its other name `--micro_batch_size` must be equal. "
            f"Received: {size} and {other_name}. Give one of them."
        )
    return other_name


def _gradient_accumulation_steps() -> int | None:
    steps = FLAGS["gradient_accumulation_steps"]
    multiplier = FLAGS["gradient_accumulation_multiplier"]
    if multiplier.value is None:
        return steps.value
    if steps.present and steps.value != multiplier.value:
        raise ValueError(
            "`--gradient_accumulation_steps` and its other name "
            "`--gradient_accumulation_multiplier` must be equal. Received: "
            f"{steps.value} and {multiplier.value}. Give one of them."
        )
    return multiplier.value


def main(argv: list[str]) -> None:
    """Checks everything first, then trains, evaluates, predicts and exports."""
    Program(
        name="run_classifier.py",
        jobs="bert_finetune.jobs",
        flag_values=FLAGS,
        usage=lambda: f"{__doc__}\n{FLAGS.module_help(sys.modules[__name__])}",
        read=_read,
        flags_of=flags_of,
        advice="Use a lower --learning_rate, and another --output_dir.",
        writes=lambda settings: settings.do_train,
    ).run(argv)


def _read() -> tuple[Settings, Cluster]:
    settings = settings_from_flags()
    check_settings(settings)
    return settings, read_cluster_of(settings.strategy, os.environ)


if __name__ == "__main__":
    main(sys.argv)
