"""The parts of `scripts/benchmark.py`: what is compared, each part a function to rows."""

import dataclasses
import importlib.util
import json
import pathlib
import re
import statistics
import tempfile

from scripts.benchmarks.bandwidth import bound_secs
from scripts.benchmarks.base import (
    Row,
    make_rows,
    milliseconds,
    run_script,
    started,
    take_turns,
    update_secs,
)
from scripts.benchmarks.keras_ways import KERAS_WAYS, why_not
from scripts.benchmarks.models import SIZES, bert_config
from scripts.benchmarks.ways import GRAPH_WAYS

_BARE, _OURS, _ORIGINAL = "forward and backward", "this project", "original patch"
_PLAIN, _UNCHECKED = "no accumulation", "this project, skip_window"
_BOUND = "memory-bandwidth bound"
_ARRAY_BYTES = 2**28  # larger than any cache
# K = 1 has no window; from 2 on the cost of a micro-step should not depend on K.
_STEPS_OF_GROWTH = (2, 4, 8, 16, 32, 64)
_MIB = 2**20
_COLA_BATCH, _COLA_STEPS, _COLA_TOKENS = 8, 4, 128
_HOUSING_BATCH, _HOUSING_STEPS = 59, 3


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
    spec = {
        "size": SIZES[size],
        "steps": steps,
        "micro_batch_size": micro_batch_size,
        "tokens": tokens,
        "micro_steps": 16,
    }
    ways = [*GRAPH_WAYS, *(way for way in KERAS_WAYS if why_not(way) is None)]
    programs = {way: ("micro_steps", spec | {"way": way}) for way in ways}
    programs[_BOUND] = ("bandwidth", {"array_bytes": _ARRAY_BYTES})
    times = {name: [] for name in programs}
    for _ in range(starts):
        with started(programs) as contenders:
            for name, its_times in milliseconds(contenders, rounds).items():
                times[name] += its_times
            facts = contenders[_BARE].facts
    bare, per_byte = times.pop(_BARE), times.pop(_BOUND)
    values = {
        way: [time - base for time, base in zip(its_times, bare, strict=True)]
        for way, its_times in times.items()
    }
    traffic = facts["dense_bytes"], facts["sparse_bytes"]
    values[_BOUND] = [bound_secs(each, steps, *traffic) for each in per_byte]
    setting = f"BERT-{size}, K={steps}"
    return make_rows("overhead", setting, "ms a micro-step", values, _ORIGINAL)


def growth(size: str, micro_batch_size: int, tokens: int, rounds: int) -> list[Row]:
    """Measures the time of an update / K, for K from 2 to 64: flat if linear in K.

    The arguments are those of `overhead`.
    """
    spec = {
        "way": _OURS,
        "size": SIZES[size],
        "micro_batch_size": micro_batch_size,
        "tokens": tokens,
        "micro_steps": 64,
    }
    programs = {
        f"K={steps}": ("micro_steps", spec | {"steps": steps})
        for steps in _STEPS_OF_GROWTH
    }
    with started(programs) as contenders:
        values = milliseconds(contenders, rounds)
    unit, setting = "ms an update / K", f"BERT-{size}"
    return make_rows("growth with K", setting, unit, values, next(iter(values)))


def kerases() -> list[str]:
    """Returns the names of the installed Keras packages."""
    return [name for name in ("keras", "tf_keras") if importlib.util.find_spec(name)]


def fit(
    keras: str, size: str, steps: int, micro_batch_size: int, tokens: int, rounds: int
) -> list[Row]:
    """Compares a micro-step of Keras's `fit` with and without accumulation.

    Args:
        keras: A name of `kerases()`.
        size: As in `overhead`, and so the others.
        steps: K [micro-steps per update].
        micro_batch_size: Examples per micro-batch.
        tokens: Tokens per example.
        rounds: Number of runs of each way.
    """
    ways = ["plain", "accumulate"]
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
    with started({way: ("keras_fit", spec | {"way": way}) for way in ways}) as made:
        values = milliseconds(made, rounds)
        version = made["plain"].facts["version"]
    setting = f"{keras} {version}, BERT-{size}, K={steps}"
    return make_rows("fit", setting, "ms a micro-step", values, "plain")


def unedited(
    size: str,
    loss: str,
    micro_batches: int,
    micro_batch_size: int,
    tokens: int,
    rounds: int,
) -> list[Row]:
    """Compares an update of a model_fn with its own optimizer, cut and uncut.

    Args:
        size: A name of `SIZES`.
        loss: "mean", or "in-batch" for one that compares all examples.
        micro_batches: Micro-batches per batch.
        micro_batch_size: Examples per micro-batch.
        tokens: Tokens per example.
        rounds: Number of updates of each way.
    """
    batch_size = micro_batches * micro_batch_size
    spec = {"size": SIZES[size], "batch_size": batch_size, "tokens": tokens}
    spec["loss"] = loss
    ways = {"uncut": None, f"cut in {micro_batches}": micro_batches}
    programs = {
        way: ("unedited_updates", spec | {"micro_batches": number})
        for way, number in ways.items()
    }
    with started(programs) as contenders:
        values = milliseconds(contenders, rounds)
    setting = f"BERT-{size}, {batch_size} x {tokens}, {loss} loss"
    return make_rows("unedited", setting, "ms an update", values, "uncut")


def memory(
    size: str,
    effective_batch_size: int,
    micro_batch_size: int,
    tokens: int,
    starts: int,
) -> list[Row]:
    """Compares ways to cut a batch with one micro-batch and an accumulator.

    Args:
        size: A name of `SIZES`.
        effective_batch_size: Examples per update, a multiple of `micro_batch_size`.
        micro_batch_size: The smallest micro-batch [examples].
        tokens: Tokens per example.
        starts: Number of measurements of each, each in its own process.

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
        with started({way: ("micro_steps", spec)}) as contenders:
            parameter_bytes = contenders[way].facts["parameter_bytes"]
            return contenders[way].run()["peak_bytes"] / _MIB

    runs = {way: lambda spec=spec: peak(*spec) for way, spec in specs.items()}
    values = take_turns(runs, starts)
    reference = f"{micro_batch_size} x 1 and 1.1 x parameters"
    allowed = 1.1 * parameter_bytes / _MIB
    values[reference] = [p + allowed for p in values[f"{micro_batch_size} x 1"]]
    setting = f"BERT-{size}, effective batch {effective_batch_size}"
    return make_rows("peak memory", setting, "MiB", values, reference)


def cola(size: str, cola_dir: pathlib.Path, examples: int, starts: int) -> list[Row]:
    """Compares fine-tuning from random weights with 8 x 4: padded, as it is, by tokens.

    Args:
        size: A name of SIZES.
        cola_dir: Folder with CoLA's train.tsv.
        examples: Number of examples, taken at even distances from the training file.
        starts: Number of runs of each way, each in its own process.
    """
    by_tokens = f"--tokens_per_micro_batch={_COLA_BATCH * _COLA_TOKENS}"
    padded = f"padded to {_COLA_TOKENS}"
    ways = {padded: ["--pad_to_max_length"], _OURS: []}
    ways[f"{_OURS}, {by_tokens}"] = [by_tokens]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        _write_cola(folder, size, cola_dir, examples)
        runs = {
            way: lambda flags=flags: _fine_tune(folder, flags)
            for way, flags in ways.items()
        }
        values = take_turns(runs, starts)
    setting = f"BERT-{size}, {_COLA_BATCH} x {_COLA_STEPS}"
    return make_rows("CoLA", setting, "examples a second", values, padded)


def _write_cola(folder, size: str, cola_dir: pathlib.Path, examples: int) -> None:
    lines = (cola_dir / "train.tsv").read_text().splitlines()
    lines = lines[:: max(1, len(lines) // examples)][:examples]
    (folder / "train.tsv").write_text("".join(f"{line}\n" for line in lines))
    # A vocabulary of the sentences' own words gives as many tokens as a real one.
    words = sorted(set(re.findall(r"\w+|[^\w\s]", " ".join(lines).lower())))
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    unused = range(SIZES[size].vocabulary - len(tokens))
    tokens += [f"[unused{number}]" for number in unused]
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    config = dataclasses.asdict(bert_config(SIZES[size], dropout=0.1))
    (folder / "bert_config.json").write_text(json.dumps(config))


def _fine_tune(folder: pathlib.Path, more_flags: list[str]) -> float:
    """Returns examples per second."""
    with tempfile.TemporaryDirectory() as output_dir:
        flags = {
            "task_name": "CoLA",
            "do_train": "true",
            "data_dir": folder,
            "vocab_file": folder / "vocab.txt",
            "bert_config_file": folder / "bert_config.json",
            "max_seq_length": _COLA_TOKENS,
            "train_batch_size": _COLA_BATCH,
            "gradient_accumulation_steps": _COLA_STEPS,
            "num_train_epochs": 1,
            "save_checkpoints_steps": 10**6,
            "output_dir": output_dir,
        }
        flags = [f"--{name}={value}" for name, value in flags.items()]
        run_script(["-m", "bert_finetune.run_classifier", *flags, *more_flags])
        timed = update_secs(pathlib.Path(output_dir))
    return sum(e for e, _ in timed) / sum(secs for _, secs in timed)


def housing(updates: int, starts: int) -> list[Row]:
    """Compares updates of 59 x 3 with the same batch at once.

    Args:
        updates: Updates per run; the first fifth is not timed.
        starts: Number of runs of each, one after the other.
    """
    effective = _HOUSING_BATCH * _HOUSING_STEPS
    names = {
        "without_accumulation": f"{effective} x 1",
        "with_accumulation": f"{_HOUSING_BATCH} x {_HOUSING_STEPS}",
    }
    values = {label: [] for label in names.values()}
    for _ in range(starts):
        with tempfile.TemporaryDirectory() as folder:
            flags = {
                "output_dir": folder,
                "train_updates": updates,
                "train_batch_size": _HOUSING_BATCH,
                "gradient_accumulation_steps": _HOUSING_STEPS,
            }
            flags = [f"--{name}={value}" for name, value in flags.items()]
            run_script(["-m", "housing_example.main", *flags])
            for name, label in names.items():
                timed = update_secs(pathlib.Path(folder) / name)
                # The median ignores the updates that wait for evaluations and saves.
                values[label].append(1 / statistics.median(secs for _, secs in timed))
    setting, unit = f"effective batch {effective}", "updates a second"
    return make_rows("housing", setting, unit, values, f"{effective} x 1")
