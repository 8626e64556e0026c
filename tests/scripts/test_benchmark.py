"""scripts/benchmark.py: its arithmetic, its table, and every part at a small size."""

import contextlib
import csv
import importlib.util
import json
import types

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from scripts import benchmark
from scripts.benchmarks import memory, overhead, turns
from scripts.benchmarks.bandwidth import bound_secs
from scripts.benchmarks.keras_ways import why_not
from scripts.benchmarks.models import SIZES, Size
from scripts.benchmarks.script_runs import examples_per_sec, run, update_secs
from scripts.benchmarks.table import as_text, make_rows, write
from scripts.benchmarks.turns import Contender, quartiles, take_turns
from scripts.benchmarks.ways import GRAPH_WAYS


def test_contenders_take_turns_and_every_second_round_goes_backwards():
    order = []
    runs = {name: lambda name=name: order.append(name) or name for name in "ABC"}
    assert take_turns(runs, 3) == {name: [name] * 3 for name in "ABC"}
    assert "".join(order) == "ABCCBAABC"


def test_ratios_are_those_of_the_same_round():
    values = {"slow": [2.0, 20.0, 6.0], "fast": [1.0, 10.0, 2.0]}
    slow, fast = make_rows("part", "setting", "ms", values, "slow")
    assert (slow.ratio, slow.low, slow.high) == (1, 1, 1)
    assert (fast.value, fast.ratio) == (2.0, 0.5)
    assert fast.low == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert quartiles([5.0]) == (5.0, 5.0, 5.0)


def test_bound_is_the_traffic_that_accumulation_cannot_do_without():
    # K = 1: the norm's read, and the update's two reads and a write
    assert bound_secs(1e-9, 1, 100, 0) == pytest.approx(400e-9)
    # K = 4: three additions of three passes each, and the boundary, over 4 micro-steps
    assert bound_secs(1e-9, 4, 100, 0) == pytest.approx((9 + 4) * 100e-9 / 4)
    assert bound_secs(1e-9, 4, 0, 10) == pytest.approx(70e-9)


def test_overhead_is_that_of_all_starts(monkeypatch):
    secs = iter([1.0, 2.0, 3.0])  # of a micro-step, by start; 0.5 without accumulation

    def program(secs):
        facts = {"dense_bytes": 0, "sparse_bytes": 0}
        return types.SimpleNamespace(run=lambda: {"secs": secs}, facts=facts)

    @contextlib.contextmanager
    def started(programs):
        its_secs = next(secs)
        bare = "forward and backward"
        yield {name: program(0.5 if name == bare else its_secs) for name in programs}

    monkeypatch.setattr(overhead, "started", started)
    rows = overhead.overhead("tiny", 4, 1, 1, rounds=2, starts=3)
    ours = next(row for row in rows if row.way == "this project")
    assert (ours.value, ours.ratio) == (1500.0, 1.0)


def test_table_is_printed_and_written_and_drawn(tmp_path):
    rows = make_rows("part", "K=4", "ms", {"one": [2.0], "other": [1.0]}, "one")
    write(rows, tmp_path / "out")
    assert "| part | K=4 | other | 0.50 | 0.50 to 0.50 | one | 1 ms |" in as_text(rows)
    assert (tmp_path / "out" / "benchmark.md").read_text() == as_text(rows)
    assert [row["way"] for row in _rows(tmp_path / "out")] == ["one", "other"]
    pixels = imread(tmp_path / "out" / "benchmark.png")[..., :3].reshape(-1, 3)
    for color in ("0.7", "tab:blue"):  # of the reference and of the other bar
        is_it = np.isclose(pixels, to_rgb(color), atol=0.01).all(axis=1)
        assert is_it.sum() > 1_000


def test_first_fifth_of_the_updates_is_not_timed(tmp_path):
    lines = ["update_step,examples,examples_per_sec"]
    lines += [f"{n},{32 * n},{32 / n}" for n in range(1, 11)]
    (tmp_path / "train_metrics.csv").write_text("\n".join(lines) + "\n")
    timed = update_secs(tmp_path)
    assert [secs for _, secs in timed] == pytest.approx(list(range(3, 11)))
    assert {examples for examples, _ in timed} == {32.0}


def test_first_fifth_of_noted_times_is_not_timed():
    times = [100.0, 200.0, *(200.0 + 2.0 * n for n in range(1, 9))]
    assert examples_per_sec(times, 32) == 16.0


def test_script_or_contender_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"-m housing_example.main failed \(2\).*no"):
        run(["-m", "housing_example.main", "--no_such_flag=1"])
    with pytest.raises(RuntimeError, match="bandwidth many failed: (.|\n)*ValueError"):
        Contender("bandwidth", "many")


def test_way_that_is_not_installed_is_left_out_with_a_sentence():
    sentences = [why_not("Keras built-in"), why_not("GradientAccumulator")]
    # One way needs Keras 2, the other Keras 3; no installation has both.
    assert any(sentence and " is left out: " in sentence for sentence in sentences)


@pytest.fixture
def tiny_is_tiny(monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", Size(1, 8, 1, vocabulary=40))


def _benchmark(folder, *flags):
    """Measures each way once, with the programs of a real run."""
    sizes = ["--sizes=tiny", "--micro_batch_size=2", "--tokens=4", "--runs=1"]
    sizes += ["--accumulation_steps=2", "--rounds=1", "--starts=1"]
    assert benchmark.main([f"--output_dir={folder}", *sizes, *flags]) == 0
    return _rows(folder)


def _rows(folder) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "benchmark.csv").read_text().splitlines()))


@pytest.mark.slow
@pytest.mark.once
def test_every_way_to_accumulate_is_measured(tmp_path, tiny_is_tiny, monkeypatch):
    monkeypatch.setattr(overhead, "_ARRAY_BYTES", 2**20)
    rows = _benchmark(tmp_path, "--parts", "overhead")
    ways = {row["way"] for row in rows}
    assert {"no accumulation", "this project", "original patch"} <= ways
    assert {"per-variable conds", "memory-bandwidth bound"} <= ways
    assert "this project, skip_window" in ways
    assert ("Keras built-in" in ways) == (why_not("Keras built-in") is None)
    assert {row["setting"] for row in rows} == {"BERT-tiny, K=2"}


@pytest.mark.slow
def test_fit_is_measured_with_every_keras(tmp_path, tiny_is_tiny):
    rows = _benchmark(tmp_path, "--fit_size=tiny", "--parts", "fit")
    settings = {row["setting"].split(" ")[0] for row in rows}
    assert settings == {*filter(importlib.util.find_spec, ("keras", "tf_keras"))}
    assert {"plain", "accumulate"} <= {row["way"] for row in rows}
    assert all(float(row["value"]) > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.once
def test_updates_of_an_unedited_model_fn_are_measured(tmp_path, tiny_is_tiny):
    rows = _benchmark(tmp_path, "--unedited_size=tiny", "--parts", "unedited")
    assert [row["way"] for row in rows] == ["uncut", "cut in 4"]
    assert {row["setting"] for row in rows} == {"BERT-tiny, 8 x 4"}
    assert all(float(row["value"]) > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.once
def test_memory_and_housing_are_measured(tmp_path, tiny_is_tiny, monkeypatch):
    answers = []

    @contextlib.contextmanager
    def started_once(programs):  # really started once, its answer reused
        [(name, (_, spec))] = programs.items()
        assert json.loads(spec)["way"] in GRAPH_WAYS
        if not answers:
            with turns.started(programs) as contenders:
                [only] = contenders.values()
                answers.append((only.facts, only.run()))
        facts, answer = answers[0]
        yield {name: types.SimpleNamespace(facts=facts, run=lambda: answer)}

    monkeypatch.setattr(memory, "started", started_once)
    flags = ["--effective_batch_sizes=8", "--housing_updates=2"]
    rows = _benchmark(tmp_path, *flags, "--parts", "memory", "housing")
    peaks = {row["way"]: float(row["value"]) for row in rows[:-2]}
    assert list(peaks)[:4] == ["2 x 1", "8 x 1", "2 x 4", "2 x 4, skip_window"]
    assert all(value > 100 for value in peaks.values())
    assert [row["way"] for row in rows[-2:]] == ["177 x 1", "59 x 3"]


@pytest.mark.slow
@pytest.mark.once
def test_fine_tuning_is_measured(tmp_path, tiny_is_tiny):
    row = "s\t{}\t\tThe {}small dog sleeps.\n"
    lines = [row.format(n % 2, "very " * (n % 5)) for n in range(64)]
    (tmp_path / "train.tsv").write_text("".join(lines))
    flags = [f"--cola_dir={tmp_path}", "--cola_sizes=tiny", "--cola_examples=64"]
    rows = _benchmark(tmp_path / "out", *flags, "--parts", "cola")
    ways = [row["way"] for row in rows]
    by_tokens = "this project, --tokens_per_micro_batch=1024"
    assert ways[:3] == ["padded to 128", "this project", by_tokens]
    assert ways[3] == "original patch, google-research/bert"
    has_torch = importlib.util.find_spec("torch") is not None
    assert ("Hugging Face Trainer" in ways) == has_torch
    assert all(float(row["value"]) > 0 for row in rows)
