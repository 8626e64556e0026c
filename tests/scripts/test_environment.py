"""scripts/environment.sh, scripts/test, scripts/quickstart and .ci/run."""

import pathlib
import re
import subprocess

import pytest
from packaging.specifiers import SpecifierSet

from tests.helpers import running
from tests.helpers.fake_machine import SHIM, Machine, executable, interpreter

pytestmark = pytest.mark.once
_PYTEST = "pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder "
_PYTEST += "--durations=10"
_RUFF = ["ruff check", "ruff format"]
_SECOND = f"{_PYTEST} -m not once"


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Machine:
    return Machine(tmp_path)


def _picked(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _refusal(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_supported_pythons_are_those_of_the_package():
    project = (running.ROOT / "pyproject.toml").read_text()
    specifier = SpecifierSet(re.search(r'requires-python = "(.+)"', project)[1])
    script = (running.ROOT / "scripts" / "environment.sh").read_text()
    supported = re.search(r'^supported_pythons="(.+)"', script, re.MULTILINE)[1]
    fitting = {f"3.{minor}" for minor in range(6, 30) if f"3.{minor}.5" in specifier}
    assert set(supported.split()) == fitting


def test_preferred_version_is_picked_behind_others_and_a_shim_that_fails(machine):
    executable(machine.bin / "python3.11", SHIM)
    interpreter(machine.bin / "python3.10", "3.10")
    interpreter(machine.bin / "python3", "3.12")
    preferred = interpreter(machine.other_bin / "python3.11", "3.11")
    assert _picked(machine.pick()) == str(preferred)


@pytest.mark.parametrize("is_named", [True, False])
def test_pyenvs_versions_are_searched(machine, is_named):
    root = machine.home / ("somewhere" if is_named else ".pyenv")
    executable(machine.bin / "python3.11", SHIM)
    interpreter(root / "versions" / "3.9.18" / "bin" / "python", "3.9")
    hidden = interpreter(root / "versions" / "3.10.13" / "bin" / "python", "3.10")
    variables = {"PYENV_ROOT": str(root)} if is_named else {}
    assert _picked(machine.pick(**variables)) == str(hidden)


def test_uv_is_asked(machine):
    managed = interpreter(machine.home / "uv" / "python3.10", "3.10")
    answer = f'[ "$1 $2 $last" = "python find 3.10" ] && echo "{managed}"'
    executable(machine.bin / "uv", f"#!/bin/sh\nfor last; do :; done\n{answer}\n")
    assert _picked(machine.pick()) == str(managed)


def test_no_python_at_all_is_one_sentence(machine):
    message = _refusal(machine.pick())
    assert "needs Python 3.10 to 3.13" in message
    assert "(found: no Python at all)" in message
    assert "PYTHON=/path/to/python" in message


def test_unsuitable_pythons_are_named(machine):
    interpreter(machine.bin / "python3", "3.14")
    interpreter(machine.bin / "python", "2.7")
    message = _refusal(machine.pick())
    assert f"found: Python 3.14 at {machine.bin}/python3, Python 2.7 at" in message
    for name in ("python", "python3"):  # also under a plain name
        suitable = interpreter(machine.bin / name, "3.10")
        assert _picked(machine.pick()) == str(suitable)


def test_python_without_venv_is_passed_over_and_named_when_alone(machine):
    bare = interpreter(machine.bin / "python3.11", "3.11", has_venv=False)
    message = _refusal(machine.pick())
    assert f"Received: {bare} without it" in message
    assert "apt-get install python3-venv" in message
    whole = interpreter(machine.bin / "python3.10", "3.10")
    assert _picked(machine.pick()) == str(whole)


def test_explicit_python_wins(machine):
    interpreter(machine.bin / "python3.11", "3.11")
    named = interpreter(machine.home / "my python", "3.10")
    assert _picked(machine.pick(PYTHON=str(named))) == str(named)


@pytest.mark.parametrize(
    ("version", "has_venv", "reason"),
    [
        ("3.14", True, r"\(Python 3\.14 at .*/mine\)"),
        ("3.11", False, r"\(Python 3\.11 at .*/mine without its venv module\)"),
        (None, True, r"\(it does not run\)"),
    ],
)
def test_unsuitable_explicit_python_is_refused(machine, version, has_venv, reason):
    interpreter(machine.bin / "python3.11", "3.11")
    mine = machine.home / "mine"
    if version:
        interpreter(mine, version, has_venv)
    message = _refusal(machine.pick(PYTHON=str(mine)))
    assert re.search(f"PYTHON must name Python .* Received: PYTHON=.*{reason}", message)


@pytest.fixture
def made(machine) -> Machine:
    """A machine with an environment that scripts/test has created and used."""
    interpreter(machine.bin / "python3.11", "3.11")
    first = machine.test("-k", "one thing")
    assert first.returncode == 0, first.stderr
    assert "making .venv with Python 3.11" in first.stderr
    made = ["venv 3.11", f"pip {machine.repository}[test]"]
    assert machine.log == [*made, *_RUFF, f"{_PYTEST} -k one thing"]
    machine.forget_log()
    return machine


def test_environment_is_reused_and_serves_quickstart_until_setup_py_changes(made):
    second = made.test()
    assert second.stderr.startswith("==> using .venv (Python 3.11)\n")
    assert made.log == [*_RUFF, _PYTEST]
    made.forget_log()
    done = made.script("scripts/quickstart", "--output_dir=here")
    assert done.returncode == 0, done.stderr
    demo = made.repository / "scripts" / "quickstart_demo.py"
    assert made.log == [f"{demo} --output_dir here"]
    made.forget_log()
    with (made.repository / "setup.py").open("a") as file:
        file.write("# changed\n")
    made.test()  # installs again in the same environment
    assert made.log[0] == f"pip {made.repository}[test]"


def test_interrupted_installation_is_not_trusted(machine):
    interpreter(machine.bin / "python3.11", "3.11")
    failed = machine.test(FAIL_PIP="1")
    assert failed.returncode == 1
    assert "pip could not install the project" in failed.stderr
    machine.forget_log()
    assert machine.test().returncode == 0
    assert machine.log[:2] == ["venv 3.11", f"pip {machine.repository}[test]"]


def test_another_explicit_python_makes_the_environment_anew(made):
    other = interpreter(made.bin / "python3.10", "3.10")
    made.test(PYTHON=str(other))
    assert made.log[0] == "venv 3.10"
    made.forget_log()
    made.test()  # without PYTHON it stays
    assert made.log[0] == "ruff check"


def test_environment_that_somebody_else_made_is_not_deleted(machine):
    interpreter(machine.bin / "python3.11", "3.11")
    foreign = machine.repository / ".venv"
    interpreter(foreign / "bin" / "python", "3.14")
    (foreign / "pyvenv.cfg").write_text("home = /usr/bin\n")
    message = machine.test()
    assert message.returncode == 2
    assert "Received: one of Python 3.14 that somebody else made." in message.stderr
    assert machine.log == []
    interpreter(foreign / "bin" / "python", "3.10")  # a suitable one is used
    assert machine.test().returncode == 0
    assert machine.log[0] == f"pip {machine.repository}[test]"


def test_second_run_at_the_same_time_waits_for_the_first(machine):
    interpreter(machine.bin / "python3.11", "3.11")
    script = str(machine.repository / "scripts" / "test")
    done, waits = machine.home / "done", "another run is preparing .venv"
    runs = [machine.start(script, PIP_WAITS_FOR=str(done))]
    try:
        running.wait_until(lambda: any("pip " in line for line in machine.log))
        said = machine.home / "said"
        with said.open("w") as file:
            runs.append(machine.start(script, stderr=file))
        running.wait_until(lambda: waits in said.read_text())
    finally:
        done.touch()
        results = [run.communicate(timeout=running.DEADLINE_SECS) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], results
    assert sum(line.startswith("pip ") for line in machine.log) == 1
    assert waits not in results[0][1]


def test_ci_runs_the_suite_on_both_pythons_in_environments_of_their_own(machine):
    other = interpreter(machine.bin / "python3.10", "3.10")
    interpreter(machine.bin / "python3.11", "3.11")
    pyenvs = machine.home / ".pyenv" / "versions" / "3.12.1" / "bin" / "python"
    interpreter(pyenvs, "3.12")
    done = machine.script(".ci/run", "-k", "window", PYTHON=str(other))
    assert done.returncode == 0, done.stderr
    first, second = (f"{pytest} -k window" for pytest in (_PYTEST, _SECOND))
    pip = f"pip {machine.repository}[test]"
    assert sorted(machine.log[:4]) == [pip, pip, "venv 3.11", "venv 3.12"]  # at once
    assert machine.log[4:] == [*_RUFF, first, *_RUFF, second]
    for version in ("3.11", "3.12"):
        assert (machine.repository / f".venv-{version}" / "bin" / "python").exists()
    machine.forget_log()
    assert machine.script(".ci/run").returncode == 0
    assert machine.log == [*_RUFF, _PYTEST, *_RUFF, _SECOND]


@pytest.mark.parametrize("failing", ["3.11", "3.12", "3.11 3.12"])
def test_ci_runs_both_though_one_fails_and_passes_its_code_through(machine, failing):
    for version in ("3.11", "3.12"):
        interpreter(machine.bin / f"python{version}", version)
    done = machine.script(".ci/run", PYTEST_CODE="3", PYTEST_FAILS_ON=failing)
    assert done.returncode == 3
    assert machine.log[-1] == _SECOND and _PYTEST in machine.log
    assert done.stdout.splitlines()[-1] == "3 passed in 0.01s"
    assert done.stderr.splitlines()[-1] == f"failed on Python {failing}"


@pytest.mark.parametrize(("found", "missing"), [("3.11", "3.12"), ("3.12", "3.11")])
def test_ci_without_one_python_says_so_and_does_nothing(machine, found, missing):
    interpreter(machine.bin / f"python{found}", found)
    message = _refusal(machine.script(".ci/run"))
    assert f"needs Python {missing}, and none was found" in message
    assert machine.log == []


def test_unsupported_only_python_is_refused(machine):
    sentence = "must be one of 3.11 3.12 3.13 3.10. Received: ONLY_PYTHON=3.9."
    assert sentence in _refusal(machine.pick(ONLY_PYTHON="3.9"))


@pytest.mark.parametrize("script", ["test", "quickstart"])
def test_help_needs_no_python(machine, script):
    done = machine.script(f"scripts/{script}", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script} ")
    assert "PYTHON=/path/to/python" in done.stdout
    assert machine.log == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--output"], "--output_dir is the only flag. Received: --output."),
        (["--output_dir"], "--output_dir must be followed by a folder."),
    ],
)
def test_quickstart_refuses_a_bad_flag_before_it_installs(machine, arguments, sentence):
    interpreter(machine.bin / "python3.11", "3.11")
    done = machine.script("scripts/quickstart", *arguments)
    assert sentence in _refusal(done) and machine.log == []
