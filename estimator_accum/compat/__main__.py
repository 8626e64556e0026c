"""Runs a script with `tf.estimator`, without editing it.

estimator-accum compat [--v1] legacy_script.py --its --flags
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
            Python and NumPy removed"""


def main(arguments: list[str]) -> None:
    is_v1 = arguments[:1] == ["--v1"]
    arguments = arguments[is_v1:]
    script, *_ = arguments or ["none"]
    if script in ("-h", "--help"):
        print(_HELP)
        return
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


def _leave(sentence: str):
    print(f"estimator-accum compat: {sentence}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
