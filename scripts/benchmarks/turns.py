"""Contenders that each have a process and take turns: A B, then B A.

The load of another program, or a pause, changes a program's speed. So contenders are
measured within the same minute, and each process waits while another one works.
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
        module: Name of a module of `scripts.benchmarks`.
        argument: The program's only argument.

    Raises:
        RuntimeError: If the program fails; the message ends with its stderr.
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
        """Runs the program once, and returns its answer."""
        try:
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # _answer() raises with the reason
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
        programs: Name -> (module, argument).
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
    """Calls each of `runs` once per round, in reverse order every second round.

    Args:
        runs: Name -> function without arguments.
        rounds: Number of rounds.

    Returns:
        Name -> what the function returned in each round.
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
