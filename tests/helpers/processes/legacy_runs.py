"""Runs the scripts of tests/legacy_scripts, as their users would.

Three ways: "plain" as they are, "two_lines" with the two lines that the README adds to
migrate a script, "unedited" through `python -m estimator_accum.compat`.
"""

import pathlib
import sys

from tests.helpers.processes import running

SCRIPTS = running.ROOT / "tests" / "legacy_scripts"
TWO_LINES = """from estimator_accum.compat import enable_estimator
enable_estimator()
"""
_VARIABLES = {"PYTHONPATH": str(running.ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}


def names() -> list[str]:
    """Returns the names of the scripts that run as one process and must succeed."""
    scripts = {path.stem for path in SCRIPTS.glob("*.py")}
    return sorted(scripts - {"cluster"})


def run(
    name: str,
    folder: pathlib.Path,
    way: str = "unedited",
    python: str = sys.executable,
    tasks: tuple[str, ...] = (),
) -> tuple[list[int], str]:
    """Runs a script, or the tasks of a cluster, each a process of the script.

    Args:
        name: Name of the script, without `.py`.
        folder: Folder for the copy of the script and for its model.
        way: "plain", "two_lines" or "unedited".
        python: Path of the interpreter.
        tasks: Job of each task of a TF_CONFIG cluster, e.g. ("chief", "worker").

    Returns:
        (exit codes, output of all processes).
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{name}.py"
    text = (SCRIPTS / f"{name}.py").read_text()
    if way == "two_lines":
        text = _with_two_lines(text)
    script.write_text(text)
    model_dir = str(folder / "model")
    command = ["-m", "estimator_accum.compat"] if way == "unedited" else []
    command += ["--v1"] if name == "tensorflow_1" else []
    is_flag = name in ("tensorflow_1", "version_1_style")
    command += [script, f"--model_dir={model_dir}" if is_flag else model_dir]
    options = {"cwd": folder, "python": python, **_VARIABLES}
    if not tasks:
        done = running.run(*command, **options)
        return [done.returncode], done.output
    with running.cluster(tuple(command), jobs=tasks, **options) as started:
        ended = [task.wait() for task in started]
    return [done.returncode for done in ended], "".join(d.output for d in ended)


def run_python(code: str | None, *arguments, cwd=None, **variables) -> running.Done:
    """Runs code, or a script, or `-m module`, in a process of its own."""
    command = [*(["-c", code] if code else []), *arguments]
    return running.run(*command, cwd=cwd, **_VARIABLES | variables)


def _with_two_lines(text: str) -> str:
    """Adds TWO_LINES after `import tensorflow as tf`, or before its other imports."""
    lines = text.splitlines(keepends=True)
    for line in lines:
        if line.startswith(("import tensorflow", "from tensorflow")):
            where = lines.index(line)
            where += line == "import tensorflow as tf\n"
            return "".join([*lines[:where], TWO_LINES, *lines[where:]])
    raise AssertionError("no import of TensorFlow in the script")
