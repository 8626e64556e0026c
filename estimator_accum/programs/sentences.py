"""Errors of command lines, in one sentence each."""

import os

from absl import flags

from estimator_accum.programs.numerals import parse_integer, parse_number
from estimator_accum.programs.parsers import allowed_values

# Other projects' names of flags: this project's name, or one with its value.
_ELSEWHERE = {
    "fp16": "precision=float16",
    "use_fp16": "precision=float16",
    "bf16": "precision=bfloat16",
    "per_device_train_batch_size": "micro_batch_size",
    "train_steps": "train_updates",
    "max_steps": "train_updates",
}

# Extra of this package that brings a package; users' own scripts have others.
_EXTRAS = {
    "tensorflow": "tf",
    "tf_keras": "tf",
    "huggingface_hub": "bert",
    "pooch": "bert",
    "tokenizers": "bert",
    "safetensors": "bert",
    "matplotlib": "plot",
    "pandas": "plot",
    "ray": "ray",
}


def sentence(error: Exception, flag_values: flags.FlagValues) -> str:
    """Returns an error in one line; absl's errors get this project's form."""
    if isinstance(error, flags.UnrecognizedFlagError):
        name = error.flagname
        similar = str(error).partition("Did you mean: ")[2].rstrip(" ?")
        similar = similar.replace(", ", " or --")
        ours = _ELSEWHERE.get(name, "")
        similar = ours if ours.partition("=")[0] in flag_values else similar
        hint = f"Did you mean --{similar}?" if similar else "See --help."
        return f"Flags must be those of --help. Received: --{name}. {hint}"
    if isinstance(error, flags.CantOpenFlagFileError):
        reason = " ".join(str(error).split()).rpartition("[Errno")[2]
        return (
            "`--flagfile` must name a file that can be read. Received: "
            f"{reason.partition('] ')[2]}. Name another one."
        )
    if isinstance(error, flags.IllegalFlagValueError):
        name, _, value = str(error).partition(": ")[0].partition("--")[2].partition("=")
        if name in flag_values:
            parser = flag_values[name].parser
            kind = getattr(parser, "rule", "") or allowed_values(parser)
            remedy = getattr(parser, "remedy", "See --help.")
            return (
                f"`--{name}` must be {kind or 'true or false'}. Received: "
                f"{_shown(value)}. {remedy}"
            )
    said = path_sentence(error) or missing_package(error)
    return said or " ".join(str(error).split())


def _shown(value: str) -> str:
    try:
        return str(parse_number(value)) if "." in value else str(parse_integer(value))
    except ValueError:
        return repr(value)


def missing_package(error: Exception) -> str | None:
    """Returns which extra brings a missing package; None for any other error."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in _EXTRAS:
        return None
    return (
        f"The package {error.name} must be installed. Received: none. Run "
        f"pip install 'estimator-accum[{_EXTRAS[error.name]}]'."
    )


def path_sentence(error: Exception) -> str | None:
    """Returns which path the operating system refused; None for any other error."""
    if not isinstance(error, OSError) or error.errno is None or error.filename is None:
        return None
    reason = os.strerror(error.errno)
    return (
        "A path must be one that this program can use. Received: "
        f"{os.fspath(error.filename)!r}: {reason}. Correct it, or name another one."
    )
