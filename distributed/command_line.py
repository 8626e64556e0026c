"""The flags of a task, which the launcher passes on; needs no TensorFlow."""

import functools
import sys

from absl import flags

from distributed.settings import Settings
from estimator_accum.batches import micro_batch_size_of

# Its own: other examples have flags of the same names.
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
    "Examples of one forward and backward pass of one worker; what the effective batch "
    "leaves to each if not given. auto: as many as its memory holds; a batch for which "
    "there is too little is run again in smaller ones.",
)
_integer(
    "gradient_accumulation_steps",
    None,
    "Micro-batches of each worker that make one update; as many as --micro_batch_size "
    "takes if not given, 1 without it.",
)
flags.DEFINE_alias(
    "gradient_accumulation_multiplier",
    "gradient_accumulation_steps",
    flag_values=FLAGS,
)

## Training
_integer("train_updates", 200, "Optimizer updates.")
_float("learning_rate", 0.1, "Of gradient descent.")
_integer("hidden_units", 64, "Of the layer that holds most of the parameters.")
_bool("shuffle", True, "Whether each epoch has an order of its own, not the files'.")
_integer("seed", 0, "Of the order of the examples and of the first weights.")
_integer(
    "save_checkpoints_updates",
    50,
    "Updates between checkpoints: what a cluster that loses a task repeats at most.",
)
_integer(
    "watchdog_secs",
    300,
    "Seconds without a micro-step after which a task ends itself, with exit code 75. "
    "Tasks that have lost another one would wait for ever.",
)
_bool(
    "log_examples",
    False,
    "Whether each worker appends the numbers of the examples that a micro-step uses to "
    "the file examples-<rank>.log in --output_dir.",
)
_integer("verbosity", -1, "0 and more: TensorFlow's own log lines too.")


def settings_from_flags() -> Settings:
    """Returns the flags as settings.

    Raises:
        ValueError: If --micro_batch_size is no number, and not auto.
    """
    values = {name: FLAGS[name].value for name in Settings.__dataclass_fields__}
    values["micro_batch_size"] = micro_batch_size_of(values["micro_batch_size"])
    return Settings(**values)


def check_no_rest(rest: list[str]) -> None:
    """Raises ValueError if something on the command line is no flag."""
    if rest:
        raise ValueError(
            "Everything must be given as a flag. "
            f"Received: {rest[0]!r}. Write --flag=value."
        )


def asks_for_help(argv: list[str]) -> bool:
    """Returns whether the command line has --help in one of its forms."""
    return bool({"-h", "--help", "--helpfull"} & set(argv))


def help_text() -> str:
    """Returns what --help shows of the flags."""
    return FLAGS.module_help(sys.modules[__name__])


def sentence(error: Exception) -> str:
    """Says what an error is about in one line, absl's in this project's form."""
    if isinstance(error, flags.UnrecognizedFlagError):
        _, _, similar = str(error).partition("Did you mean: ")
        hint = f"Did you mean --{similar.rstrip(' ?')}?" if similar else "See --help."
        return f"Flags must be those of --help. Received: --{error.flagname}. {hint}"
    if isinstance(error, flags.IllegalFlagValueError):
        name, _, value = str(error).partition(": ")[0].partition("--")[2].partition("=")
        if name in FLAGS:
            kind = FLAGS[name].parser.syntactic_help or "true or false"
            return f"`--{name}` must be {kind}. Received: {value!r}. See --help."
    return " ".join(str(error).split())
