"""Runs of tests on mutants, side by side, each in a private copy of the tree."""

import contextlib
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from scripts.mutation.mutate import Place

_DEADLINE_SECS = 1800.0  # for the tests of one file


class Copy:
    """A copy of a tree, without ignored files, and a process that runs its tests."""

    def __init__(self, root: pathlib.Path, folder: pathlib.Path):
        """Copies the tree and starts the process."""
        self._folder = folder / "tree"
        command = ["git", "ls-files", "-z", "-c", "-o", "--exclude-standard"]
        names = subprocess.check_output(command, cwd=root, text=True).split("\0")
        for name in filter(lambda name: (root / name).is_file(), names):
            target = self._folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, target, follow_symlinks=False)
        temporary = folder / "tmp"
        temporary.mkdir()
        # PYTHONPATH comes before the finder of an editable install, so the copy is
        # imported, in processes that tests start too.
        variables = {"PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        server = pathlib.Path(__file__).with_name("fork.py")
        self._process = subprocess.Popen(
            [sys.executable, server, temporary],
            cwd=self._folder,
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: list[str], secs: float, place: Place | None = None) -> dict:
        """Runs tests for at most `secs`; with a mutant, until a test notices it.

        Returns:
            The tests that `passed`, the one that `failed`, `why`, and the `secs` taken.
        """
        start = time.monotonic()
        if place is None:
            answer = self._ask(tests, secs, False)
        else:
            path = self._folder / place.mutant.path
            source = path.read_bytes()
            path.write_bytes(place.applied_to(source))
            try:
                answer = self._noticed(tests, secs)
            finally:
                path.write_bytes(source)
        return answer | {"secs": round(time.monotonic() - start, 1)}

    def _noticed(self, tests: list[str], secs: float) -> dict:
        """Runs tests until one fails that also fails alone, not only after others."""
        if not tests:
            return {"passed": [], "failed": None, "why": ""}
        answer = self._ask(tests, secs, True)
        test, passed = answer["failed"], answer["passed"]
        if not test or not passed or answer["why"] == "timeout":
            return answer
        if self._ask([test], secs, True)["failed"]:
            return answer
        answer = self._noticed(tests[tests.index(test) + 1 :], secs)
        return answer | {"passed": passed + answer["passed"]}

    def _ask(self, *request) -> dict:
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def workers(root: pathlib.Path, number: int) -> Iterator["Workers"]:
    """Creates `number` copies of a tree for the duration of a `with` block."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        folders = [pathlib.Path(folder, str(i)) for i in range(number)]
        copies = [Copy(root, each) for each in folders]
        try:
            yield Workers(copies)
        finally:
            for copy in copies:
                copy.close()


class Workers:
    """Copies of a tree that run side by side."""

    def __init__(self, copies: list[Copy]):
        """Takes copies that are all free."""
        self._free, self._number = queue.SimpleQueue(), len(copies)
        for copy in copies:
            self._free.put(copy)

    def answers(self, runs: dict) -> Iterator[tuple]:
        """Calls `Copy.run` with each value of `runs`; yields (key, answer)."""
        with ThreadPoolExecutor(self._number) as pool:
            futures = {pool.submit(self._run, *run): key for key, run in runs.items()}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _run(self, *arguments) -> dict:
        copy = self._free.get()
        try:
            return copy.run(*arguments)
        finally:
            self._free.put(copy)

    def passing(self, tests: Iterable[str]) -> dict[str, float]:
        """Runs tests without a mutant, a file at a time.

        Returns:
            Each test that passes -> the seconds that its file took.
        """
        files = {}
        for test in sorted(tests):
            files.setdefault(test.partition("::")[0], []).append(test)
        runs = {path: (each, _DEADLINE_SECS) for path, each in files.items()}
        answers = [answer for _, answer in self.answers(runs)]
        return {test: each["secs"] for each in answers for test in each["passed"]}
