"""The parts of `scripts/benchmark.py`, each a generator of the rows of its comparisons.

    part(size, flags)

`size` is a name of `SIZES`, `flags` are those of scripts/benchmark.py.
"""

import importlib.metadata
import importlib.util
import itertools
import pathlib
import statistics
import tempfile
from collections.abc import Iterator

from scripts.benchmarks.bandwidth import bound_secs
from scripts.benchmarks.base import (
    ARRAY_BYTES,
    Row,
    make_rows,
    milliseconds,
    run_script,
    started,
    take_turns,
    update_secs,
)
from scripts.benchmarks.cola import cola
from scripts.benchmarks.cores import cores
from scripts.benchmarks.models import SIZES
from scripts.benchmarks.ways import GRAPH_WAYS

_BARE, _OURS, _ORIGINAL = "forward and backward", "this project", "original patch"
_PLAIN, _UNCHECKED = "no accumulation", "this project, skip_window"
_BOUND = "memory-bandwidth bound"
# K = 1 has no window; from 2 on the cost of a micro-step should not depend on K.
_STEPS_OF_GROWTH = (2, 4, 8, 16, 32, 64)
_MIB = 2**20
_DENSE_LAYERS, _DENSE_WIDTH, _DENSE_BATCH = 12, 2048, 4096  # mostly weights
_HOUSING_BATCH, _HOUSING_STEPS = 59, 3
_UNSPLIT, _PARTS = "unsplit", 8
_KERAS_BATCHES = {"convnet": 512, "transformer": 64}  # model: examples


Rows = Iterator[list[Row]]


def overhead(size: str, flags) -> Rows:
    """Compares all ways and the bound at each K, against the original patch.

        overhead = (time of a window) / K - (time of forward and backward)

    All programs start anew several times, since two processes of one way differ by more
    than the runs of one process.
    """
    for steps in flags.accumulation_steps:
        spec = _spec(size, flags) | {"steps": steps, "micro_steps": 16}
        programs = {way: ("micro_steps", spec | {"way": way}) for way in GRAPH_WAYS}
        programs[_BOUND] = ("bandwidth", {"array_bytes": ARRAY_BYTES})
        times = {name: [] for name in programs}
        for _ in range(flags.starts):
            with started(programs) as contenders:
                for name, its_times in milliseconds(contenders, flags.rounds).items():
                    times[name] += its_times
                facts = contenders[_BARE].facts
        bare, per_byte = times.pop(_BARE), times.pop(_BOUND)
        values = {
            way: [time - base for time, base in zip(its_times, bare, strict=True)]
            for way, its_times in times.items()
        }
        traffic = facts["dense_bytes"], facts["sparse_bytes"]
        values[_BOUND] = [
            bound_secs(bandwidth, steps, *traffic) for bandwidth in per_byte
        ]
        setting = f"BERT-{size}, K={steps}"
        yield make_rows("overhead", setting, "ms a micro-step", values, _ORIGINAL)


def _spec(size: str, flags) -> dict:
    batch = {"micro_batch_size": flags.micro_batch_size, "tokens": flags.tokens}
    return {"size": SIZES[size], **batch}


def growth(size: str, flags) -> Rows:
    """Measures the time of an update / K, for K from 2 to 64: flat if linear in K."""
    spec = _spec(size, flags) | {"way": _OURS, "micro_steps": 64}
    programs = {
        f"K={steps}": ("micro_steps", spec | {"steps": steps})
        for steps in _STEPS_OF_GROWTH
    }
    with started(programs) as contenders:
        values = milliseconds(contenders, flags.rounds)
    unit, setting = "ms an update / K", f"BERT-{size}"
    yield make_rows("growth with K", setting, unit, values, next(iter(values)))


def fit(size: str, flags) -> Rows:
    """Compares a micro-step of Keras's `fit` with and without accumulation."""
    for keras in filter(importlib.util.find_spec, ("keras", "tf_keras")):
        ways = ["plain", "accumulate"]
        if keras == "keras" and importlib.metadata.version(keras) >= "3":
            ways.append("built-in")
        for steps in flags.accumulation_steps:
            spec = _spec(size, flags) | {"steps": steps, "micro_steps": 16}
            spec["keras"] = keras
            programs = {way: ("keras_fit", spec | {"way": way}) for way in ways}
            with started(programs) as contenders:
                values = milliseconds(contenders, flags.rounds)
                version = contenders["plain"].facts["version"]
            setting = f"{keras} {version}, BERT-{size}, K={steps}"
            yield make_rows("fit", setting, "ms a micro-step", values, "plain")


def keras_batches(_, flags) -> Rows:
    """Compares Keras's `fit` of whole batches with the same batches in micro-batches.

    Each comparison is of processor seconds, of time, or of the peak of memory.
    """
    losses = "one pass", "two passes"
    for model, loss in itertools.product(_KERAS_BATCHES, losses):
        spec = {"model": model, "loss": loss, "updates": 2}
        spec["batch_size"] = _KERAS_BATCHES[model]
        specs = {
            way: spec | {"micro_batches": number}
            for way, number in {
                _UNSPLIT: 1,
                f"split in {_PARTS}": _PARTS,
                "auto, in memory that is enough": "auto",
            }.items()
        }
        programs = {way: ("keras_batches", values) for way, values in specs.items()}
        with started(programs) as contenders:
            runs = {way: contender.run for way, contender in contenders.items()}
            answers = take_turns(runs, flags.rounds)
            version = contenders[_UNSPLIT].facts["version"]
        compared = {
            unit: {way: [a[name] for a in ways] for way, ways in answers.items()}
            for name, unit in (("processor_secs", "CPU s"), ("secs", "s"))
        }
        compared["MB"] = {way: [_counted_mb(values)] for way, values in specs.items()}
        for unit, values in compared.items():
            setting = f"Keras {version}, {model}, {loss}"
            yield make_rows("Keras batches", setting, unit, values, _UNSPLIT)


def _counted_mb(spec: dict) -> float:
    programs = {"counted": ("keras_batches", spec | {"is_counted": True})}
    with started(programs) as contenders:
        return contenders["counted"].facts["peak_bytes"] / 1e6


def steps(size: str, flags) -> Rows:
    """Compares the first call of a step, which traces it, and a call without work."""
    numbers = {"tf.function": 1, f"split in {_PARTS}": _PARTS}
    spec = _spec(size, flags) | {"batch_size": _PARTS * flags.micro_batch_size}
    programs = {
        way: ("steps", spec | {"micro_batches": number})
        for way, number in numbers.items()
    }
    with started(programs) as contenders:
        runs = {way: contender.run for way, contender in contenders.items()}
        answers = take_turns(runs, flags.rounds)
    firsts, calls = (
        {way: [factor * a[name] for a in ways] for way, ways in answers.items()}
        for name, factor in (("first_secs", 1), ("call_secs", 1e3))
    )
    yield make_rows("steps", f"BERT-{size}, first call", "CPU s", firsts, "tf.function")
    yield make_rows("steps", "five operations", "ms a call", calls, "tf.function")


def unedited(size: str, flags) -> Rows:
    """Compares an update of a model_fn with its own optimizer, split in 4 and unsplit."""
    batch_size = 4 * flags.micro_batch_size
    for loss in "mean", "in-batch":  # the second compares all examples
        spec = _spec(size, flags) | {"batch_size": batch_size, "loss": loss}
        programs = {
            way: ("unedited_updates", spec | {"micro_batches": number})
            for way, number in {"unsplit": None, "split in 4": 4}.items()
        }
        with started(programs) as contenders:
            values = milliseconds(contenders, flags.rounds)
        setting = f"BERT-{size}, {batch_size} x {flags.tokens}, {loss} loss"
        yield make_rows("unedited", setting, "ms an update", values, "unsplit")


def spot_check(size: str, flags) -> Rows:
    """Compares the first updates of a split model_fn with and without the spot check.

    So does it their peak of memory, and that of one micro-batch with a plain Estimator's.
    """
    batch_size = 4 * flags.micro_batch_size
    bert = _spec(size, flags) | {"batch_size": batch_size, "loss": "mean"}
    dense = {"widths": _DENSE_LAYERS * [_DENSE_WIDTH], "batch_size": _DENSE_BATCH}
    for setting, spec, cut, updates in (
        (f"BERT-{size}, {batch_size} x {flags.tokens}", bert, 4, flags.checked_updates),
        (f"{_DENSE_LAYERS} layers of {_DENSE_WIDTH}", dense, 16, 2),
    ):
        ways = {
            "no spot check": {"micro_batches": cut, "is_checked": False},
            "spot check": {"micro_batches": cut},
            "plain Estimator": {"micro_batches": None, "updates": 2},
            "one micro-batch": {"micro_batches": 1, "updates": 2},
        }
        runs = {
            way: lambda values=values, spec=spec, updates=updates: _facts_of(
                {"updates": updates} | spec | values
            )
            for way, values in ways.items()
        }
        facts = take_turns(runs, flags.starts)
        peaks = {w: [f["peak_bytes"] / _MIB for f in all_] for w, all_ in facts.items()}
        secs = {w: [f["processor_secs"] for f in all_] for w, all_ in facts.items()}
        unchecked, checked, plain, one = ways
        for values, unit, first, second in (
            (peaks, "MiB", unchecked, checked),
            (peaks, "MiB", plain, one),
            (secs, f"CPU s, {updates} updates", unchecked, checked),
        ):
            pair = {way: values[way] for way in (first, second)}
            yield make_rows(
                "spot check", f"{setting}, split in {cut}", unit, pair, first
            )


def _facts_of(spec: dict) -> dict:
    with started({"updates": ("unedited_updates", spec)}) as contenders:
        return contenders["updates"].facts


def memory(size: str, flags) -> Rows:
    """Compares the peak resident memory of ways to split a batch.

    The reference is the peak of one micro-batch without accumulation plus 1.1 times the
    parameters' bytes.
    """
    for effective in flags.effective_batch_sizes:
        yield _memory_of(size, effective, flags)


def _memory_of(size: str, effective_batch_size: int, flags) -> list[Row]:
    micro_batch_size = flags.micro_batch_size
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
        spec = _spec(size, flags) | {"micro_batch_size": examples, "way": way}
        spec |= {"steps": steps, "micro_steps": steps}
        with started({way: ("micro_steps", spec)}) as contenders:
            parameter_bytes = contenders[way].facts["parameter_bytes"]
            return contenders[way].run()["peak_bytes"] / _MIB

    runs = {way: lambda spec=spec: peak(*spec) for way, spec in specs.items()}
    values = take_turns(runs, flags.starts)
    reference = f"{micro_batch_size} x 1 and 1.1 x parameters"
    allowed = 1.1 * parameter_bytes / _MIB
    values[reference] = [p + allowed for p in values[f"{micro_batch_size} x 1"]]
    setting = f"BERT-{size}, effective batch {effective_batch_size}"
    return make_rows("peak memory", setting, "MiB", values, reference)


def housing(_, flags) -> Rows:
    """Compares updates of 59 x 3 with the same batch unsplit."""
    effective = _HOUSING_BATCH * _HOUSING_STEPS
    names = {
        "without_accumulation": f"{effective} x 1",
        "with_accumulation": f"{_HOUSING_BATCH} x {_HOUSING_STEPS}",
    }
    values = {label: [] for label in names.values()}
    for _ in range(flags.starts):
        with tempfile.TemporaryDirectory() as folder:
            named = {
                "output_dir": folder,
                "train_updates": flags.housing_updates,
                "train_batch_size": _HOUSING_BATCH,
                "gradient_accumulation_steps": _HOUSING_STEPS,
            }
            arguments = [f"--{name}={value}" for name, value in named.items()]
            run_script(["-m", "housing_example.main", *arguments])
            for name, label in names.items():
                timed = update_secs(pathlib.Path(folder) / name)
                # The median ignores the updates that wait for evaluations and saves.
                values[label].append(1 / statistics.median(secs for _, secs in timed))
    setting, unit = f"effective batch {effective}", "updates a second"
    yield make_rows("housing", setting, unit, values, f"{effective} x 1")


def traffic(_, flags) -> Rows:
    """Compares the bytes that a worker and a parameter server exchange.

    The first comparison is of dense weights, the second of embeddings of which a window
    of 8 micro-steps touches 500 rows.
    """
    spec = {"micro_steps": 48 if flags.rounds > 1 else 8}
    with started({"traffic": ("traffic", spec)}) as contenders:
        facts = contenders["traffic"].facts
    settings = {"dense": "1.06 MB of weights", "sparse": "500 rows of 32 in a window"}
    for kind, setting in settings.items():
        values = {way: [count / 1e6] for way, count in facts[kind].items()}
        first = next(iter(values))
        yield make_rows("traffic", setting, "MB a micro-step", values, first)


# Name -> (part, sizes unless --sizes names others)
PARTS = {
    "overhead": (overhead, list(SIZES)),
    "fit": (fit, ["6-layer"]),
    "keras_batches": (keras_batches, None),
    "growth": (growth, ["small"]),
    "steps": (steps, ["6-layer"]),
    "unedited": (unedited, ["small"]),
    "spot_check": (spot_check, ["small"]),
    "cola": (cola, ["6-layer"]),
    "cores": (cores, ["6-layer"]),
    "memory": (memory, list(SIZES)),
    "housing": (housing, None),
    "traffic": (traffic, None),
}
