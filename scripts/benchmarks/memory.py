"""Peak resident memory of an effective batch, against the number of micro-batches."""

import json

from scripts.benchmarks.models import SIZES
from scripts.benchmarks.table import Row, make_rows
from scripts.benchmarks.turns import started, take_turns

_OURS, _PLAIN = "this project", "no accumulation"
_UNCHECKED = "this project, skip_window"
_MIB = 2**20


def memory(
    size: str,
    effective_batch_size: int,
    micro_batch_size: int,
    tokens: int,
    rounds: int,
) -> list[Row]:
    """Compares ways to cut a batch with one micro-batch and an accumulator.

    Args:
        size: A name of `SIZES`.
        effective_batch_size: Examples per update, a multiple of `micro_batch_size`.
        micro_batch_size: The smallest micro-batch [examples].
        tokens: Tokens per example.
        rounds: Number of measurements of each, each in its own process.

    Returns:
        Rows in MiB; the reference is the peak of one micro-batch without accumulation
        plus 1.1 times the parameters' bytes.
    """
    specs = {f"{micro_batch_size} x 1": (_PLAIN, micro_batch_size, 1)}
    specs[f"{effective_batch_size} x 1"] = (_PLAIN, effective_batch_size, 1)
    steps = 4
    while effective_batch_size // steps >= micro_batch_size:
        examples = effective_batch_size // steps
        specs[f"{examples} x {steps}"] = (_OURS, examples, steps)
        steps *= 2 if examples // 4 < micro_batch_size else 4
    *_, (_, examples, steps) = specs.values()
    specs[f"{examples} x {steps}, skip_window"] = (_UNCHECKED, examples, steps)
    parameter_bytes = 0

    def peak(way, examples, steps):
        nonlocal parameter_bytes
        spec = {"size": SIZES[size], "tokens": tokens, "micro_steps": steps, "way": way}
        spec |= {"micro_batch_size": examples, "steps": steps}
        program = {"alone": ("micro_steps", json.dumps(spec))}
        with started(program) as contenders:
            parameter_bytes = contenders["alone"].facts["parameter_bytes"]
            return contenders["alone"].run()["peak_bytes"] / _MIB

    runs = {way: lambda spec=spec: peak(*spec) for way, spec in specs.items()}
    values = take_turns(runs, rounds)
    reference = f"{micro_batch_size} x 1 and 1.1 x parameters"
    allowed = 1.1 * parameter_bytes / _MIB
    values[reference] = [p + allowed for p in values[f"{micro_batch_size} x 1"]]
    setting = f"BERT-{size}, effective batch {effective_batch_size}"
    return make_rows("peak memory", setting, "MiB", values, reference)
