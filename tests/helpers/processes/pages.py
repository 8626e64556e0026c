"""Runs the shell blocks of a page as printed, by bash, from a clean folder.

    with pages.shell(folder) as run:
        printed = run(script, {"-m room.main": "-m room.main {} --train_updates=2"})

The folder has the repository's files and an environment `.venv`, first on the path. Its
`python` asks this process to fork each program (see `programs`), which spares it the
import of TensorFlow; its pip finds made-up wheels only; `sbatch`, `srun` and
`docker` are stand-ins.
"""

import contextlib
import fnmatch
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import venv
import zipfile
from collections.abc import Callable, Iterator

import setuptools

from tests.helpers.processes import running

_LONGEST_MESSAGE = 1 << 17  # bytes
_MADE_UP = {"tensorflow_estimator": "2.15.0", "numpy": "1.26"} | dict.fromkeys(
    ("absl_py", "tqdm", "wrapt", "matplotlib", "pandas"), "9"
)
_MADE_UP |= dict.fromkeys(
    ("huggingface_hub", "pooch", "safetensors", "tokenizers"), "9"
)

_PYTHON = """#!{python} -IS
import json, os, socket, sys

arguments = sys.argv[1:]
if arguments[:1] == ["-c"]:
    os.execv({own!r}, [{own!r}, *arguments])
if arguments[:2] == ["-m", "pip"]:
    import subprocess

    code = subprocess.call([{python!r}, "-m", "pip", "--python", {own!r}, *arguments[2:]])
    with open("{environment}/bin/estimator-accum", "r+") as script:
        _, text = script.readline(), script.read()  # pip names the real interpreter
        script.seek(0)
        script.write("#!{environment}/bin/python\\n" + text)
        script.truncate()
    sys.exit(code)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    message = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [message], [0, 1, 2])
    sys.exit(int(server.recv(16) or 1))
"""
_STAND_INS = {
    # As pip writes it where it installs the package.
    "estimator-accum": """#!{environment}/bin/python
import sys
from estimator_accum.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
""",
    "pip": """#!/bin/sh
exec {environment}/bin/python -m pip "$@"
""",
    # A step of two tasks on this machine.
    "srun": """#!/bin/bash
while [[ $1 = --* ]]; do shift; done
export SLURM_JOB_ID=$$ SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2
export SLURM_STEP_NODELIST=localhost SLURMD_NODENAME=localhost
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" && wait $!
""",
    "sbatch": """#!/bin/sh
SLURM_SUBMIT_DIR=$PWD exec bash "$1"
""",
    # The clone is the folder itself.
    "git": """#!/bin/sh
[ "$1" = clone ] && ln -s . estimator-accum
""",
    # Remembers what it has built, and pushes nothing else.
    "docker": """#!/bin/bash
case "$1 $2 $3" in
    "build --tag="*" .") [ -f Dockerfile ] && echo "${{2#--tag=}}" >>built ;;
    "push "*) grep -qxF "$2" built ;;
    *) exit 2 ;;
esac
""",
}


@contextlib.contextmanager
def shell(folder: pathlib.Path) -> Iterator[Callable[..., str]]:
    """Context with a function that runs a script by bash.

    Its arguments are the script, and what makes its programs short: the first words of
    a command line -> the command line to run, where `{}` stands for the rest. It returns
    what the script printed, and fails if the script does.
    """
    for path in running.ROOT.iterdir():
        if not any(
            fnmatch.fnmatch(path.name, pattern)
            for pattern in running.NOT_THE_REPOSITORYS
        ):
            (folder / path.name).symlink_to(path)
    with tempfile.TemporaryDirectory() as short, _Server(f"{short}/socket") as server:
        python = make_environment(folder / ".venv")
        _put_stand_ins(folder / ".venv", python, server.address)
        links = pathlib.Path(short, "wheels")
        links.mkdir()
        write_wheels(links)

        def run(script: str, shortened: dict | None = None) -> str:
            server.shortened = shortened or {}
            variables = {
                "PATH": f"{folder}/.venv/bin:/usr/local/bin:/usr/bin:/bin",
                "HOME": str(folder),
            }
            with tempfile.TemporaryFile() as output:
                code = subprocess.call(
                    ["bash", "-c", script],
                    cwd=folder,
                    env=pip_variables(links) | variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=running.DEADLINE_SECS,
                )
                output.seek(0)
                printed = output.read().decode(errors="replace")
            assert code == 0, f"{code}\n{printed[-8000:]}"
            return printed

        yield run


def pip_variables(links: pathlib.Path) -> dict[str, str]:
    """Returns an environment in which pip finds the wheels of this folder only."""
    # The pages are for a machine on which nobody has chosen an interpreter.
    chosen = ("PYTHON", "ONLY_PYTHON")
    variables = {k: v for k, v in running.environment().items() if k not in chosen}
    return variables | {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(links),
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say: build without isolation
        "PIP_CONFIG_FILE": os.devnull,
    }


def write_wheel(folder: pathlib.Path, name: str, version: str, *needs: str) -> None:
    """Writes a wheel without modules: its name, its version and its requirements."""
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {package}" for package in needs]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        file.writestr(f"{info}/WHEEL", tags)
        file.writestr(f"{info}/RECORD", "")


def write_wheels(folder: pathlib.Path) -> None:
    """Writes wheels without modules of everything that the project needs."""
    for name, version in _MADE_UP.items():
        write_wheel(folder, name, version)
    for minor, patch in ((8, 4), (15, 1), (18, 1), (21, 0)):
        write_wheel(folder, "tensorflow", f"2.{minor}.{patch}")
        write_wheel(folder, "tensorboard", f"2.{minor}.0")
        write_wheel(folder, "tf_keras", f"2.{minor}.0", f"tensorflow==2.{minor}.*")


def make_environment(folder: pathlib.Path) -> pathlib.Path:
    """Creates an environment with nothing but setuptools; returns its interpreter."""
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in ("setuptools*", "_distutils_hack"):
        for part in pathlib.Path(setuptools.__file__).parents[1].glob(name):
            (site / part.name).symlink_to(part)
    return next(folder.glob("bin/python3.*"))


def _put_stand_ins(folder: pathlib.Path, python: pathlib.Path, address: str) -> None:
    """Puts the stand-ins into an environment."""
    names = {"environment": folder, "address": address}
    names |= {"python": sys.executable, "own": str(python)}
    for name, text in {"python": _PYTHON, **_STAND_INS}.items():
        path = folder / "bin" / name
        path.unlink(missing_ok=True)
        path.write_text(text.format(**names))
        path.chmod(0o755)


class _Server:
    """Forks the programs that `.venv/bin/python` is asked for, and ends them."""

    def __init__(self, address: str):
        self.address = address
        self.shortened = {}
        self._programs = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(address)
        self._socket.listen(16)

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for program in self._programs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the socket is closed
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=[connection]).start()

    def _serve(self, connection: socket.socket) -> None:
        message, descriptors, *_ = socket.recv_fds(connection, _LONGEST_MESSAGE, 3)
        arguments, folder, environment = json.loads(message)
        environment["PYTHONPATH"] = str(running.ROOT)
        with connection:
            program = subprocess.Popen(
                [sys.executable, *self._shorten(arguments, folder)],
                cwd=folder,
                env=environment,
                stdin=descriptors[0],
                stdout=descriptors[1],
                stderr=descriptors[2],
                start_new_session=True,
            )
            self._programs.append(program)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(str(program.wait()).encode())

    def _shorten(self, arguments: list[str], folder: str) -> list[str]:
        line = [
            os.path.realpath(argument) if argument[0] == "/" else argument
            for argument in arguments
        ]
        line[0] = line[0].removeprefix(f"{running.ROOT}/")
        line[0] = line[0].removeprefix(f"{folder}/.venv/bin/")
        for words, template in self.shortened.items():
            count = len(words.split())
            if " ".join(line[:count]) == words:
                rest = arguments[count:]
                return [
                    word
                    for part in template.split()
                    for word in (rest if part == "{}" else [part])
                ]
        return arguments
