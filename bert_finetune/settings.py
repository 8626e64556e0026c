"""Settings of a run: the flags of `estimator-accum train`."""

import dataclasses
import os
from typing import Any, ClassVar

from absl import flags

from bert_finetune.bert_config import ACTIVATIONS
from bert_finetune.own_task import is_task_file
from estimator_accum.programs.batches import AUTO, Batches
from estimator_accum.programs.cluster import STRATEGIES
from estimator_accum.programs.numerals import parse_number
from estimator_accum.programs.parsers import COUNT, Number, Place
from estimator_accum.programs.settings import (
    DATA,
    EVALUATION,
    JOBS,
    SIZES,
    RunSettings,
    flag,
)

HUGGING_FACE = "hf"  # value of --do_export
NONE, LAYERS = "none", "layers"  # values of --recompute, besides AUTO
OPTIMIZERS = ["adamw", "lamb", "adafactor", "sgd"]
LR_SCHEDULES = ["linear", "cosine", "constant"]

_FACTOR = Number(parse_number, "a number > 0 and <= 1", lambda x: 0 < x <= 1)
_SHARE = Number(parse_number, "a number from 0 to 1", lambda x: 0 <= x <= 1)


class _ExportParser(flags.BooleanParser):
    syntactic_help = f"true, false or {HUGGING_FACE}"

    def parse(self, argument: str | int) -> bool | str:
        return HUGGING_FACE if argument == HUGGING_FACE else super().parse(argument)


class _OffParser(flags.BooleanParser):
    syntactic_help = "false, since TPUs are not supported"
    remedy = "Leave it out; --strategy=mirrored trains on all GPUs of this machine."

    def parse(self, argument: str | int) -> bool:
        if super().parse(argument):
            raise ValueError(self.syntactic_help)
        return False


_TEXT = flags.ArgumentParser()
_ADDRESS = flags.ArgumentParser()  # TensorFlow reads it: gs://bucket/bert_config.json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Flags of `estimator-accum train`; an update is 32 x 1 examples by default."""

    usual_sizes: ClassVar[dict[str, Any]] = {
        "default_micro_batch_size": 32,
        "may_be_empty": True,
    }
    ignored: ClassVar[dict[str, flags.ArgumentParser]] = {
        "use_tpu": _OffParser(),
        "tpu_name": _TEXT,
        "tpu_zone": _TEXT,
        "gcp_project": _TEXT,
        "master": _TEXT,
        "num_tpu_cores": COUNT,
        "iterations_per_loop": COUNT,
    }

    # The task and the model.
    task_name: str = flag(
        what="GLUE task: CoLA, SST-2, MRPC, ..., in any case; or a JSON file that "
        "describes a task of your own.",
        parser=Place(),
        decides=True,
    )
    data_dir: str = flag(what="Folder with the task's files.", is_path=True)
    vocab_file: str = flag(
        what="vocab.txt that the BERT model was trained on.", is_path=True
    )
    bert_config_file: str = flag(
        what="bert_config.json: the architecture.", parser=_ADDRESS, is_path=True
    )
    init_checkpoint: str | None = flag(
        None,
        "Checkpoint to start from, e.g. bert_model.ckpt.",
        _ADDRESS,
        decides=True,
        is_path=True,
        group=DATA,
    )
    hidden_act: str | None = flag(
        None,
        "Activation of the encoder. None: from --bert_config_file. gelu_new: GELU by tanh, "
        "which google-research/bert calls gelu.",
        flags.EnumParser(list(ACTIVATIONS)),
        group=DATA,
    )
    do_lower_case: bool = flag(
        True, "Lower-case the text: true for uncased models.", decides=True, group=DATA
    )
    max_seq_length: int = flag(
        128,
        "Longest input [tokens]; longer inputs are truncated.",
        decides=True,
        group=DATA,
    )
    pad_to_max_length: bool = flag(
        False,
        "Pad every example to --max_seq_length, for shapes that never change. False: pad "
        "examples of like length together, to the longest one, and leave padding out of "
        "layers where possible; the results are the same.",
        group=DATA,
    )
    dropout: bool = flag(True, "Use BERT's dropout in training.", decides=True)

    # Jobs.
    do_train: bool = flag(False, "Train on the training set.", group=JOBS)
    do_eval: bool = flag(False, "Evaluate on the dev set.", group=JOBS)
    do_predict: bool = flag(False, "Predict the test set.", group=JOBS)
    do_export: bool | str = flag(
        False,
        f"Export a SavedModel; {HUGGING_FACE}: a folder for Hugging Face's "
        "transformers instead.",
        _ExportParser(),
        group=JOBS,
    )

    # Training.
    tokens_per_micro_batch: int | None = flag(
        None,
        "Maximum number of tokens in a micro-batch, padding included. A replica's share "
        "of an update is split into as few micro-batches as possible; --micro_batch_size "
        "is not used. None with --effective_batch_size, no other size and "
        "--strategy=none: chosen for speed.",
        group=SIZES,
    )
    learning_rate: float = flag(5e-5)
    num_train_epochs: float = flag(
        3.0, "Passes over the training examples.", decides=True
    )
    warmup_proportion: float = flag(
        0.1,
        "Share of the updates in which the rate rises linearly.",
        _SHARE,
        decides=True,
    )
    lr_schedule: str = flag(
        LR_SCHEDULES[0],
        "Learning rate after warm-up. linear: to 0, google-research/bert's own; cosine: "
        "half a wave to 0; constant.",
        flags.EnumParser(LR_SCHEDULES),
        decides=True,
    )
    layerwise_lr_decay: float = flag(
        1.0,
        "Factor of the learning rate from each layer to the one below; classifier and "
        "pooler have the whole rate, the embeddings the lowest.",
        _FACTOR,
        decides=True,
    )
    optimizer: str = flag(
        OPTIMIZERS[0],
        "Optimizer. adamw: google-research/bert's, without bias correction; lamb; "
        "adafactor: little memory for its slots; sgd: with momentum 0.9.",
        flags.EnumParser(OPTIMIZERS),
        decides=True,
    )
    clip_norm: float = flag(1.0)
    save_checkpoints_steps: int = flag(
        1000,
        "Micro-steps from one checkpoint to the next; with a --strategy rounded up to "
        "whole updates (not with --tokens_per_micro_batch); with --micro_batch_size=auto "
        "updates.",
        is_collective=True,
    )
    recompute: str = flag(
        NONE,
        "Recomputation of activations in the backward pass: less memory, more time, the "
        "same weights. none: keep the activations; layers: recompute each layer part by "
        "part; auto: with --micro_batch_size=auto where memory runs out or time is "
        "saved, else where a micro-batch would not fit by the planner.",
        flags.EnumParser([NONE, LAYERS, AUTO]),
    )

    # Evaluation and prediction.
    eval_every_updates: int | None = flag(
        None,
        "Updates from one evaluation during training to the next; the best checkpoint "
        "is kept in best/, and used afterwards. None: no evaluation during training.",
        group=EVALUATION,
    )
    early_stopping: int | None = flag(
        None,
        "Number of evaluations in a row without a better metric after which training "
        "stops. None: training does not stop early.",
        group=EVALUATION,
    )
    eval_batch_size: int = flag(
        8,
        "Examples of --max_seq_length tokens in an evaluation batch; shorter examples form "
        "larger batches of the same number of tokens. The results are the same.",
        group=EVALUATION,
    )
    predict_batch_size: int = flag(
        8,
        "Examples of --max_seq_length tokens in a prediction batch, likewise.",
        group=EVALUATION,
    )

    def division(self, batches: Batches) -> dict[str, Any]:
        """Returns the part of `run_settings.json` that may change between two updates."""
        return {
            "micro_batch_size": AUTO if batches.is_auto else batches.largest_share,
            "gradient_accumulation_steps": batches.gradient_accumulation_steps,
            "replicas": batches.num_replicas,
            "pad_to_max_length": self.pad_to_max_length,
            "tokens_per_micro_batch": self.tokens_per_micro_batch,
        }

    def as_flags(self) -> dict[str, Any]:
        """Returns the given flags by name; the file of a task by its absolute path."""
        values = super().as_flags()
        if is_task_file(self.task_name):
            values["task_name"] = os.path.abspath(self.task_name)
        return values

    @property
    def is_training(self) -> bool:
        """True if the run writes checkpoints, and needs its folder for itself."""
        return self.do_train

    @property
    def is_cut_for_speed(self) -> bool:
        """True if only the examples of an update are given, not how they are split."""
        cuts = self.micro_batch_size, self.gradient_accumulation_steps
        return (
            self.effective_batch_size is not None
            and (*cuts, self.tokens_per_micro_batch) == (None, None, None)
            and not self.pad_to_max_length
            and self.strategy == "none"
        )

    @property
    def evaluates_in_training(self) -> bool:
        """True if training stops for evaluations."""
        return self.do_train and self.eval_every_updates is not None

    def check(self) -> None:
        """Raises ValueError with one sentence if flags exclude one another."""
        jobs = ("do_train", "do_eval", "do_predict", "do_export")
        if not any(getattr(self, job) for job in jobs):
            raise ValueError(
                "At least one of `--do_train`, `--do_eval`, `--do_predict` and "
                "`--do_export` must be true. Received: none of them. Use "
                "--do_train=true to train."
            )
        if self.init_checkpoint == "":
            raise ValueError(
                "`--init_checkpoint` must name a checkpoint. Received: none. Use "
                "--init_checkpoint=bert_model.ckpt, or leave the flag out to start from "
                "random weights."
            )
        if self.early_stopping is not None and self.eval_every_updates is None:
            raise ValueError(
                "`--early_stopping` must be given evaluations to count. Received: "
                f"{self.early_stopping}, without --eval_every_updates. Add "
                "--eval_every_updates=100."
            )
        if self.eval_every_updates is not None and self.strategy in STRATEGIES[2:]:
            raise ValueError(
                "`--eval_every_updates` must be left out in a cluster, whose tasks train "
                f"to the end. Received: {self.eval_every_updates}, with "
                f"--strategy={self.strategy}. Use --strategy=none or mirrored, or leave "
                "it out."
            )
        if self.tokens_per_micro_batch is not None:
            self._check_tokens()

    def _check_tokens(self) -> None:
        """Raises ValueError if micro-batches cannot be split by tokens."""
        if self.strategy == "parameter_server":
            raise ValueError(
                "`--tokens_per_micro_batch` must be left out with parameter servers, "
                "whose updates have the same number of micro-steps. Received: "
                f"{self.tokens_per_micro_batch}. Use --micro_batch_size."
            )
        others = {
            "--pad_to_max_length": self.pad_to_max_length,
            f"--micro_batch_size={AUTO}": self.micro_batch_size == AUTO,
        }
        for name, is_given in others.items():
            if is_given:
                raise ValueError(
                    f"`--tokens_per_micro_batch` cannot be combined with {name}. "
                    "Received: both flags. Leave one out."
                )
