"""Prints docs/today.md's table: tf.estimator features by TensorFlow version.

Runs every script of tests/legacy_scripts, unedited, through
`python -m estimator_accum.compat` on each version, in an environment created for that
version (about 1.5 GB each), and prints a Markdown table with a row for each script,
named by its docstring. A cell is "yes" or "no". Exit code 1 if a cell says "no".

    python scripts/experiments/compat_table.py --environments_dir=environments
"""

import argparse
import ast
import os
import pathlib
import subprocess
import sys
import tempfile

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_REPOSITORY))

from tests.helpers import legacy_runs

_VERSIONS = ("2.15", "2.16", "2.17", "2.18", "2.19", "2.20", "2.21")
_REFERENCE = "2.15"
_CLUSTERS = (("worker", "worker"), ("chief", "worker", "evaluator"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--environments_dir", required=True, help="where environments are, or go"
    )
    parser.add_argument(
        "--versions",
        default=",".join(_VERSIONS),
        help="of TensorFlow, separated by commas (default: %(default)s)",
    )
    arguments = parser.parse_args()
    versions = arguments.versions.split(",")
    unknown = sorted(set(versions) - set(_VERSIONS))
    if unknown:
        parser.error(
            f"--versions must be of {', '.join(_VERSIONS)}. "
            f"Received: {', '.join(unknown)}. Leave them out."
        )
    folder = pathlib.Path(arguments.environments_dir).resolve()
    environments = {version: _environment(folder, version) for version in versions}
    columns = {
        version: _column(version, python) for version, python in environments.items()
    }
    lines = [["", *map(_full_version, environments.values())]]
    lines.append(["---"] * (1 + len(versions)))
    rows = columns[versions[0]]
    lines += [[row, *(columns[version][row] for version in versions)] for row in rows]
    for line in lines:
        print(f"| {' | '.join(line)} |")
    sys.exit(any("no" in column.values() for column in columns.values()))


def _environment(folder: pathlib.Path, version: str) -> str:
    """Returns the interpreter of an environment with that TensorFlow."""
    environment = folder / f"tensorflow-{version}"
    python = environment / "bin" / "python"
    stamp = environment / "installed.stamp"
    if stamp.exists():
        return str(python)
    is_reference = version == _REFERENCE
    base = _interpreter("3.11" if is_reference else "3.12")
    packages = [f"tensorflow=={version}.*", "tensorflow-estimator==2.15.0", "tqdm"]
    if is_reference:
        packages += ["numpy<2"]
    else:  # TensorFlow 2.21 no longer brings TensorBoard
        packages += [f"tf_keras=={version}.*", f"tensorboard=={version}.*"]
    packages += ["protobuf<7"] if version == "2.20" else []
    print(f"making {environment} with {base}", file=sys.stderr)
    subprocess.run([base, "-m", "venv", str(environment)], check=True)
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*install, "-qq", *packages], check=True)
    stamp.touch()
    return str(python)


def _interpreter(version: str) -> str:
    """Finds a suitable interpreter, as scripts/test does."""
    script = "root=$1; . scripts/environment.sh; pick_python; echo $python"
    done = subprocess.run(
        ["sh", "-euc", script, sys.argv[0], str(_REPOSITORY)],
        env=os.environ | {"ONLY_PYTHON": version},
        cwd=_REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:  # pick_python has printed the reason
        sys.exit(done.returncode)
    return done.stdout.strip()


def _full_version(python: str) -> str:
    code = "import importlib.metadata as m; print(m.version('tensorflow'))"
    done = subprocess.run(
        [python, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def _column(version: str, python: str) -> dict[str, str]:
    """Runs every script on one version; returns the cell of each row."""
    cells = {}
    for name in legacy_runs.names():
        cells[_title(name)] = _cell(name, python)
    for tasks in _CLUSTERS:
        row = f"{_title('cluster')}: {', '.join(tasks)}"
        cells[row] = _cell("cluster", python, tasks)
    for row, cell in cells.items():
        print(f"{version}: {cell:8s} {row}", file=sys.stderr)
    return cells


def _title(name: str) -> str:
    text = (legacy_runs.SCRIPTS / f"{name}.py").read_text()
    return ast.get_docstring(ast.parse(text)).splitlines()[0].rstrip(".")


def _cell(name: str, python: str, tasks: tuple[str, ...] = ()) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            codes, _ = legacy_runs.run(
                name, pathlib.Path(folder), python=python, tasks=tasks
            )
        except subprocess.TimeoutExpired:
            return "no"
    return "no" if any(codes) else "yes"


if __name__ == "__main__":
    main()
