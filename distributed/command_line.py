"""Flags of a task, which the launcher passes on; needs no TensorFlow."""

import functools
import sys

from absl import flags

from distributed.settings import Settings
from estimator_accum.programs.batches import micro_batch_size_of
from estimator_accum.programs.config import define_config_flags

# Not flags.FLAGS: other examples define flags of the same names.
FLAGS = flags.FlagValues()
_string = functools.partial(flags.DEFINE_string, flag_values=FLAGS)
_integer = functools.partial(flags.DEFINE_integer, flag_values=FLAGS)
_float = functools.partial(flags.DEFINE_float, flag_values=FLAGS)
_bool = functools.partial(flags.DEFINE_bool, flag_values=FLAGS)

## Files
_string("data_dir", None, "Folder with MNIST's files; generated digits if not given.")
_string(
    "output_dir",
    "distributed_output",
    "Folder for checkpoints, results and the exported model, which all tasks share.",
)

## Batches
_integer(
    "effective_batch_size",
    None,
    "Examples of one update over all workers; 200 if it does not follow from "
    "--micro_batch_size and --gradient_accumulation_steps.",
)
_string(
    "micro_batch_size",
    None,
    "Examples of one forward and backward pass of one worker; by default each worker's "
    "share of the effective batch / gradient_accumulation_steps. auto: as many as the "
    "worker's memory holds; a batch that does not fit is retried in smaller ones.",
)
_integer(
    "gradient_accumulation_steps",
    None,
    "Micro-batches of each worker that make one update; by default each worker's share "
    "of the effective batch / micro_batch_size, or 1 without a --micro_batch_size.",
)
flags.DEFINE_alias(
    "gradient_accumulation_multiplier",
    "gradient_accumulation_steps",
    flag_values=FLAGS,
)

## Training
_integer("train_updates", 200, "Optimizer updates.")
_float("learning_rate", 0.1, "Learning rate of gradient descent.")
_integer(
    "hidden_units",
    64,
    "Number of units of the hidden layer, which holds most of the parameters.",
)
_bool("shuffle", True, "Shuffle the examples in each epoch; false: the files' order.")
_integer("seed", 0, "Random seed of the examples' order and the first weights.")
_integer(
    "save_checkpoints_updates",
    50,
    "Updates between checkpoints: what a cluster that loses a task repeats at most.",
)
_integer(
    "watchdog_secs",
    300,
    "Seconds without a micro-step after which a task ends itself, with exit code 75. "
    "Without this end, a task that has lost another one waits for ever.",
)
_bool(
    "log_examples",
    False,
    "Append the numbers of each micro-step's examples to examples-<rank>.log in "
    "--output_dir, on each worker.",
)
_integer("verbosity", -1, "Level of log lines; 0 and more show TensorFlow's own.")
define_config_flags(FLAGS)


def settings_from_flags() -> Settings:
    """Returns the flags as settings.

    Raises:
        ValueError: If --micro_batch_size is neither a number nor auto.
    """
    values = {name: FLAGS[name].value for name in Settings.__dataclass_fields__}
    values["micro_batch_size"] = micro_batch_size_of(values["micro_batch_size"])
    return Settings(**values)


def help_text() -> str:
    """Returns the flags' part of the --help text."""
    return FLAGS.module_help(sys.modules[__name__])
