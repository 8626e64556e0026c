"""Tests of the core on older TensorFlows, each in an environment of its own: a table.

    python scripts/experiments/versions.py 2.8 2.10 2.12 2.14

CI runs a part of them on 2.12, with `--tests`. An environment is made in a temporary folder, takes one to two minutes and 2 GB, and is
removed. TensorFlow up to 2.11 runs on Python 3.10, later ones on 3.11, which must be on
PATH, in pyenv or in uv. Exit codes: 0; 1 if a test fails; 2 for invalid flags.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from estimator_accum.programs.command_line import OneSentenceParser

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_VERSIONS = tuple(f"2.{minor}" for minor in range(8, 16))
_PACKAGES = ("numpy<2", "hypothesis", "psutil", "pytest>=8", "pytest-xdist", "pyyaml")
_PACKAGES += ("absl-py", "filelock", "tqdm", "wrapt")
_FILES = ("test_train_op.py", "test_optimizer.py", "test_equivalence.py")
_FILES += ("test_replicas.py", "hooks/test_hooks.py", "microbatch/test_estimators.py")
_FILES += ("microbatch/test_inside_model_fn.py", "unedited/test_intercept.py")
_FILES += ("compat/v1/test_against_tensorflow_1.py",)
_TESTS = [f"tests/estimator_accum/{name}" for name in _FILES]
_PICK = 'root=$PWD; . scripts/environment.sh; pick_python; echo "$python"'


def main(arguments: list[str] | None = None) -> int:
    """Runs the tests on each version, and prints a line for it.

    Args:
        arguments: The command line; None reads `sys.argv`.

    Returns:
        The exit code.
    """
    parser = OneSentenceParser(__doc__, prog="versions.py")
    parser.add_argument("versions", nargs="+", type=_version, help="such as 2.8")
    parser.add_argument("--tests", nargs="+", default=_TESTS, help="files of tests")
    flags = parser.parse_args(arguments)
    print(
        "| TensorFlow | Python | tests | environment | tests take |\n"
        + "|---" * 5
        + "|"
    )
    codes = [_run(version, flags.tests) for version in flags.versions]
    return int(any(codes))


def _version(text: str) -> str:
    if text not in _VERSIONS:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(_VERSIONS)}. Received: {text}"
        )
    return text


def _run(version: str, tests: list[str]) -> int:
    """Returns pytest's exit code."""
    is_older = int(version.split(".")[1]) < 12
    python = "3.10" if is_older else "3.11"
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        own = pathlib.Path(folder, "bin", "python")
        _call(_interpreter(python), "-m", "venv", folder)
        # TensorFlow does not name the protobuf that is too new for it.
        protobuf = "protobuf<3.20" if is_older else "protobuf<5"
        packages = (f"tensorflow-cpu=={version}.*", protobuf, *_PACKAGES)
        _call(own, "-m", "pip", "install", "-qq", "--no-compile", *packages)
        made = time.monotonic()
        command = [own, "-m", "pytest", "-q", "-pno:xdist", "-pno:cacheprovider"]
        done = subprocess.run(
            [*command, "--tb=short", "-mnot slow and not once", *tests],
            cwd=_REPOSITORY,
            env={**os.environ, "PYTHONPATH": "", "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        took = time.monotonic() - made
    *shown, last = done.stdout.splitlines() or ["no output"]
    if done.returncode:
        print("\n".join(shown), file=sys.stderr)
    counts = re.sub(r" in .*|, \d+ warnings?|, \d+ deselected", "", last)
    print(f"| {version} | {python} | {counts} | {made - begun:.0f} s | {took:.0f} s |")
    return done.returncode


def _interpreter(python: str) -> str:
    return subprocess.run(
        ["sh", "-euc", _PICK],
        cwd=_REPOSITORY,
        env={**os.environ, "ONLY_PYTHON": python},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()


def _call(*command) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
