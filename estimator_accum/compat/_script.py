"""Runs a script as `python` does, in a process that has `tf.estimator`."""

import functools
import os
import pathlib
import sys
import types


def run_script(arguments: list[str], is_v1: bool = False) -> None:
    """Runs `legacy_script.py --its --flags` as `python` does.

    Not by runpy: functions that the script runs at exit must find its `__main__`.

    Args:
        arguments: Path of the script, which exists, and its flags.
        is_v1: Whether its imports of TensorFlow are TensorFlow 1's, which needs
            `enable_v1` before.
    """
    script = arguments[0]
    sys.argv[:] = arguments
    if not getattr(sys.flags, "safe_path", False):  # else there is no folder to replace
        sys.path[0] = str(pathlib.Path(script).resolve().parent)
    path = os.path.abspath(script)
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    sys.excepthook = functools.partial(_show_from, path)
    source = pathlib.Path(path).read_bytes()
    if is_v1:
        from estimator_accum.compat.v1 import compile_v1

        code = compile_v1(source, path)
    else:
        code = compile(source, path, "exec")
    exec(code, vars(module))  # noqa: S102, what python does


def _show_from(path: str, kind: type, error: BaseException, trace) -> None:
    """Shows a traceback that starts in the script, as under `python`."""
    while trace and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
