"""Predicts house prices, with gradient accumulation and without: 59 x 3 against 177.

    python -m housing_example.main

trains on generated data. Any CSV file with the columns CRIM, ZN, INDUS, CHAS, NOX, RM,
AGE, DIS, RAD, TAX, PTRATIO, B, LSTAT and MEDV works as well; without a test file, 30%
of the examples are kept for testing:

    python -m housing_example.main --train_csv=train.csv --test_csv=test.csv

A stopped run resumes from its last checkpoints when it is started again with the same
flags.
"""

import functools
import math
import os
import pathlib
import sys

if __name__ == "__main__":  # also runs from a clone that is not installed
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from absl import flags

from estimator_accum.programs.batches import micro_batch_size_of
from estimator_accum.programs.cluster import Cluster, read_cluster_of
from estimator_accum.programs.config import define_config_flags
from estimator_accum.programs.program import Program
from housing_example.settings import Settings, check_settings, flags_of

# Not flags.FLAGS: other examples define flags of the same names.
FLAGS = flags.FlagValues()
_string = functools.partial(flags.DEFINE_string, flag_values=FLAGS)
_integer = functools.partial(flags.DEFINE_integer, flag_values=FLAGS)
_float = functools.partial(flags.DEFINE_float, flag_values=FLAGS)
_bool = functools.partial(flags.DEFINE_bool, flag_values=FLAGS)

## Files
_string("train_csv", None, "Training examples; generated ones if not given.")
_string("test_csv", None, "Test examples; 30% of the training file if not given.")
_string("output_dir", "housing_output", "Folder for checkpoints, results and the plot.")

## Training
_integer(
    "effective_batch_size",
    None,
    "Examples of one update, over all micro-steps and replicas. None: train_batch_size "
    "x gradient_accumulation_steps x replicas.",
)
_integer(
    "train_batch_size",
    None,
    "Micro-batch: examples of one forward and backward pass of one replica; 59, unless "
    "the other two say otherwise.",
)
_string(
    "micro_batch_size",
    None,
    "Another name of --train_batch_size; auto: each replica takes its share of "
    "--effective_batch_size at once, in twice as many micro-batches whenever memory "
    "runs out.",
)
_integer(
    "gradient_accumulation_steps",
    None,
    "Micro-batches that make one update; 3, unless the other two say otherwise.",
)
flags.DEFINE_alias(
    "gradient_accumulation_multiplier",
    "gradient_accumulation_steps",
    flag_values=FLAGS,
)
_string(
    "strategy",
    "none",
    "Devices that train. none: one; mirrored: all of this machine; multi_worker: all "
    "tasks of the cluster that TF_CONFIG or Slurm describes. The run without "
    "accumulation, for the comparison, trains on one device.",
)
_integer("train_updates", 500, "Optimizer updates.")
_float(
    "learning_rate", 5e-3, "First learning rate of Adam; it falls to 0 along a cosine."
)
_float(
    "clip_norm", 0.0, "Largest global norm of an update's gradient; 0 does not clip."
)
_bool("shuffle", True, "Shuffle the examples in each epoch; false: the file's order.")
_integer("seed", 0, "Random seed of the examples' order and the first weights.")
_integer(
    "watchdog_secs",
    300,
    "Seconds without a micro-step after which a task of a cluster ends itself, with "
    "exit code 75. Without this end, a task that has lost another one waits for ever.",
)
_integer("verbosity", -1, "Level of log lines; 0 and more show TensorFlow's own.")
define_config_flags(FLAGS)


def settings_from_flags() -> Settings:
    """Returns the flags as settings.

    Raises:
        ValueError: If `--clip_norm` is out of its range, or the two flags for the
            micro-batch size disagree.
    """
    if not 0 <= FLAGS.clip_norm < math.inf:
        raise ValueError(
            "`--clip_norm` must be a finite number >= 0. "
            f"Received: {FLAGS.clip_norm}. Use 0 to turn clipping off."
        )
    values = {name: FLAGS[name].value for name in Settings.__dataclass_fields__}
    values["clip_norm"] = FLAGS.clip_norm or None
    size, other_name = FLAGS.train_batch_size, FLAGS.micro_batch_size
    if other_name is not None:
        other_name = micro_batch_size_of(other_name)
        if size not in (None, other_name):
            raise ValueError(
                "`--train_batch_size` and its other name `--micro_batch_size` must be "
                f"equal. Received: {size} and {other_name}. Give one of them."
            )
        values["train_batch_size"] = other_name
    return Settings(**values)


def main(argv: list[str]) -> None:
    """Checks everything first, then trains, evaluates, predicts and draws."""
    Program(
        name="housing_example",
        jobs="housing_example.jobs",
        flag_values=FLAGS,
        usage=lambda: f"{__doc__}\n{FLAGS.module_help(sys.modules[__name__])}",
        read=_read,
        flags_of=flags_of,
        advice="Use a lower --learning_rate, or a --clip_norm, and another --output_dir.",
    ).run(argv)


def _read() -> tuple[Settings, Cluster]:
    settings = settings_from_flags()
    check_settings(settings)
    return settings, read_cluster_of(settings.strategy, os.environ)


if __name__ == "__main__":
    main(sys.argv)
