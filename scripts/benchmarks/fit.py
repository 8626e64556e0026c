"""What `estimator_accum.keras.accumulate` costs inside Keras's `fit`."""

import importlib.util
import json

from scripts.benchmarks.keras_ways import why_not
from scripts.benchmarks.models import SIZES
from scripts.benchmarks.table import Row, make_rows
from scripts.benchmarks.turns import started, take_turns

_PLAIN, _OURS = "plain", "accumulate"


def kerases() -> list[str]:
    """Returns the Kerases that are installed."""
    return [name for name in ("keras", "tf_keras") if importlib.util.find_spec(name)]


def fit(
    keras: str, size: str, steps: int, micro_batch_size: int, tokens: int, rounds: int
) -> list[Row]:
    """Compares the time of a micro-step with that of `fit` without accumulation.

    Args:
        keras: One of `kerases()`.
        size: Name of the encoder, of `SIZES`.
        steps: K [micro-steps per update].
        micro_batch_size: Examples.
        tokens: Of an example.
        rounds: How often each has its turn.
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
