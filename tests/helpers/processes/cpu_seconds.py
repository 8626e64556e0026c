"""CPU seconds of each test, by part: a fixture, or the test's own code.

    ./scripts/test --cpu-seconds=spent.csv
    sort -t, -k4 -gr spent.csv | head

They are those of the test's process and of the programs that it has waited for. Where
other programs run beside the tests, they say more than the clock.
"""

import collections
import csv
import os
import pathlib
from collections.abc import Callable

import pytest

_BUDGET_SECS = 20  # per test on an idle machine; longer tests are reported
_NAME = "cpu_secs"
_tests: dict[str, dict[str, float]] = {}
_processes = []  # seconds of each process that ran tests
_files = []  # the open file of --cpu-seconds, if it is asked for


class Parts:
    """Seconds of each part of a test, without the parts within it."""

    def __init__(self, clock: Callable[[], float]):
        self.secs = collections.Counter()
        self._clock = clock
        self._inner = [0.0]  # seconds of the parts within each part that runs

    def noting(self, part: str):
        """Wraps a hook of pytest that runs a part."""
        begin = self._clock()
        self._inner.append(0.0)
        try:
            return (yield)
        finally:
            secs = self._clock() - begin
            self.secs[part] += secs - self._inner.pop()
            self._inner[-1] += secs


def add_option(parser) -> None:
    """Adds `--cpu-seconds`."""
    text = "CSV file for the CPU seconds of each test and fixture"
    parser.addoption("--cpu-seconds", metavar="FILE", help=text)


## The process that runs tests


def _spent() -> float:
    return sum(os.times()[:4])


_parts = Parts(_spent)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    _parts.secs.clear()
    return (yield from _parts.noting("setup"))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    return (yield from _parts.noting(fixturedef.argname))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    return (yield from _parts.noting("call"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    try:
        return (yield from _parts.noting("teardown"))
    finally:
        item.user_properties.append((_NAME, dict(_parts.secs)))


def pytest_sessionfinish(session):
    """Sends the seconds of the whole process."""
    getattr(session.config, "workeroutput", {})[_NAME] = _spent()


## The process that reports


def pytest_configure(config):
    path = config.getoption("cpu_seconds")
    if path and not hasattr(config, "workerinput"):
        file = open(path, "w", newline="", buffering=1)  # noqa: SIM115, to the end
        _files.append(file)
        csv.writer(file).writerow(["file", "test", "part", "cpu_secs"])


def pytest_runtest_logreport(report):
    if report.when == "teardown":
        parts = _tests[report.nodeid] = dict(report.user_properties)[_NAME]
        file, _, test = report.nodeid.partition("::")
        for part, secs in parts.items():
            for output in _files:
                csv.writer(output).writerow([file, test, part, f"{secs:.2f}"])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    _processes.append(getattr(node, "workeroutput", {}).get(_NAME, 0.0))


def pytest_terminal_summary(terminalreporter):
    """Reports CPU seconds, but fails no test: a busy machine needs more of them."""
    secs_of = {test: sum(parts.values()) for test, parts in _tests.items()}
    folders = collections.Counter()
    for test, secs in secs_of.items():
        folders[str(pathlib.PurePosixPath(test.partition("::")[0]).parent)] += secs
    whole, inside = sum(_processes) or _spent(), sum(secs_of.values())
    terminalreporter.section("CPU seconds")
    line = f"{whole:.0f}: {inside:.0f} in {len(secs_of)} tests, the rest in imports"
    terminalreporter.line(line)
    for folder, secs in folders.most_common():
        terminalreporter.line(f"{secs:.0f} in {folder}")
    for test, secs in collections.Counter(secs_of).most_common():
        if secs > _BUDGET_SECS:
            line = f"{secs:.0f} in {test}: more than the budget of {_BUDGET_SECS}"
            terminalreporter.line(line)
