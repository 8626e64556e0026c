"""The cost of cutting the batches of a model_fn that has its own optimizer."""

import json

from scripts.benchmarks.models import SIZES
from scripts.benchmarks.table import Row, make_rows
from scripts.benchmarks.turns import started, take_turns

_UNCUT = "uncut"


def unedited(
    size: str, micro_batches: int, micro_batch_size: int, tokens: int, rounds: int
) -> list[Row]:
    """Compares the time of an update in micro-batches with that of the batch at once.

    Args:
        size: A name of `SIZES`.
        micro_batches: Micro-batches per batch.
        micro_batch_size: Examples per micro-batch.
        tokens: Tokens per example.
        rounds: Number of updates of each way.
    """
    batch_size = micro_batches * micro_batch_size
    spec = {"size": SIZES[size], "batch_size": batch_size, "tokens": tokens}
    ways = {_UNCUT: None, f"cut in {micro_batches}": micro_batches}
    programs = {
        way: ("unedited_updates", json.dumps(spec | {"micro_batches": number}))
        for way, number in ways.items()
    }
    with started(programs) as contenders:
        runs = {way: contender.run for way, contender in contenders.items()}
        answers = take_turns(runs, rounds)
    values = {way: [1e3 * a["secs"] for a in found] for way, found in answers.items()}
    setting = f"BERT-{size}, {batch_size} x {tokens}"
    return make_rows("unedited", setting, "ms an update", values, _UNCUT)
