"""The command `estimator-accum`, also as `python -m estimator_accum`."""

import difflib
import runpy
import sys

from estimator_accum import __version__
from estimator_accum.programs.program import show
from estimator_accum.programs.sentences import missing_package

_PROGRAM = "estimator-accum"
_COMMANDS = {  # name: (module, description)
    "train": (
        "bert_finetune.run_classifier",
        "fine-tunes BERT on a GLUE task or your own data, with gradient accumulation",
    ),
    "plan": (
        "bert_finetune.plan",
        "computes the largest micro-batch that fits, its memory, time and flags",
    ),
    "fetch bert": ("bert_finetune.fetch_bert", "downloads a published BERT"),
    "fetch glue": ("bert_finetune.fetch_glue", "downloads GLUE's tasks"),
    "import": (
        "bert_finetune.import_hf_checkpoint",
        "converts a Hugging Face folder to a checkpoint for `train`",
    ),
    "plot": (
        "estimator_accum.programs.plot_loss",
        "draws the training loss of one or more runs",
    ),
    "launch": (
        "estimator_accum.programs.launch",
        "runs a command as all tasks of a cluster on this machine",
    ),
    "task": (
        "estimator_accum.programs.task",
        "runs a command as one task of a cluster, as its operator expects",
    ),
    "compat": (
        "estimator_accum.compat",
        "runs a script with tf.estimator on today's TensorFlow",
    ),
    "run": (
        "estimator_accum.unedited.run",
        "runs a training script in little memory, without editing it",
    ),
    "check": (
        "estimator_accum.unedited.check",
        "compares `run` with the plain script on its first batches",
    ),
}


def main() -> int:
    """Runs the command that `sys.argv` names as its own program.

    Returns:
        0 for help and --version, 2 for an unknown command or if a package is missing;
        otherwise the command itself ends the process.
    """
    words = sys.argv[1:] or ["help"]
    if words[0] == "help":
        words = [*words[1:], "--help"]
    group = ""
    if words[0] == "fetch":  # its commands have two words
        group, words = "fetch ", words[1:] or ["--help"]
    commands = {name: _COMMANDS[name] for name in _COMMANDS if name.startswith(group)}
    word, *flags = words
    if word == "--version":
        show(f"{_PROGRAM} {__version__}")
        return 0
    if word in ("-h", "--help"):
        show(_usage(commands))
        return 0
    name = group + word
    if name not in commands:
        last_words = [name.removeprefix(group) for name in commands]
        near = difflib.get_close_matches(word, last_words, 1)
        hint = (
            f"Did you mean {group}{near[0]}?"
            if near
            else f"See {_PROGRAM} {group}--help."
        )
        return _refuse(
            _PROGRAM,
            f"A command must be one of {', '.join(commands)}. Received: {name}. {hint}",
        )
    sys.argv[1:] = flags
    try:
        runpy.run_module(commands[name][0], run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        said = missing_package(error)
        if name in ("compat", "run", "check") or said is None:
            raise
        return _refuse(f"{_PROGRAM} {name}", said)
    return 0


def _usage(commands: dict[str, tuple[str, str]]) -> str:
    width = max(map(len, commands))
    rows = (f"    {name:{width}}  {what}" for name, (_, what) in commands.items())
    end = f"{_PROGRAM} COMMAND --help shows the flags of one; --version shows the version."
    return "\n".join([f"usage: {_PROGRAM} COMMAND [--flags]", "", *rows, "", end])


def _refuse(speaker: str, sentence: str) -> int:
    print(f"{speaker}: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
