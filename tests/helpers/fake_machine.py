"""A machine with fake Pythons, to test the shell scripts without a network.

Interpreters are small shell scripts that answer the scripts' calls of Python, on their
own PATH; the repository is a copy of the relevant files.
"""

import os
import pathlib
import shutil
import subprocess
import sys

from tests.helpers.running import DEADLINE_SECS

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
_TOOLS = ("cat", "cksum", "dirname", "env", "bash", "grep", "ls", "mkdir", "rm", "sh")
_TOOLS += ("chmod", "cp", "sleep")

# $log records the calls; FAIL_PIP, PIP_WAITS_FOR (a file), PYTEST_CODE and
# PYTEST_FAILS_ON (all versions unless set) are set by the test.
_INTERPRETER = """#!/bin/sh
case "$1 $2" in
    "-c "*version_info*) echo {version} ;;
    "-c "*base_prefix*) echo {version} of the fakes ;;
    "-c "*ensurepip*) exit {venv_code} ;;
    "-c "*executable*) echo "{path}" ;;
    "-c "*fcntl*) exec {real} "$@" ;;
    "-m venv")
        echo "venv {version}" >>"$log"
        for folder; do :; done
        rm -rf "$folder"
        mkdir -p "$folder/bin"
        cp "{path}" "$folder/bin/python"
        echo "prompt = 'estimator-accum'" >"$folder/pyvenv.cfg"
        ;;
    "-m pip")
        for last; do :; done
        echo "pip $7" >>"$log"
        until [ -e "${{PIP_WAITS_FOR:-/}}" ]; do sleep 0.01; done
        [ -z "${{FAIL_PIP:-}}" ] || exit 1
        ;;
    "-m ruff") echo "ruff $3" >>"$log" ;;
    "-m pytest")
        shift 2
        echo "pytest $*" >>"$log"
        echo "3 passed in 0.01s"
        case "${{PYTEST_FAILS_ON-{version}}}" in
            *{version}*) exit "${{PYTEST_CODE:-0}}" ;;
        esac
        ;;
    *) echo "$*" >>"$log" ;;
esac
"""
SHIM = """#!/bin/sh
echo "pyenv: python3.11: command not found" >&2
exit 127
"""


def executable(path: pathlib.Path, text: str) -> pathlib.Path:
    """Writes an executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def interpreter(
    path: pathlib.Path, version: str, has_venv: bool = True
) -> pathlib.Path:
    """Writes a fake Python of that version."""
    facts = {"version": version, "venv_code": 0 if has_venv else 1}
    text = _INTERPRETER.format(path=path, real=sys.executable, **facts)
    return executable(path, text)


class Machine:
    """A folder with a copy of the repository's scripts, and a PATH of its own."""

    def __init__(self, folder: pathlib.Path):
        self.repository = folder / "a repository"
        self.bin = folder / "bin"
        self.other_bin = folder / "other bin"
        self.home = folder / "home"
        self._log = folder / "log"
        tools = folder / "tools"
        for new in (self.bin, self.other_bin, self.home, tools):
            new.mkdir()
        for tool in _TOOLS:
            (tools / tool).symlink_to(shutil.which(tool))
        for name in ("scripts/environment.sh", "scripts/test", "scripts/quickstart"):
            self._copy(name)
        for name in ("setup.py", "pyproject.toml", ".ci/run"):
            self._copy(name)
        (self.repository / "room").mkdir()
        (self.repository / "room" / "__init__.py").touch()
        self._environment = {
            "PATH": os.pathsep.join(map(str, (self.bin, self.other_bin, tools))),
            "HOME": str(self.home),
            "log": str(self._log),
        }

    def _copy(self, name: str) -> None:
        target = self.repository / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, target)

    @property
    def log(self) -> list[str]:
        """Calls of the interpreters, one line each."""
        return self._log.read_text().splitlines() if self._log.exists() else []

    def forget_log(self) -> None:
        """Empties the log."""
        self._log.unlink(missing_ok=True)

    def start(
        self, *command: str, stderr=subprocess.PIPE, **variables: str
    ) -> subprocess.Popen:
        """Starts a program with the machine's PATH and these variables."""
        command = [shutil.which("sh"), "-c", 'exec "$@"', "sh", *command]
        options = {"env": self._environment | variables, "cwd": self.home}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, **options
        )

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess:
        """Runs a program to its end."""
        process = self.start(*command, **variables)
        out, err = process.communicate(timeout=DEADLINE_SECS)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def test(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        """Runs scripts/test."""
        return self.script("scripts/test", *arguments, **variables)

    def script(self, name: str, *arguments, **variables) -> subprocess.CompletedProcess:
        """Runs one of the repository's scripts."""
        return self.run(str(self.repository / name), *arguments, **variables)

    def pick(self, **variables: str) -> subprocess.CompletedProcess:
        """Prints the interpreter that the scripts select."""
        script = 'root=$1; . "$1/scripts/environment.sh"; pick_python; echo "$python"'
        return self.run("sh", "-euc", script, "sh", str(self.repository), **variables)
