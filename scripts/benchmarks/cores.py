"""The part `cores` of `scripts/benchmark.py`: micro-batches side by side, other forms.

Two processes, each on half the cores, compute the gradients of two micro-batches side by
side with nothing to wait for. In the bound of an update with two micro-batches side by
side, that time replaces the one that one process needs for its gradients:

    gradients of two processes + (update of one process - its gradients) + sum

The sum of two gradients is left out if the update has accumulators, which sum anyway.
"""

import concurrent.futures
import os
import pathlib
import re
from collections.abc import Iterator

from scripts.benchmarks.base import Row, make_rows, started, take_turns
from scripts.benchmarks.models import SIZES

# Tokens of 32 sentences: quantiles of CoLA's.
_LENGTHS = [5, 6, 7, 7, *4 * [8], *4 * [9], *4 * [10], *4 * [11], *3 * [12], 13, 13]
_LENGTHS += [14, 15, 15, 16, 18, 20, 23]
_SPLITS = {"32 x 1": 1, "8 x 4": 4}  # micro-steps
_UPDATES, _SUMS = 16, 9  # of one run; the fastest sum counts, as in cola
_ONE, _HALF, _TWO = "one process", "one process, 16 sentences", "two processes"
_BESIDE, _BOUND = "one process, side by side", "bound side by side"
_TWICE = "one process, micro-batches of twice the size"  # the memory of side by side
_WAYS = (_ONE, _HALF, _TWO, _BESIDE, _TWICE)
_GRADIENTS, _SUM = "gradients of ", "sum of two gradients"


def cores(size: str, flags) -> Iterator[list[Row]]:
    """Compares updates of one process and of two, then forms of operations."""
    name = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    machine = f"{name[1]}, {len(os.sched_getaffinity(0))} cores"
    for split, micro_steps in _SPLITS.items():
        secs = _secs(size, micro_steps, flags.rounds)
        setting = f"BERT-{size}, {split}, {machine}"
        rates = _rates(secs, has_sum=micro_steps == 1)
        yield make_rows("cores", setting, "examples a second", rates, _ONE)
        parts = [_ONE, _GRADIENTS + _ONE, _GRADIENTS + _TWO, _SUM]
        values = {way: [1e3 * s for s in secs[way]] for way in parts}
        yield make_rows("cores", setting, "ms an update", values, _ONE)
    spec = {"size": SIZES[size], "sentences": len(_LENGTHS)}
    spec |= {"tokens": sum(_LENGTHS), "longest": max(_LENGTHS)}
    with started({"forms": ("forms", spec)}) as contenders:
        answers = [contenders["forms"].run() for _ in range(flags.rounds)]
    forms = {}
    for name in answers[0]:
        operation, form = name.split(": ")
        forms.setdefault(operation, {})[form] = [1e3 * a[name] for a in answers]
    for operation, values in forms.items():
        setting = f"BERT-{size}, {operation}, {machine}"
        yield make_rows("forms", setting, "ms", values, "today")


def _secs(size: str, micro_steps: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of an update, and of its parts, of all ways by turns."""
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    spec = {"size": SIZES[size], "lengths": _LENGTHS, "updates": _UPDATES}
    spec |= {"has_update": True, "threads": [0, 0]}  # TensorFlow's default: all cores
    shared = spec | {"micro_steps": max(1, micro_steps // 2), "shares": 2}
    halves = [shared | {"taken": [n], "threads": [half, half]} for n in range(2)]
    # Way -> the processes that compute an update together
    ways = {
        _ONE: [spec | {"micro_steps": micro_steps, "shares": 1, "taken": [0]}],
        _HALF: [shared | {"taken": [0]}],
        _TWO: halves,
        _BESIDE: [shared | {"taken": [0, 1], "threads": [half, 2]}],
    }
    if micro_steps > 1:
        twice = {"micro_steps": micro_steps // 2, "shares": 1, "taken": [0]}
        ways[_TWICE] = [spec | twice]
    for way in (_ONE, _TWO):
        ways[_GRADIENTS + way] = [s | {"has_update": False} for s in ways[way]]
    programs = {
        (way, number): ("sentences", its_spec)
        for way, specs in ways.items()
        for number, its_spec in enumerate(specs)
    }

    def slowest(way):  # the update is done when all its processes are
        its = [contenders[way, number] for number in range(len(ways[way]))]
        return max(answer["secs"] for answer in pool.map(lambda c: c.run(), its))

    def sum_secs():
        return 3 * dense_bytes * min(memory.run()["secs"] for _ in range(_SUMS))

    with (
        started(programs) as contenders,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        dense_bytes = contenders[_ONE, 0].facts["dense_bytes"]
        spec = {"array_bytes": dense_bytes}
        with started({"memory": ("bandwidth", spec)}) as meters:
            memory = meters["memory"]
            runs = {way: lambda way=way: slowest(way) for way in ways}
            return take_turns(runs | {_SUM: sum_secs}, rounds)


def _rates(secs: dict[str, list[float]], has_sum: bool) -> dict[str, list[float]]:
    """Returns the examples a second of all ways, and of the bound."""
    gradients = secs[_GRADIENTS + _TWO], secs[_GRADIENTS + _ONE]
    terms = zip(*gradients, secs[_ONE], secs[_SUM], strict=True)
    ways = {way: s for way, s in secs.items() if way in _WAYS}
    ways[_BOUND] = [two - one + update + has_sum * s for two, one, update, s in terms]
    sentences = {way: len(_LENGTHS) for way in ways} | {_HALF: len(_LENGTHS) // 2}
    return {way: [sentences[way] / s for s in ways[way]] for way in ways}
