"""The cost of `estimator_accum.keras.accumulate` inside Keras's `fit`."""

import importlib.util
import json

from scripts.benchmarks.keras_ways import why_not
from scripts.benchmarks.models import SIZES
from scripts.benchmarks.table import Row, make_rows
from scripts.benchmarks.turns import started, take_turns

_PLAIN, _OURS = "plain", "accumulate"


def kerases() -> list[str]:
    """Returns the names of the installed Keras packages."""
    return [name for name in ("keras", "tf_keras") if importlib.util.find_spec(name)]


def fit(
    keras: str, size: str, steps: int, micro_batch_size: int, tokens: int, rounds: int
) -> list[Row]:
    """Compares the time of a micro-step with that of `fit` without accumulation.

    Args:
        keras: A name of `kerases()`.
        size: A name of `SIZES`.
        steps: K [micro-steps per update].
        micro_batch_size: Examples per micro-batch.
        tokens: Tokens per example.
        rounds: Number of runs of each way.
    """
    ways = [_PLAIN, _OURS]
    if keras == "keras" and why_not("Keras built-in") is None:
        ways.append("built-in")
    spec = {
        "keras": keras,
        "size": SIZES[size],
        "steps": steps,
        "micro_batch_size": micro_batch_size,
        "tokens": tokens,
        "micro_steps": 16,
    }
    programs = {way: ("keras_fit", json.dumps(spec | {"way": way})) for way in ways}
    with started(programs) as contenders:
        runs = {way: contender.run for way, contender in contenders.items()}
        answers = take_turns(runs, rounds)
        version = contenders[_OURS].facts["version"]
    values = {way: [1e3 * a["secs"] for a in found] for way, found in answers.items()}
    setting = f"{keras} {version}, BERT-{size}, K={steps}"
    return make_rows("fit", setting, "ms a micro-step", values, _PLAIN)
