"""Runs a script with `tf.estimator`, without editing it.

estimator-accum compat [--v1] legacy_script.py --its --flags
estimator-accum compat --v1 --list legacy_script.py another.py
"""

import os
import sys

from estimator_accum.compat import enable_estimator
from estimator_accum.compat._script import NoProgramError, run_script
from estimator_accum.compat.v1 import enable_v1

_USAGE = "estimator-accum compat [--v1] legacy_script.py --its --flags"
_HELP = f"""usage: {_USAGE}

Runs a script, or -m and a module, like python, with tf.estimator available.

    --v1    gives it TensorFlow 1's names: tensorflow.compat.v1 where it imports
            tensorflow, the names of tf.contrib that have a stand-in, and names that
            Python and NumPy removed
    --v1 --list
            runs nothing: prints, for each script that is named, the names that --v1 does
            not replace. Exit code 1 if there are any, else 0"""


def main(arguments: list[str]) -> None:
    is_v1 = arguments[:1] == ["--v1"]
    arguments = arguments[is_v1:]
    script, *_ = arguments or ["none"]
    if script in ("-h", "--help"):
        print(_HELP)
        return
    if is_v1 and script == "--list":
        sys.exit(_list_missing(arguments[1:]))
    if script == "--list":
        _leave(
            "--list needs --v1. Run: estimator-accum compat --v1 --list legacy_script.py"
        )
    is_module = script == "-m" and len(arguments) > 1
    if not is_module and not os.path.isfile(script):
        _leave(f"A Python script must be given. Received: {script}. Run: {_USAGE}")
    try:
        enable_v1() if is_v1 else enable_estimator()
    except ImportError as error:
        _leave(str(error))
    try:
        run_script(arguments, is_v1)
    except NoProgramError as error:
        _leave(str(error))


def _list_missing(scripts: list[str]) -> int:
    """Prints the names that have no stand-in, by script; returns the exit code."""
    if files := [path for path in scripts or ["none"] if not os.path.isfile(path)]:
        _leave(
            f"--list must be followed by Python scripts. Received: {files[0]}. Run: "
            "estimator-accum compat --v1 --list legacy_script.py"
        )
    enable_v1()
    from estimator_accum.compat.v1._missing import list_missing

    texts = [list_missing(path, os.path.dirname(path) or ".") for path in scripts]
    for path, text in zip(scripts, texts, strict=True):
        print(f"{path}: {text or 'every name of TensorFlow 1 has a stand-in'}")
    return int(any(texts))


def _leave(sentence: str):
    print(f"estimator-accum compat: {sentence}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
