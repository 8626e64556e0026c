"""Runs a script with `tf.estimator`, without editing it.

python -m estimator_accum.compat legacy_script.py --its --flags
"""

import functools
import os
import pathlib
import sys
import types

from estimator_accum.compat import enable_estimator

_USAGE = "python -m estimator_accum.compat legacy_script.py --its --flags"


def main(arguments: list[str]) -> None:
    """Runs `legacy_script.py --its --flags` as `python` does, with `tf.estimator`.

    Not by runpy: functions that the script runs at exit must find its `__main__`.
    """
    script, *_ = arguments or ["nothing"]
    if script in ("-h", "--help"):
        print(f"usage: {_USAGE}\n\nRuns the script as python does, with tf.estimator.")
        return
    if not os.path.isfile(script):
        _leave(f"A Python script must be given. Received: {script}. Run: {_USAGE}")
    try:
        enable_estimator()
    except ImportError as error:
        _leave(str(error))
    sys.argv[:] = arguments
    if not getattr(sys.flags, "safe_path", False):  # else there is no folder to replace
        sys.path[0] = str(pathlib.Path(script).resolve().parent)
    path = os.path.abspath(script)
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    sys.excepthook = functools.partial(_show_from, path)
    code = compile(pathlib.Path(path).read_bytes(), path, "exec")
    exec(code, vars(module))  # noqa: S102, what python does


def _show_from(path: str, kind: type, error: BaseException, trace) -> None:
    """Shows a traceback that starts in the script, as under `python`."""
    while trace and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _leave(sentence: str):
    print(f"estimator_accum.compat: {sentence}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
