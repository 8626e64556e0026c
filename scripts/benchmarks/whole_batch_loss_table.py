"""Memory, time and weights of a loss over the whole batch, in micro-batches.

    python scripts/benchmarks/whole_batch_loss_table.py --csv=whole_batch_loss.csv

Trains two towers by in-batch negatives, without dropout, whose masks depend on the cut:
the batch at once, in micro-batches, and in micro-batches on two replicas with half of
the examples each; and one micro-batch alone, as the reference for memory. Each run is a
process of its own, and they take turns. A peak is the peak resident size of some updates
minus the resident size before the first one, in a process whose allocator returns memory
at once, which takes time; those that are timed have TensorFlow's usual one. Exit codes:
0; 1 if the peak on one replica is above --most_memory of (one micro-batch + all
outputs), the time above --most_time of the batch at once, or a weight differs by more
than --most_difference; 2 for invalid flags. Needs Linux.
"""

import argparse
import csv
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import numpy as np

from estimator_accum.runs.command_line import (
    OneSentenceParser,
    check_above_0,
    check_counts,
    exit_code_of,
)
from scripts.benchmarks.plan_table import EXACT_BYTES

_AT_ONCE, _CUT, _REPLICAS = "at once", "micro-batches", "two replicas"
_ALONE = "one micro-batch"
_WIDTH, _LAYERS, _OUTPUTS, _VOCABULARY = 128, 4, 128, 1000
_NOT_TIMED = 2  # first updates


class Row(NamedTuple):
    """One way to train; also the table's columns."""

    way: str
    peak_mb: float
    memory_ratio: float  # of (one micro-batch + all outputs)
    time_ratio: float  # of the batch at once
    difference: float  # largest, of a weight

    def __str__(self) -> str:
        return (
            f"{self.way:<16}peak {self.peak_mb:8.1f} MB, ratio {self.memory_ratio:6.2f}"
            f"  time {self.time_ratio:.2f}  difference {self.difference:.1e}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_numbers(
        ("batch_size", 1024, "examples per update, even"),
        ("micro_batch_size", 32, "examples at once, a divisor of half of them"),
        ("tokens", 32, "tokens per example of each tower"),
        ("updates", 20, "updates after which the weights are compared, above 2"),
        ("rounds", 3, "runs of each way"),
        ("most_memory", 1.15, "highest ratio of memory"),
        ("most_time", 1.5, "highest ratio of time"),
        ("most_difference", 1e-5, "highest difference of a weight"),
    )
    parser.add_argument("--csv", type=pathlib.Path, metavar="FILE", help="the table")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the job of one process
    flags = parser.parse_args(arguments)
    if flags.child:
        print(json.dumps(_train(**json.loads(flags.child))))
        return 0
    return exit_code_of(lambda: _table(flags))


def _table(flags: argparse.Namespace) -> int:
    check_counts(flags)
    check_above_0(flags)
    if flags.batch_size % (2 * flags.micro_batch_size):
        raise ValueError(
            "--micro_batch_size must divide half of --batch_size. Received: "
            f"{flags.micro_batch_size} and {flags.batch_size}. Use 32 and 1024."
        )
    if flags.updates <= _NOT_TIMED:
        raise ValueError(
            f"--updates must be above {_NOT_TIMED}, which are not timed. "
            f"Received: {flags.updates}. Use 20."
        )
    sizes = ("batch_size", "micro_batch_size", "tokens", "updates")
    job = {name: getattr(flags, name) for name in sizes}
    peaks, secs = {}, {way: [] for way in (_AT_ONCE, _CUT, _REPLICAS)}
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            way: os.path.join(folder, f"{way}.npz")
            for way in (_ALONE, _AT_ONCE, _CUT, _REPLICAS)
        }
        for way, path in paths.items():
            few = job | {"way": way, "weights": path, "updates": _NOT_TIMED + 1}
            peaks[way] = _run(few, EXACT_BYTES)["peak"]
        for _ in range(flags.rounds):
            for way, found in secs.items():
                found.append(_run(job | {"way": way, "weights": paths[way]})["secs"])
        weights = {way: dict(np.load(paths[way])) for way in secs}
    rows = _rows(peaks, secs, weights, 2 * 4 * _OUTPUTS * flags.batch_size)
    for row in rows:
        print(row)
    if flags.csv:
        with open(flags.csv, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([Row._fields, *rows])
    _, cut, replicas = rows
    is_good = cut.memory_ratio <= flags.most_memory and all(
        row.time_ratio <= flags.most_time and row.difference <= flags.most_difference
        for row in (cut, replicas)
    )
    return int(not is_good)


def _rows(peaks: dict, secs: dict, weights: dict, output_bytes: int) -> list[Row]:
    reference = peaks[_ALONE] + output_bytes
    rows = []
    for way, found in secs.items():
        ratios = [
            ours / theirs for ours, theirs in zip(found, secs[_AT_ONCE], strict=True)
        ]
        difference = max(
            float(np.abs(weights[way][name] - value).max())
            for name, value in weights[_AT_ONCE].items()
        )
        rows.append(
            Row(
                way,
                round(peaks[way] / 1e6, 1),
                round(peaks[way] / reference, 3),
                round(statistics.median(ratios), 3),
                difference,
            )
        )
    return rows


def _run(job: dict, settings: dict[str, str] | None = None) -> dict:
    """Returns what a process of its own prints, with these environment variables."""
    path = str(pathlib.Path(__file__).resolve())
    done = subprocess.run(
        [sys.executable, path, "--child", json.dumps(job)],
        env=os.environ | (settings or {}) | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _train(
    way: str,
    batch_size: int,
    micro_batch_size: int,
    tokens: int,
    updates: int,
    weights: str,
) -> dict:
    """Trains, writes the weights to a file, and returns peak [bytes] and seconds."""
    import tensorflow as tf

    from estimator_accum import microbatch_model_fn
    from estimator_accum.compat import enable_estimator

    enable_estimator()
    tf.compat.v1.disable_eager_execution()
    tf.compat.v1.logging.set_verbosity("ERROR")
    replicas = 2 if way == _REPLICAS else 1
    at_once = micro_batch_size if way == _ALONE else batch_size

    def input_fn():
        def batch(i):
            shape, seed = [at_once, 2, tokens], tf.stack([i, 0])
            return tf.random.stateless_uniform(shape, seed, 0, _VOCABULARY, tf.int32)

        data = tf.data.Dataset.range(updates).map(batch)
        return data.unbatch().batch(at_once // replicas) if replicas > 1 else data

    strategy = None
    if replicas > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    model_fn = _model_fn
    if way in (_CUT, _REPLICAS):
        micro_batches = batch_size // micro_batch_size // replicas
        model_fn = microbatch_model_fn(model_fn, micro_batches)
    with tempfile.TemporaryDirectory() as folder:
        config = tf.estimator.RunConfig(
            folder,
            train_distribute=strategy,
            save_checkpoints_steps=updates,
            log_step_count_steps=None,
        )
        estimator = tf.estimator.Estimator(model_fn, config=config)
        measured = _make_measured(tf.compat.v1.train.SessionRunHook)
        estimator.train(input_fn, hooks=[measured])
        names = estimator.get_variable_names()
        np.savez(weights, **{n: estimator.get_variable_value(n) for n in names})
    secs = statistics.median(measured.secs[_NOT_TIMED:])
    return {"peak": measured.peak, "secs": secs}


def _model_fn(features, labels, mode):
    import tensorflow as tf

    from estimator_accum import make_accumulating_train_op, whole_batch_loss

    outputs = tuple(_tower(features[:, i], f"tower_{i}") for i in range(2))
    loss = whole_batch_loss(outputs, _in_batch_negatives, across_replicas=True)
    optimizer = tf.compat.v1.train.AdamOptimizer(1e-4)
    train_op = make_accumulating_train_op(loss, optimizer, 1)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def _tower(ids, name: str):
    """Returns embeddings [b, _OUTPUTS] of ids [b, T]."""
    import tensorflow as tf

    v1 = tf.compat.v1

    def kernel(name, rows, columns):
        seed = sum(map(ord, name))
        start = np.random.default_rng(seed).normal(size=[rows, columns]) / rows**0.5
        return v1.get_variable(name, initializer=start.astype(np.float32))

    with v1.variable_scope(name):
        hidden = tf.gather(kernel("embeddings", _VOCABULARY, _WIDTH), ids)
        for i in range(_LAYERS):
            wide = tf.tensordot(hidden, kernel(f"wide_{i}", _WIDTH, 4 * _WIDTH), 1)
            narrow = kernel(f"narrow_{i}", 4 * _WIDTH, _WIDTH)
            hidden += tf.tensordot(tf.nn.gelu(wide), narrow, 1)
        mean = tf.reduce_mean(hidden, 1)
        outputs = tf.matmul(mean, kernel("outputs", _WIDTH, _OUTPUTS))
    return tf.math.l2_normalize(outputs, 1)


def _in_batch_negatives(outputs):
    import tensorflow as tf

    queries, documents = outputs
    logits = 20.0 * tf.matmul(queries, documents, transpose_b=True)
    own = tf.range(tf.shape(logits)[0])
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=own, logits=logits)
    )


def _make_measured(kind: type):
    """Returns a hook that measures updates; `kind` is TensorFlow's class of hooks."""
    from scripts.benchmarks.plan_table import status_bytes

    class Measured(kind):
        def __init__(self):
            self.secs, self._begin = [], None

        def before_run(self, run_context):
            if self._begin is None:
                pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
                self._resident = status_bytes("VmRSS")
            else:
                self._end_update()
            self._begin = time.perf_counter()

        def end(self, session):
            self._end_update()

        def _end_update(self):
            self.secs.append(time.perf_counter() - self._begin)
            self.peak = status_bytes("VmHWM") - self._resident

    return Measured()


if __name__ == "__main__":
    sys.exit(main())
