"""scripts/environment.sh, scripts/test, scripts/quickstart, .ci/run, with fake Pythons."""

import pathlib
import re
import shutil
import subprocess
from unittest import mock

import pytest

from tests import conftest
from tests.helpers.processes.running import ROOT, copy_tree

pytestmark = pytest.mark.once
# A Python that only notes what it is asked for; pip and pytest end as a test says.
_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*version_info*) echo {version} ;;
    "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "venv {version}" >>"$log" ;;
    "-m pip") [ "$3" != config ] || {{ echo "${{PIP_OPTIONS:-}}"; echo >>"$log.config"; exit; }}
        echo "pip {version}" >>"$log"
        [ "${{NO_PIP:-}}" != {version} ] || exit 3
        exit "${{PIP_CODE:-0}}" ;;
    "-m uv") echo "uv {version}" $UV_DEFAULT_INDEX $UV_CONSTRAINT >>"$log"; exit "${{UV_CODE:-0}}" ;;
    *changed_tests.py*) echo "tests/a.py tests/b.py $2" ;;
    "-m pytest") echo "pytest {version} $*" >>"$log"; exit "${{PYTEST_CODE:-0}}" ;;
    "-c "* | "-m "*) ;;
    *) echo "$*" >>"$log" ;;
esac
"""
_TOOLS = ("bash", "cat", "cksum", "cp", "dirname", "env", "grep", "mkdir", "mktemp")
_TOOLS += ("rm", "sed", "sh", "sort", "tail")
_BOTH = {"python3.11": "3.11", "python3.12": "3.12"}
_PYENVS = {"../.pyenv/versions/3.11.7/bin/python": "3.11"}
_FOREIGN = {"../a clone/.venv/bin/python": "3.9"}


@pytest.fixture
def run(tmp_path):
    """Runs a command line in a clone; returns exit code, last line, the notes of Pythons.

    The Pythons are given by their names on PATH, or their paths from there; the version
    None is pyenv's shim for a Python that it refuses to start.
    """
    clone, log, tools = tmp_path / "a clone", tmp_path / "log", tmp_path / "bin"
    for name in ("scripts", ".ci"):
        copy_tree(ROOT / name, clone / name)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, clone)
    tools.mkdir()
    for tool in _TOOLS:
        (tools / tool).symlink_to(shutil.which(tool))

    def call(pythons: dict, line: str):
        for name, version in pythons.items():
            path = tools / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = _PYTHON.format(version=version) if version else "#!/bin/sh\nexit 127"
            path.write_text(text)
            path.chmod(0o755)
        log.write_text("")
        variables = f"PATH='{tools}' HOME='{tmp_path}' log='{log}'"
        command = ["env", "-i", "sh", "-c", f"export {variables}; {line}"]
        options = {"cwd": clone, "capture_output": True, "text": True}
        done = subprocess.run(command, check=False, **options)
        assert done.returncode != 2 or done.stderr.count("\n") == 1, done.stderr
        return done.returncode, done.stderr.splitlines()[-1], log.read_text()

    return call


def test_supported_pythons_are_those_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    script = (ROOT / "scripts" / "environment.sh").read_text()
    allowed = re.search(r'requires-python = ">=3.(\d+),<3.(\d+)"', project)
    supported = re.search(r'supported_pythons="(.+)"', script)[1].split()
    assert sorted(supported) == [f"3.{n}" for n in range(*map(int, allowed.groups()))]


@pytest.mark.parametrize(
    ("pythons", "variable", "version"),
    [
        ({"python3.11": None, "python3.10": "3.10", **_PYENVS}, "", "3.11"),
        ({"python3.13": None, "python3": "3.12"}, "", "3.12"),
        (_BOTH, "ONLY_PYTHON=3.12", "3.12"),
        ({**_BOTH, "mine": "3.10"}, "PYTHON=mine", "3.10"),
    ],
)
def test_an_environment_is_made_once(run, pythons, variable, version):
    code, _, log = run(pythons, f"PIP_CODE=3 {variable} scripts/test")
    assert (code, log) == (1, f"venv {version}\n" + f"pip {version}\n" * 2)
    *_, log = run({}, f"UV_CODE=3 {variable} scripts/test -k 'one thing'")
    # An interrupted installation is not trusted.
    assert "--numprocesses=3" in log
    assert re.fullmatch(
        rf"pip {version}\nuv {version}\npip {version}\n"
        rf"pytest {version} .* --without-daily -k one thing\n",
        log,
    )
    code, _, log = run({}, f"PYTEST_CODE=5 {variable} scripts/test")
    assert code == 5 and re.fullmatch(rf"pytest {version} .*\n", log)
    *_, log = run(
        {}, f"mkdir -p tests; : >tests/a.py; {variable} scripts/test tests/a.py"
    )
    assert "--numprocesses=0" in log
    *_, log = run({}, f": >tests/b.py; {variable} scripts/test --changed -x")
    assert re.search(r"--numprocesses=3 .*=10 tests/a.py tests/b.py -x\n", log)
    *_, log = run({}, f"PIP_CODE=3 {variable} scripts/test --all")  # more packages
    assert log == f"pip {version}\n" * 2
    *_, log = run({}, f"{variable} scripts/test --changed --all")
    assert re.search(r"uv .*\n.*=10 tests/a.py tests/b.py --all\n", log)
    *_, log = run({}, f"{variable} scripts/test -x")  # fewer ones
    assert re.fullmatch(rf"pytest {version} .*=10 --without-daily -x\n", log)
    *_, log = run({}, f"{variable} scripts/quickstart --output_dir=here")
    assert log.endswith("scripts/quickstart_demo.py --output_dir here\n")


def test_uv_installs_from_the_index_of_pip_and_under_its_constraints(run, tmp_path):
    options = [":env:.index-url='https://d'", "install.index-url='https://a'"]
    options += ["global.extra-index-url='https://b'", "install.constraint='/c.txt'"]
    options += ["global.index-url='https://b'", "wheel.constraint='/d.txt'"]
    options = 'PIP_OPTIONS="' + "\n".join(options) + '"'
    *_, log = run(_BOTH, f"{options} ONLY_PYTHON=3.12 scripts/test")
    assert "\nuv 3.12 https://a /c.txt\n" in log
    assert (tmp_path / "log.config").read_text() == "\n"  # pip is asked once
    options += " PIP_INDEX_URL=https://d"
    *_, log = run({}, f"{options} ONLY_PYTHON=3.11 scripts/test")
    assert "\nuv 3.11 https://d /c.txt\n" in log
    *_, log = run({}, f"rm -r .venv*; PIP_NO_INDEX=1 {options} scripts/test")
    assert log.startswith("venv 3.11\npip 3.11\npytest 3.11")


@pytest.mark.parametrize(
    ("pythons", "line", "sentence"),
    [
        ({"python3": "3.14"}, "scripts/test", "Python 3.10 to 3.13 .* none was found"),
        (_BOTH, "PYTHON=cat scripts/test", "PYTHON must name .* Received: cat. "),
        (_BOTH, "ONLY_PYTHON=3.9 scripts/test", "one of 3.11 .* Received: 3.9."),
        ({"python3.11": "3.11"}, ".ci/run", "needs Python 3.12 with its venv module"),
        (_BOTH, "scripts/test tests/no.py::test", "Tests must .* tests/no.py::test"),
        (_BOTH, "scripts/quickstart --output", "the only flag. Received: --output"),
        (_FOREIGN, "scripts/test", "Received: Python 3.9. "),
        (_BOTH, "scripts/older_tensorflow 2.7", "from 2.8 to 2.15. Received: 2.7. "),
        (_BOTH, "scripts/older_tensorflow 2.8", "needs Python 3.10 with its venv"),
        (_BOTH, "scripts/release_check", "name the folder with cola/.* Received: none"),
    ],
)
def test_what_does_not_fit_is_one_sentence(run, pythons, line, sentence):
    code, said, log = run(pythons, line)
    assert (code, log) == (2, "") and re.search(sentence, said), said


def test_ci_runs_all_though_one_fails_and_passes_its_code_through(run):
    code, said, log = run(
        _BOTH, "mkdir -p tests/estimator_accum; PYTEST_CODE=3 .ci/run -k window"
    )
    assert code == 3
    assert said == "failed on Python 3.11 3.12 3.11 with TensorFlow 2.12"
    tests = [line for line in log.splitlines() if line.startswith("pytest")]
    calls = sorted(line for line in log.splitlines() if line not in tests)
    versions = ["3.11", "3.11", "3.12"]
    assert calls == [f"{call} {v}" for call in ("pip", "uv", "venv") for v in versions]
    (older,) = (line for line in tests if line.endswith("unedited/test_intercept.py"))
    first, second = (line for line in tests if line != older)
    assert re.fullmatch("pytest 3.11 .*=10 --without-daily -k window", first)
    assert re.fullmatch(
        "pytest 3.12 .*=10 --without-daily -m not once -k window", second
    )


def test_ci_runs_the_first_tests_though_the_second_environment_fails(run):
    line = "mkdir -p tests/estimator_accum; NO_PIP=3.12 .ci/run"
    code, said, log = run(_BOTH, line)
    assert (code, said) == (1, "failed on Python 3.12")
    assert "--without-daily" in log and "pytest 3.12" not in log
    code, _, log = run(_BOTH, "rm -rf .venv*; NO_PIP=3.11 .ci/run")
    assert code == 1 and "--without-daily" not in log


class _Row:
    """A row of a test's table, or a test without rows, as pytest's hook sees it."""

    def __init__(self, room: str, number: int, has_rows: bool):
        self.path = pathlib.Path(f"tests/estimator_accum/{room}/test_a.py")
        self.nodeid = f"{self.path}::test_{number}"
        if has_rows:
            self.nodeid, self.callspec = f"{self.path}::test[{number}]", "a row"
        self.marks = []

    def get_closest_marker(self, name: str):
        return name in self.marks or None

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


@pytest.mark.parametrize("has_rows", [True, False])
@pytest.mark.parametrize(
    ("room", "rows", "chosen"),
    [("hooks", 5, [0, 3]), ("hooks", 24, [0, 6, 12, 18]), ("rows", 5, [*range(5)])],
)
def test_the_second_python_runs_some_rows_of_a_table(room, rows, chosen, has_rows):
    items = [_Row(room, number, has_rows) for number in range(rows)]
    conftest.pytest_collection_modifyitems(mock.Mock(getoption=lambda _: False), items)
    assert [number for number, row in enumerate(items) if not row.marks] == chosen
