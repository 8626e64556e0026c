"""Map of lines to the tests that run them: a pytest plugin that records it, a reader.

The plugin gives the running test to coverage.py as its dynamic context, and to
processes that the test starts as the environment variable TEST_CONTEXT. A fixture of
wider scope than a function runs for all tests of its file, so its context is that file.
Lines that run only at import count for each test that runs any other line of their
file.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from xml.etree import ElementTree

import coverage
import pytest

from scripts.mutation.mutate import Place

_VARIABLE = "TEST_CONTEXT"
_CONFIG = """\
[run]
data_file = {folder}/data
parallel = True
context = ${{{variable}-import}}
source =
"""


def record(root: pathlib.Path, folder: pathlib.Path, packages, options) -> int:
    """Runs a tree's tests under coverage, writes the map; returns pytest's code."""
    folder.mkdir(parents=True, exist_ok=True)
    config, report = folder / "coveragerc", folder / "junit.xml"
    sources = "".join(f"    {root / package}\n" for package in packages)
    config.write_text(_CONFIG.format(folder=folder, variable=_VARIABLE) + sources)
    # coverage.py's own .pth file starts it in every process that has this variable.
    variables = os.environ | {"COVERAGE_PROCESS_START": str(config)}
    command = [sys.executable, "-m", "pytest", "-p", __name__, f"--junitxml={report}"]
    done = subprocess.run([*command, *options], cwd=root, env=variables, check=False)
    build(root, folder)
    return done.returncode


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Attributes the lines that run from here on to the test."""
    _switch(item.nodeid)
    result = yield
    _switch("between tests")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef):
    """Attributes the lines of a fixture of wider scope to the file."""
    test = os.environ[_VARIABLE]
    if fixturedef.scope != "function":
        _switch(test.partition("::")[0])
    try:
        return (yield)
    finally:
        _switch(test)


def _switch(context: str) -> None:
    os.environ[_VARIABLE] = context
    if measured := coverage.Coverage.current():
        measured.switch_context(context)


def build(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes `map.json` from the data of coverage.py and JUnit's report in a folder."""
    secs = {}
    for case in ElementTree.parse(folder / "junit.xml").iter("testcase"):
        path = case.get("classname").replace(".", "/") + ".py"
        if all(case.find(word) is None for word in ("failure", "error", "skipped")):
            secs[f"{path}::{case.get('name')}"] = float(case.get("time"))
    numbers = defaultdict(list)  # context -> numbers of its tests
    for number, test in enumerate(secs):
        for context in (test, test.partition("::")[0]):
            numbers[context].append(number)
    lines = defaultdict(lambda: defaultdict(set))
    recorded = list(folder.glob("data.*"))
    if not recorded:
        raise ValueError(
            "`--map` must hold data of coverage.py, which its .pth file starts. "
            f"Received: {folder} without any. Install the `test` extra again."
        )
    for path in recorded:
        data = coverage.CoverageData(str(path))
        data.read()
        for measured in data.measured_files():
            inside = lines[str(pathlib.Path(measured).relative_to(root))]
            for line, contexts in data.contexts_by_lineno(measured).items():
                tests = (context.removeprefix("import|") for context in contexts)
                inside[line].update(*(numbers.get(test, ()) for test in tests))
    tree = {
        path: {line: sorted(tests) for line, tests in sorted(inside.items())}
        for path, inside in sorted(lines.items())
    }
    (folder / "map.json").write_text(json.dumps({"secs": secs, "lines": tree}))


class CoverageMap:
    """Tests that run each line, and the time that they take."""

    def __init__(self, folder: pathlib.Path):
        """Reads `map.json`."""
        content = json.loads((folder / "map.json").read_text())
        self.secs, self._lines = content["secs"], content["lines"]
        self._tests = list(self.secs)

    def tests(self, place: Place) -> list[str]:
        """Returns the tests that run the edit, or else the statement around it.

        For a line that runs at import: the tests that run any line of the file. In a
        function without a recorded line, such as one that AutoGraph has rewritten: the
        tests that run the enclosing function.
        """
        lines = self._lines.get(place.mutant.path, {})
        if not any(place.lines[0] in body for body in place.functions):
            return self._of(lines, map(int, lines))
        own, *outer = place.functions
        tests = self._of(lines, place.lines) or self._of(lines, place.statement)
        if tests or self._of(lines, own):
            return tests
        return next(filter(None, (self._of(lines, body) for body in outer)), [])

    def _of(self, lines: dict, numbers: Iterable[int]) -> list[str]:
        found = set().union(*(lines.get(str(number), ()) for number in numbers))
        return [self._tests[number] for number in sorted(found)]

    def chosen(self, place: Place, budget_secs: float) -> list[str]:
        """Returns the tests to run, in order: at least one, if there is any.

        Tests in files that are named like the module come first, then the fastest ones;
        each further parameter set of a test counts as slower. A file's tests stay
        together.
        """
        words = _words(place.mutant.path.partition("/")[2])
        times, order = Counter(), []
        for test in sorted(self.tests(place), key=self.secs.get):
            path, _, name = test.partition("::")
            function = path, name.partition("[")[0]
            times[function] += 1
            common = len(words & _words(path.rpartition("/")[2]))
            order.append((-common, self.secs[test] * times[function], path, test))
        files, spent_secs = defaultdict(list), 0.0
        for _, _, path, test in sorted(order):
            if not files or spent_secs + self.secs[test] <= budget_secs:
                spent_secs += self.secs[test]
                files[path].append(test)
        return [test for tests in files.values() for test in tests]


def _words(path: str) -> set[str]:
    return set(re.findall("[a-z0-9]+", path)) - {"test", "py"}
