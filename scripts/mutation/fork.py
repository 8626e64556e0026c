"""A process that has done the slow imports, and forks a child for each run of pytest.

It works in its current folder; its argument is a folder for temporary files. A line of
its stdin asks for a run:

    [["tests/test_a.py::test_b", ...], deadline in seconds, stops at a failure]

and a line of its stdout answers: the tests that `passed`, the first one that `failed`,
and `why`.
"""

import contextlib
import ctypes
import importlib
import json
import os
import pathlib
import sys
import time

import psutil
import pytest

_SLOW_IMPORTS = ("numpy", "pandas", "matplotlib.pyplot", "tensorflow")
_PR_SET_CHILD_SUBREAPER = 36
_SECS_BETWEEN_LOOKS = 0.02


class _Observer:
    """Runs the chosen tests in the given order; writes a line for each event."""

    def __init__(self, tests: list[str], events: pathlib.Path):
        self._order = {test: number for number, test in enumerate(tests)}
        self._events, self._not_passed = events, set()

    def _write(self, **event) -> None:
        with self._events.open("a") as file:
            print(json.dumps(event), file=file)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]):
        items[:] = [item for item in items if item.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])
        missing = self._order.keys() - {item.nodeid for item in items}
        if missing:
            self._write(failed=min(missing, key=self._order.get), why="not collected")

    def pytest_runtest_logstart(self, nodeid: str):
        self._write(begun=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport):
        if report.failed:
            self._write(failed=report.nodeid, why=f"{report.when} fails")
        if not report.passed:
            self._not_passed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._not_passed:
            self._write(passed=report.nodeid)


def main() -> None:
    """Answers requests until stdin ends."""
    sys.path[0] = os.getcwd()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in _SLOW_IMPORTS:
        importlib.import_module(name)
    # Processes that outlive their parent become children of this one, to be found
    # below.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for line in sys.stdin:
        print(json.dumps(_run(*json.loads(line))), file=answers, flush=True)


def _run(tests: list[str], deadline_secs: float, stops_at_failure: bool) -> dict:
    events = pathlib.Path(sys.argv[1], "events.jsonl")
    events.write_text("")
    end = time.monotonic() + deadline_secs
    child = os.fork()
    if child == 0:
        try:
            os._exit(_pytest(tests, events, stops_at_failure))
        finally:
            os._exit(70)
    status = None
    try:
        while status is None and time.monotonic() < end:
            time.sleep(_SECS_BETWEEN_LOOKS)
            ended, value = os.waitpid(child, os.WNOHANG)
            status = value if ended else None
    finally:
        _kill_all_below()
    passed, failed, why = [], None, ""
    running = tests[0]  # or its file is being imported
    for event in map(json.loads, events.read_text().splitlines()):
        running = event.get("begun", running)
        passed += [event["passed"]] if "passed" in event else []
        if "failed" in event and not failed:
            failed, why = event["failed"], event["why"]
    if status is None:
        failed, why = running, "timeout"
    elif status and not failed:
        failed, why = running, f"exit code {os.waitstatus_to_exitcode(status)}"
    return {"passed": passed, "failed": failed, "why": why}


def _pytest(tests: list[str], events: pathlib.Path, stops_at_failure: bool) -> int:
    os.setsid()
    pathlib.Path("/proc/self/oom_score_adj").write_text("1000")  # spares the parent
    with open(os.devnull) as nothing, open(events.with_name("log.txt"), "w") as log:
        for stream, number in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(stream.fileno(), number)
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    options = ["-q", "-pno:cacheprovider", "-pno:xdist"]
    options += [f"--basetemp={events.with_name('pytest')}", *files]
    options += ["--exitfirst"] if stops_at_failure else []
    return pytest.main(options, plugins=[_Observer(tests, events)])


def _kill_all_below() -> None:
    """Kills all processes that a run has left, in other sessions too."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_SECS_BETWEEN_LOOKS)


if __name__ == "__main__":
    main()
