"""Contenders in processes of their own, which take turns: A B A B, then B A B A.

A program under the load of another, or after a pause, runs at another speed: what is
compared is measured in the same minute, each process waiting while another one works.
"""

import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterator

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


class Contender:
    """A program that runs once for every line that it reads, and answers in JSON.

    Args:
        module: Of `scripts.benchmarks`.
        argument: Its only one.

    Raises:
        RuntimeError: If it fails; the message ends with what it wrote to stderr.
    """

    def __init__(self, module: str, argument: str):
        self._name = f"{module} {argument}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"scripts.benchmarks.{module}", argument],
            cwd=_REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            self.facts = self._answer()
        except BaseException:
            self.close()
            raise

    def run(self) -> dict:
        """Runs it once, and returns its answer."""
        try:
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says why
        return self._answer()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._name} failed: {self._process.stderr.read()}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def started(programs: dict[str, tuple[str, str]]) -> Iterator[dict[str, Contender]]:
    """Starts a Contender for each name, and ends all of them.

    Args:
        programs: (module, argument) of each.
    """
    contenders = {}
    try:
        for name, (module, argument) in programs.items():
            contenders[name] = Contender(module, argument)
        yield contenders
    finally:
        for contender in contenders.values():
            contender.close()


def take_turns(runs: dict, rounds: int) -> dict[str, list]:
    """Calls each of `runs` once a round, every second round in reverse.

    Args:
        runs: Functions without arguments.
        rounds: How often.

    Returns:
        What each returned, round by round.
    """
    results = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs)[:: 1 if number % 2 == 0 else -1]:
            results[name].append(runs[name]())
    return results


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Returns lower quartile, median and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, statistics.median(values), high
