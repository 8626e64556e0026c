"""The base of all parts: programs that take turns.

Each contender is a program of its own, a module of this package that calls `serve`. They
take turns, A B, then B A: the load of another program, or a pause, changes a program's
speed, so contenders are measured within the same minute, and each process waits while
another one works.
"""

import contextlib
import csv
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

ARRAY_BYTES = 2**28  # larger than any cache
_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


class Row(NamedTuple):
    """One contender's figure and its ratio to the reference.

    Attributes:
        part: Part of the benchmark.
        setting: Setting that all contenders of a comparison share.
        way: Name of the contender.
        value: Median over the rounds.
        unit: Unit of `value`.
        ratio: Median over the rounds of the ratio to the reference.
        low: Lower quartile of that ratio.
        high: Upper quartile of that ratio.
        reference: Name of the contender with ratio 1.
        share: Median over the rounds of the share of its bound; None without one.
    """

    part: str
    setting: str
    way: str
    value: float
    unit: str
    ratio: float
    low: float
    high: float
    reference: str
    share: float | None = None


def make_rows(
    part: str,
    setting: str,
    unit: str,
    values: dict[str, list[float]],
    reference: str,
    bounds: dict[str, list[float]] | None = None,
) -> list[Row]:
    """Compares contenders round by round with the reference.

    Args:
        part: As in Row.
        setting: As in Row.
        unit: As in Row.
        values: Contender -> its value in each round.
        reference: One of the contenders.
        bounds: Contender -> the most that it could reach in each round.
    """

    def ratios(way: str, others: list[float]) -> tuple[float, float, float]:
        pairs = zip(values[way], others, strict=True)
        return quartiles([value / other for value, other in pairs])

    rows = []
    for way, its_values in values.items():
        low, ratio, high = ratios(way, values[reference])
        share = ratios(way, bounds[way])[1] if way in (bounds or {}) else None
        value = quartiles(its_values)[1]
        row = Row(part, setting, way, value, unit, ratio, low, high, reference, share)
        rows.append(row)
    return rows


def as_text(rows: list[Row]) -> str:
    """Returns the table in Markdown."""
    lines = [
        "| part | setting | way | ratio | quartiles | of | value | share of bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = "" if row.share is None else f"{row.share:.2f}"
        lines.append(
            f"| {row.part} | {row.setting} | {row.way} | {row.ratio:.2f} "
            f"| {row.low:.2f} to {row.high:.2f} | {row.reference} "
            f"| {row.value:.4g} {row.unit} | {share} |"
        )
    return "\n".join(lines) + "\n"


def write(rows: list[Row], folder: pathlib.Path) -> None:
    """Writes `benchmark.csv` and `benchmark.md`."""
    with open(folder / "benchmark.csv", "w", newline="") as file:
        csv.writer(file).writerows([Row._fields, *rows])
    (folder / "benchmark.md").write_text(as_text(rows))


def serve(facts: dict, **answers: Callable[[], float]) -> None:
    """Answers a Contender: facts first, then one line for every line of stdin.

    Args:
        facts: Facts about the program.
        answers: Functions that are called for every line, by the answers' names.
    """
    print(json.dumps(facts), flush=True)
    for _ in sys.stdin:
        values = {name: function() for name, function in answers.items()}
        print(json.dumps(values), flush=True)


class Contender:
    """A program that calls `serve`.

    Args:
        module: Name of a module of this package.
        spec: The program's only argument, as JSON.

    Attributes:
        facts: What the program said about itself.

    Raises:
        RuntimeError: If the program fails; the message ends with its stderr.
    """

    def __init__(self, module: str, spec: dict):
        self._name = f"{module} {json.dumps(spec)}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{module}", json.dumps(spec)],
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
        with contextlib.suppress(BrokenPipeError):  # _answer() raises with the reason
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
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
def started(programs: dict[str, tuple[str, dict]]) -> Iterator[dict[str, Contender]]:
    """Starts a Contender for each name, and ends all of them.

    Args:
        programs: Name -> (module, spec).
    """
    with contextlib.ExitStack() as stack:
        contenders = {}
        for name, (module, spec) in programs.items():
            contenders[name] = Contender(module, spec)
            stack.callback(contenders[name].close)
        yield contenders


def milliseconds(contenders: dict[str, Contender], rounds: int) -> dict[str, list]:
    """Lets contenders take turns; returns name -> its times [ms]."""
    answers = take_turns({name: c.run for name, c in contenders.items()}, rounds)
    return {name: [1e3 * a["secs"] for a in ways] for name, ways in answers.items()}


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


def peak_bytes() -> int:
    """Returns the most memory that this process has had resident."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Returns lower quartile, median and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, statistics.median(values), high


def run_script(arguments: list[str], python: str = sys.executable) -> str:
    """Runs a Python with `arguments` from the repository's root; returns its stdout.

    Raises:
        RuntimeError: If the program fails; the message ends with its stderr.
    """
    done = subprocess.run(
        [python, *arguments],
        cwd=_REPOSITORY,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        command = " ".join(arguments[:2])
        raise RuntimeError(f"{command} failed ({done.returncode}): {done.stderr}")
    return done.stdout


def update_secs(model_dir: pathlib.Path) -> list[tuple[float, float]]:
    """Returns (examples, seconds) of every update, from `train_metrics.csv`.

    The first fifth is left out: its updates compile, allocate and fill buffers.
    """
    with open(model_dir / "train_metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    intervals, before = [], 0.0
    for row in rows:
        examples = float(row["examples"]) - before
        before = float(row["examples"])
        intervals.append((examples, examples / float(row["examples_per_sec"])))
    return intervals[-(-len(intervals) // 5) :]
