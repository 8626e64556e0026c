"""The command `estimator-accum`, also as `python -m estimator_accum`."""

import runpy
import sys

from estimator_accum import __version__

_USAGE = """\
usage: estimator-accum COMMAND [--flags]

    train       fine-tunes BERT on a GLUE task or your own data, with gradient accumulation
    plan        largest micro-batch that fits, its memory, time and flags
    fetch bert  downloads a published BERT
    fetch glue  downloads GLUE's tasks
    import      turns a Hugging Face folder into a checkpoint for `train`
    plot        draws the training loss of one or more runs
    launch      runs a command as all tasks of a cluster on this machine
    compat      runs a script that uses tf.estimator on today's TensorFlow
    run         runs a training script in little memory, without editing it
    check       shows whether `run` trains a script as it trains by itself

estimator-accum COMMAND --help shows the flags of one; --version shows the version.
"""

_FETCH = {"bert": "bert_finetune.fetch_bert", "glue": "bert_finetune.fetch_glue"}
_COMMANDS = {
    "train": "bert_finetune.run_classifier",
    "plan": "bert_finetune.plan",
    "fetch": _FETCH,
    "import": "bert_finetune.import_hf_checkpoint",
    "plot": "estimator_accum.programs.plot_loss",
    "launch": "estimator_accum.programs.launch",
    "compat": "estimator_accum.compat",
    "run": "estimator_accum.unedited.run",
    "check": "estimator_accum.unedited.check",
}


# Extra of this package that brings a package; users' own scripts have others.
_EXTRAS = {
    "tensorflow": "tf",
    "tf_keras": "tf",
    "huggingface_hub": "bert",
    "tokenizers": "bert",
    "safetensors": "bert",
    "matplotlib": "plot",
    "pandas": "plot",
}


def main() -> int:
    """Runs the command that `sys.argv` names as its own program.

    Returns:
        0 for --help and --version, 2 for what is no command or if a package is
        missing; otherwise the command itself ends the process.
    """
    arguments = sys.argv[1:]
    commands, path = _COMMANDS, "estimator-accum"
    while isinstance(commands, dict):
        name, *arguments = arguments or [""]
        if name in ("-h", "--help"):
            print(_USAGE, end="")
            return 0
        if name == "--version":
            print(f"estimator-accum {__version__}")
            return 0
        if name not in commands:
            print(
                f"{path}: A command must be one of {', '.join(commands)}. Received: "
                f"{name or 'none'}. See estimator-accum --help.",
                file=sys.stderr,
            )
            return 2
        commands, path = commands[name], f"{path} {name}"
    sys.argv[1:] = arguments
    try:
        runpy.run_module(commands, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if path.endswith((" compat", " run", " check")) or error.name not in _EXTRAS:
            raise
        print(
            f"{path}: The package {error.name} must be installed. Received: none. Run "
            f"pip install 'estimator-accum[{_EXTRAS[error.name]}]'.",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
