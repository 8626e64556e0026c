"""Runs a script as `python` does, in a process that has `tf.estimator`."""

import functools
import importlib.machinery
import importlib.util
import logging as std_logging
import os
import pathlib
import sys
import types

from absl import logging


class NoProgramError(Exception):
    """There is nothing to run."""


def run_script(arguments: list[str], is_v1: bool = False) -> None:
    """Runs `legacy_script.py --its --flags` or `-m package.module` as `python` does.

    Not by runpy: functions that the script runs at exit must find its `__main__`.

    Args:
        arguments: Path of the script, which exists, or `-m` and a module's name; then
            flags.
        is_v1: Whether its imports of TensorFlow are TensorFlow 1's, which needs
            `enable_v1` before.

    Raises:
        NoProgramError: If there is no such module.
    """
    has_folder = not getattr(sys.flags, "safe_path", False)  # first in sys.path
    module = types.ModuleType("__main__")
    if arguments[0] == "-m":
        sys.path[:has_folder] = [os.getcwd()] * has_folder
        module.__spec__ = _find_module(arguments[1])
        module.__package__ = module.__spec__.parent
        path, arguments = module.__spec__.origin, arguments[1:]
        sys.argv[:] = [path, *arguments[1:]]
    else:
        script = pathlib.Path(arguments[0])
        sys.path[:has_folder] = [str(script.resolve().parent)] * has_folder
        path = os.path.abspath(script)
        sys.argv[:] = arguments
    module.__file__ = path
    sys.modules["__main__"] = module
    sys.excepthook = functools.partial(_show_from, path, is_v1)
    _log_once()
    source = pathlib.Path(path).read_bytes()
    if is_v1:
        from estimator_accum.compat.v1._imports import compile_v1
        from estimator_accum.compat.v1._missing import list_missing

        code = compile_v1(source, path)
        missing = list_missing(path, sys.path[0])
        if missing:
            print(missing, file=sys.stderr)
    else:
        code = compile(source, path, "exec")
    exec(code, vars(module))  # noqa: S102, what python does


def _log_once() -> None:
    """Shows TensorFlow's log lines once where `app.run` adds absl's handler to its own."""
    absl_handler = logging.get_absl_handler()

    def is_shown_here(record) -> bool:
        others = std_logging.getLogger("tensorflow").handlers
        streams = [getattr(handler, "stream", None) for handler in others]
        stream = absl_handler.python_handler.stream
        logger = record.name.partition(".")[0]  # this package's are below it
        return logger != "tensorflow" or stream not in streams

    absl_handler.addFilter(is_shown_here)


def _find_module(name: str) -> importlib.machinery.ModuleSpec:
    """Returns the spec of a module, or of a package's `__main__`."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or not spec.has_location:
        raise NoProgramError(
            "-m must be followed by a module that is a file, or a package with a "
            f"__main__.py. Received: {name}. Run it where python -m {name} works."
        )
    return spec


def _show_from(path: str, is_v1: bool, kind: type, error: BaseException, trace) -> None:
    """Shows a traceback that starts in the script, as under `python`, and a remedy."""
    while trace and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
    if not is_v1 and _is_of_tensorflow_1(error):
        print(
            "Names of TensorFlow 1 must be enabled by --v1. "
            f"Received: {error.name}. Put --v1 before the script.",
            file=sys.stderr,
        )


def _is_of_tensorflow_1(error: BaseException) -> bool:
    """Returns whether a name is missing that --v1 knows."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name}.".startswith("tensorflow.contrib.")
    tf = sys.modules["tensorflow"]
    return (
        isinstance(error, AttributeError)
        and error.obj is tf
        and (error.name == "contrib" or hasattr(tf.compat.v1, error.name))
    )
