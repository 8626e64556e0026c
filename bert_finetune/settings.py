"""Settings of a run: one frozen dataclass and its checks."""

import dataclasses
from typing import Any

from estimator_accum.programs.batches import AUTO, Batches, share_out
from estimator_accum.programs.config import flags_of as _flags_of
from estimator_accum.programs.settings import check_positive, check_seed

HUGGING_FACE = "hf"  # value of --do_export

_DEFAULT_TRAIN_BATCH_SIZE = 32


# Values of --recompute.
NONE, LAYERS = "none", "layers"
RECOMPUTE = (NONE, LAYERS, AUTO)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Values of the flags of `run_classifier.py`; each field is the flag of that name.

    Sizes are in examples, except `max_seq_length` [tokens], `save_checkpoints_steps`
    [micro-steps], `gradient_accumulation_steps` [micro-steps per update],
    `eval_every_updates` [updates], `early_stopping` [evaluations] and `watchdog_secs`.
    `tokens_per_micro_batch` None cuts by examples. `do_export` is a bool or
    `HUGGING_FACE`. `hidden_act` None is the one in `bert_config_file`. For
    `effective_batch_size`, `train_batch_size`, which may be `AUTO`, and
    `gradient_accumulation_steps`, None follows from the others; see `batches_of`.
    """

    task_name: str
    data_dir: str
    vocab_file: str
    bert_config_file: str
    output_dir: str
    init_checkpoint: str | None
    do_lower_case: bool
    max_seq_length: int
    pad_to_max_length: bool
    tokens_per_micro_batch: int | None
    do_train: bool
    do_eval: bool
    do_predict: bool
    do_export: bool | str
    strategy: str
    watchdog_secs: int
    effective_batch_size: int | None
    train_batch_size: int | str | None
    eval_batch_size: int
    predict_batch_size: int
    learning_rate: float
    num_train_epochs: float
    warmup_proportion: float
    clip_norm: float | None
    gradient_accumulation_steps: int | None
    save_checkpoints_steps: int
    dropout: bool
    seed: int
    eval_every_updates: int | None = None
    early_stopping: int | None = None
    recompute: str = NONE
    hidden_act: str | None = None


def batches_of(settings: Settings, num_replicas: int) -> Batches:
    """Returns how the examples of each update are divided; see `share_out`."""
    return share_out(
        settings.effective_batch_size,
        settings.train_batch_size,
        settings.gradient_accumulation_steps,
        num_replicas,
        default_micro_batch_size=_DEFAULT_TRAIN_BATCH_SIZE,
        may_be_empty=True,
        micro_flag="--train_batch_size",
    )


def flags_of(settings: Settings) -> dict[str, Any]:
    """Returns the settings as values of flags, for `--config`."""
    return _flags_of(
        settings,
        ("data_dir", "vocab_file", "bert_config_file", "init_checkpoint"),
        clip_norm=settings.clip_norm or 0.0,
    )


_POSITIVE = (
    "max_seq_length",
    "tokens_per_micro_batch",
    "effective_batch_size",
    "train_batch_size",
    "eval_batch_size",
    "predict_batch_size",
    "gradient_accumulation_steps",
    "save_checkpoints_steps",
    "eval_every_updates",
    "early_stopping",
    "watchdog_secs",
    "learning_rate",
    "num_train_epochs",
)


def check_settings(settings: Settings) -> None:
    """Raises ValueError with one sentence if a value is invalid.

    Files are checked later, by the functions that read them.
    """
    jobs = ("do_train", "do_eval", "do_predict", "do_export")
    if not any(getattr(settings, job) for job in jobs):
        raise ValueError(
            "At least one of --do_train, --do_eval, --do_predict and --do_export must "
            "be true. Received: none of them. Use --do_train=true to train."
        )
    if settings.init_checkpoint == "":
        raise ValueError(
            "`--init_checkpoint` must name a checkpoint. Received: nothing. Use "
            "--init_checkpoint=bert_model.ckpt, or leave the flag out to start from "
            "random weights."
        )
    check_positive(settings, _POSITIVE)
    _check_evaluations(settings)
    if settings.tokens_per_micro_batch is not None:
        _check_cut_by_tokens(settings)
    if not 0 <= settings.warmup_proportion <= 1:
        raise ValueError(
            "`--warmup_proportion` must be from 0 to 1. "
            f"Received: {settings.warmup_proportion}. Use 0.1 for a tenth of training."
        )
    check_seed(settings.seed)


def _check_evaluations(settings: Settings) -> None:
    if settings.early_stopping is not None and settings.eval_every_updates is None:
        raise ValueError(
            "`--early_stopping` must be given evaluations to count. Received: "
            f"{settings.early_stopping}, without --eval_every_updates. Add "
            "--eval_every_updates=100."
        )
    if settings.eval_every_updates is not None and settings.strategy == "multi_worker":
        raise ValueError(
            "`--eval_every_updates` must be left out in a cluster, whose tasks train "
            f"to the end. Received: {settings.eval_every_updates}, with "
            "--strategy=multi_worker. Use --strategy=none or mirrored, or leave it out."
        )


def _check_cut_by_tokens(settings: Settings) -> None:
    others = {
        "--pad_to_max_length": settings.pad_to_max_length,
        f"--micro_batch_size={AUTO}": settings.train_batch_size == AUTO,
    }
    for flag, is_given in others.items():
        if is_given:
            raise ValueError(
                f"`--tokens_per_micro_batch` cannot be combined with {flag}. "
                "Received: both flags. Leave one out."
            )
