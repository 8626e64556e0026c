"""The cost of accumulation per micro-step, and its growth with K and model size."""

import json

from scripts.benchmarks.bandwidth import bound_secs
from scripts.benchmarks.keras_ways import KERAS_WAYS, why_not
from scripts.benchmarks.models import SIZES
from scripts.benchmarks.table import Row, make_rows
from scripts.benchmarks.turns import started, take_turns
from scripts.benchmarks.ways import GRAPH_WAYS

_BARE, _OURS, _ORIGINAL = "forward and backward", "this project", "original patch"
_BOUND = "memory-bandwidth bound"
_ARRAY_BYTES = 2**28  # larger than any cache
# K = 1 has no window; from 2 on the cost of a micro-step should not depend on K.
_STEPS_OF_GROWTH = (2, 4, 8, 16, 32, 64)


def overhead(
    size: str, steps: int, micro_batch_size: int, tokens: int, rounds: int, starts: int
) -> list[Row]:
    """Compares all ways at one size and one K, against the original patch.

        overhead = (time of a window) / K - (time of forward and backward)

    Args:
        size: A name of `SIZES`.
        steps: K [micro-steps per update].
        micro_batch_size: Examples per micro-batch.
        tokens: Tokens per example.
        rounds: Number of runs of each way after every start.
        starts: Number of times that all programs start anew, since two processes of one
            way differ by more than the runs of one process.

    Returns:
        A row per way, the bound included.
    """
    ways = [*GRAPH_WAYS, *(way for way in KERAS_WAYS if why_not(way) is None)]
    spec = {
        "size": SIZES[size],
        "micro_batch_size": micro_batch_size,
        "tokens": tokens,
        "micro_steps": 16,
    }
    programs = {
        way: ("micro_steps", json.dumps(spec | {"way": way, "steps": steps}))
        for way in ways
    }
    programs[_BOUND] = ("bandwidth", str(_ARRAY_BYTES))
    secs = {name: [] for name in programs}
    for _ in range(starts):
        with started(programs) as contenders:
            for name, its_secs in _secs(contenders, rounds).items():
                secs[name] += its_secs
            facts = contenders[_BARE].facts
    bare = secs.pop(_BARE)
    values = {
        way: [1e3 * (s - b) for s, b in zip(its_secs, bare, strict=True)]
        for way, its_secs in secs.items()
        if way != _BOUND
    }
    values[_BOUND] = [
        1e3 * bound_secs(s, steps, facts["dense_bytes"], facts["sparse_bytes"])
        for s in secs[_BOUND]
    ]
    setting = f"BERT-{size}, K={steps}"
    return make_rows("overhead", setting, "ms a micro-step", values, _ORIGINAL)


def growth(size: str, micro_batch_size: int, tokens: int, rounds: int) -> list[Row]:
    """Measures the time of an update / K, for K from 2 to 64: flat if linear in K.

    Args:
        size: A name of `SIZES`.
        micro_batch_size: Examples per micro-batch.
        tokens: Tokens per example.
        rounds: Number of runs of each K.
    """
    spec = {
        "way": _OURS,
        "size": SIZES[size],
        "micro_batch_size": micro_batch_size,
        "tokens": tokens,
        "micro_steps": 64,
    }
    programs = {
        f"K={steps}": ("micro_steps", json.dumps(spec | {"steps": steps}))
        for steps in _STEPS_OF_GROWTH
    }
    with started(programs) as contenders:
        secs = _secs(contenders, rounds)
    values = {way: [1e3 * s for s in its_secs] for way, its_secs in secs.items()}
    unit, setting = "ms an update / K", f"BERT-{size}"
    return make_rows("growth with K", setting, unit, values, next(iter(values)))


def _secs(contenders, rounds: int) -> dict[str, list[float]]:
    runs = {name: contender.run for name, contender in contenders.items()}
    answers = take_turns(runs, rounds)
    return {
        name: [answer["secs"] for answer in its_answers]
        for name, its_answers in answers.items()
    }
