"""scripts/benchmark.py: every part at a small size."""

import contextlib
import csv
import itertools

import numpy as np
import pytest
import tensorflow as tf

from bert_finetune import modeling
from scripts import benchmark
from scripts.benchmarks import cola, cores, parts
from scripts.benchmarks.bandwidth import bound_secs
from scripts.benchmarks.base import Contender, make_rows, run_script, take_turns
from scripts.benchmarks.models import SIZES, Size, bert_config

pytestmark = pytest.mark.once


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


def test_bound_is_the_traffic_that_accumulation_cannot_do_without():
    # K = 1: the norm's read, and the update's two reads and a write
    assert bound_secs(1e-9, 1, 100, 0) == pytest.approx(400e-9)
    # K = 4: three additions of three passes each, and the boundary, over 4 micro-steps
    assert bound_secs(1e-9, 4, 100, 0) == pytest.approx((9 + 4) * 100e-9 / 4)
    assert bound_secs(1e-9, 4, 0, 10) == pytest.approx(70e-9)


def test_flops_of_a_sentence_are_those_of_its_matrix_products():
    size, tokens = Size(layers=3, hidden=16, heads=2, vocabulary=40), 5
    with tf.Graph().as_default() as graph:
        ids = tf.ones([1, tokens], tf.int32)
        pooled = modeling.encode(
            bert_config(size), ids, ids, ids, is_training=True, is_packed=False
        ).pooled
        variables = tf.compat.v1.trainable_variables()
        gradients = [g for g in tf.gradients(pooled, variables) if g is not None]
        gradients = tf.nest.flatten(gradients, expand_composites=True)
        names = [gradient.op.name for gradient in gradients]
        needed = tf.compat.v1.graph_util.extract_sub_graph(graph.as_graph_def(), names)
        products = [graph.get_operation_by_name(node.name) for node in needed.node]
    flops = 0
    for op in products:
        if "MatMul" in op.type and "embeddings" not in op.name:  # a one-hot product
            is_transposed = (
                op.node_def.attr["transpose_a"].b or op.node_def.attr["adj_x"].b
            )
            inner = op.inputs[0].shape[-2 if is_transposed else -1]
            flops += 2 * op.outputs[0].shape.num_elements() * inner
    assert flops == cola.flops(size, np.array(tokens))


def test_bound_of_fine_tuning_adds_arithmetic_and_traffic():
    size, lengths = Size(layers=1, hidden=2, heads=1, vocabulary=10), np.array([3, 5])
    flops = cola.flops(size, lengths).mean()
    arithmetic = cola.bound_examples_per_sec(size, lengths, 1, 1e-9, 0)
    assert arithmetic == pytest.approx(1e9 / flops)
    # 13 * 2**2 weights of kernels twice for each of 4 micro-steps, both slots twice
    traffic = 4 * (4 * 2 * 52 + 2 * 2 * (52 + 20)) / 32
    both = cola.bound_examples_per_sec(size, lengths, 4, 1e-9, 1e-9)
    assert both == pytest.approx(1e9 / (flops + traffic))


def test_bound_side_by_side_is_an_update_with_the_gradients_of_two_processes():
    secs = {"one process": [8.0], "gradients of one process": [6.0]}
    secs |= {"two processes": [4.0], "gradients of two processes": [2.0]}
    secs |= {"one process, 16 sentences": [8.0], "one process, side by side": [8.0]}
    secs["sum of two gradients"] = [1.0]
    rates = cores._rates(secs, has_sum=True)
    assert rates["bound side by side"] == [32 / (2 + (8 - 6) + 1)]
    assert rates["one process, 16 sentences"] == [16 / 8]
    assert cores._rates(secs, has_sum=False)["bound side by side"] == [32 / 4]


def test_a_python_without_torch_is_refused(capsys, tmp_path):
    flags = ["--parts=cola", f"--cola_dir={tmp_path}"]
    assert benchmark.main([*flags, f"--trainer_python={tmp_path}"]) == 2
    assert "`--trainer_python` must be a Python with torch" in capsys.readouterr().err


def test_a_program_that_fails_says_why():
    with pytest.raises(RuntimeError, match=r"-m housing_example.main failed \(2\).*no"):
        run_script(["-m", "housing_example.main", "--no_such_flag=1"])
    with pytest.raises(RuntimeError, match="bandwidth {} failed: (.|\n)*KeyError"):
        Contender("bandwidth", {})


def test_the_spot_check_is_compared_with_none_and_one_micro_batch_with_none(
    monkeypatch,
):
    facts = {(None, True): 4, (1, True): 5, (4, False): 6, (4, True): 9}
    facts |= {(16, False): 6, (16, True): 9}

    def facts_of(spec):
        mebibytes = facts[spec["micro_batches"], spec.get("is_checked", True)]
        return {"peak_bytes": mebibytes * 2**20, "processor_secs": spec["updates"]}

    monkeypatch.setattr(parts, "_facts_of", facts_of)
    flags = benchmark._parser().parse_args(["--starts=1"])
    table = [row for rows in parts.spot_check("tiny", flags) for row in rows]
    assert [(row.way, row.value) for row in table[:6]] == [
        ("no spot check", 6.0),
        ("spot check", 9.0),
        ("plain Estimator", 4.0),
        ("one micro-batch", 5.0),
        ("no spot check", 100),
        ("spot check", 100),
    ]
    assert [row.ratio for row in table[1::2]] == [1.5, 1.25, 1.0] * 2


def test_batches_of_keras_are_compared_in_processor_seconds_and_memory(monkeypatch):
    class Program:
        def __init__(self, spec):
            number = {"auto": 2}.get(spec["micro_batches"], spec["micro_batches"])
            secs = 1 + number / 8
            self.run = lambda: {"processor_secs": secs, "secs": 2 * secs}
            peak = 1e6 / number if "is_counted" in spec else None
            self.facts = {"version": "2", "peak_bytes": peak}

    @contextlib.contextmanager
    def started(programs):
        yield {way: Program(spec) for way, (_, spec) in programs.items()}

    monkeypatch.setattr(parts, "started", started)
    flags = benchmark._parser().parse_args(["--rounds=1"])
    processor, clock, memory = itertools.islice(parts.keras_batches(None, flags), 3)
    assert [row.way for row in processor][:2] == ["unsplit", "split in 8"]
    assert processor[1].ratio == clock[1].ratio == 2 / 1.125
    assert (memory[1].ratio, memory[2].ratio) == (1 / 8, 1 / 2)


@pytest.mark.slow
def test_a_batch_of_keras_is_measured():
    spec = {"model": "convnet", "loss": "two passes", "updates": 1}
    spec |= {"batch_size": 4, "micro_batches": 2, "is_counted": True}
    program = Contender("keras_batches", spec)
    try:
        assert program.facts["peak_bytes"] > 0
        assert min(program.run().values()) > 0
    finally:
        program.close()


_WAYS = {
    "overhead": {"this project", "original patch", parts._BOUND},
    "fit": {"plain", "accumulate"},
    "growth": {"K=2", "K=4"},
    "steps": {"tf.function", "split in 8"},
    "unedited": {"unsplit", "split in 4"},
    "cola": {"this project, 8 x 4, float32", "bound, 8 x 4, float32"},
    "cores": {"two processes", "bound side by side", "one factor"},
    "memory": {"2 x 1", "8 x 1", "2 x 4", "2 x 4, skip_window"},
    "traffic": {"K=1", "K=8", "1,000 rows", "1,000,000 rows"},
}


_PARTS = [
    pytest.param(part, marks=[] if part in ("growth", "traffic") else pytest.mark.daily)
    for part in _WAYS
]


@pytest.mark.slow
@pytest.mark.parametrize("part", _PARTS)  # docs/performance.md runs the part housing
def test_every_part_measures(part, tmp_path, monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", Size(1, 8, 1, vocabulary=40))
    for module in (cola, parts):
        monkeypatch.setattr(module, "ARRAY_BYTES", 2**20)
    monkeypatch.delitem(cola._OURS, "this project, --effective_batch_size=32")
    monkeypatch.delitem(cola._OURS, "this project, --tokens_per_micro_batch=1024")
    monkeypatch.setattr(parts, "_STEPS_OF_GROWTH", (2, 4))
    row = "s\t{}\t\tThe {}small dog sleeps.\n"
    lines = [row.format(n % 2, "very " * (n % 5)) for n in range(64)]
    (tmp_path / "train.tsv").write_text("".join(lines))
    flags = [f"--parts={part}", "--sizes=tiny", f"--cola_dir={tmp_path}"]
    flags += ["--micro_batch_size=2", "--tokens=4", "--effective_batch_sizes=8"]
    flags += ["--accumulation_steps=2", "--rounds=1", "--starts=1"]
    flags += ["--cola_examples=64", "--precisions=float32"]
    output = tmp_path / "output"
    assert benchmark.main([*flags, f"--output_dir={output}"]) == 0
    table = (output / "benchmark.csv").read_text()
    rows = list(csv.DictReader(table.splitlines()))
    assert _WAYS[part] <= {row["way"] for row in rows}
    assert all(float(row["ratio"]) for row in rows)
    assert (output / "benchmark.md").read_text().count("\n") == len(rows) + 2
