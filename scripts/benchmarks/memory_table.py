"""Measures peak memory and time of a batch, by its number of micro-batches.

    python scripts/benchmarks/memory_table.py --output_dir=memory

trains a convolutional net, a multi-layer perceptron and BERT-Small, each on batches of
one size: with the plain Estimator without this library, and with `microbatch_model_fn`
in 1 to 64 micro-batches. Each configuration runs in its own process. Memory is the
process's peak resident size minus that at the start of the session. Time is that of an
update, and its ratio to the plain Estimator's time, whose process runs before and
after. Writes `memory.csv` and `memory.png`. Exit codes: 0; that of a process that
failed; 2 for invalid flags. Needs Linux.
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
from collections.abc import Callable
from typing import NamedTuple

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from estimator_accum.runs.command_line import OneSentenceParser

_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_UNTIMED_UPDATES = 2  # the first ones compile, allocate and create slots
_COLUMNS = ("model", "batch_size", "micro_batches", "peak_mb", "update_ms")
_COLUMNS += ("ratio_to_plain",)


class Job(NamedTuple):
    """Measurement of one process.

    Attributes:
        model: A name of `MODELS`.
        micro_batches: Number per batch; 0 is the plain Estimator, without this library.
        updates: Number of timed updates.
        batch_size: Examples per update.
    """

    model: str
    micro_batches: int
    updates: int
    batch_size: int


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_folder("output_dir", "of table and plot")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all"
    )
    parser.add_argument(
        "--micro_batches",
        nargs="+",
        type=_positive,
        default=list(_COUNTS),
        metavar="N",
        help=f"default: {' '.join(map(str, _COUNTS))}",
    )
    parser.add_argument(
        "--updates",
        type=_positive,
        default=8,
        metavar="N",
        help="timed, of each configuration (default: %(default)s)",
    )
    sizes = ", ".join(f"{model.batch_size} ({name})" for name, model in MODELS.items())
    parser.add_argument(
        "--batch_size", type=_positive, metavar="N", help=f"default: {sizes}"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the job of one process
    flags = parser.parse_args(arguments)
    if flags.child:
        print(json.dumps(measure(Job(*json.loads(flags.child)))))
        return 0
    if flags.output_dir is None:
        parser.error("--output_dir must name a folder")
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    try:
        rows = [row for model in flags.models for row in _table(model, flags)]
    except subprocess.CalledProcessError as error:  # the process has printed the reason
        return error.returncode
    table = flags.output_dir / "memory.csv"
    with open(table, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([_COLUMNS, *rows])
    draw(rows).savefig(flags.output_dir / "memory.png", dpi=150)
    print(flags.output_dir / "memory.png")
    return 0


def _table(model: str, flags: argparse.Namespace) -> list[tuple]:
    """Measures one model, prints and returns its rows (0 micro-batches: plain)."""
    size = flags.batch_size or MODELS[model].batch_size
    rows, before = [], None
    for count in (0, *flags.micro_batches):
        peak, millis = _run(Job(model, count, flags.updates, size))
        if count == 0:
            before, ratio = (peak, millis), 1.0
        else:  # the machine's speed may have changed since
            after = _run(Job(model, 0, flags.updates, size))
            ratio = millis / statistics.mean([before[1], after[1]])
            before = after
        row = (model, size, count, round(peak, 1), round(millis, 1), round(ratio, 3))
        rows.append(row)
        print(
            f"{model:<5} batch {size}, {count or 'plain':>5} micro-batches: "
            f"{peak:7.1f} MB {millis:8.1f} ms  ratio {ratio:.2f}",
            flush=True,
        )
    return rows


def _run(job: Job) -> tuple[float, float]:
    """Measures in a new process; returns the peak [MB] and the median update [ms]."""
    command = [sys.executable, str(pathlib.Path(__file__).resolve())]
    done = subprocess.run(
        [*command, "--child", json.dumps(job)],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def measure(job: Job) -> tuple[float, float]:
    """Trains as `job` says; returns the peak [MB] and the median update [ms]."""
    import numpy as np
    import tensorflow as tf

    from estimator_accum import make_accumulating_train_op, microbatch_model_fn
    from estimator_accum.compat import enable_estimator

    enable_estimator()
    tf.compat.v1.disable_eager_execution()
    tf.compat.v1.logging.set_verbosity("ERROR")
    model = MODELS[job.model]

    def model_fn(features, labels, mode):
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=labels, logits=model.make_logits(features)
            )
        )
        optimizer = tf.compat.v1.train.AdamOptimizer(1e-4)
        if job.micro_batches:
            train_op = make_accumulating_train_op(loss, optimizer, 1)
        else:
            step = tf.compat.v1.train.get_or_create_global_step()
            train_op = optimizer.minimize(loss, step)
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    features = model.make_features(np.random.default_rng(0), job.batch_size)
    labels = np.arange(job.batch_size) % 2

    def input_fn():
        # Unknown number of examples for both ways: a known one changes the plain graph.
        dataset = tf.data.Dataset.from_tensors((features, labels)).repeat()
        return dataset.unbatch().batch(job.batch_size)

    class Probe(tf.compat.v1.train.SessionRunHook):
        def after_create_session(self, session, coord):
            self.begin, self.ends = _status_mb("VmRSS"), []

        def after_run(self, run_context, run_values):
            self.ends.append(time.perf_counter())

    probe = Probe()
    if job.micro_batches:
        model_fn = microbatch_model_fn(model_fn, job.micro_batches)
    with tempfile.TemporaryDirectory() as folder:
        config = tf.estimator.RunConfig(folder, save_summary_steps=None)
        estimator = tf.estimator.Estimator(model_fn, config=config)
        estimator.train(input_fn, hooks=[probe], steps=job.updates + _UNTIMED_UPDATES)
    ends = probe.ends[_UNTIMED_UPDATES - 1 :]
    update_ms = 1e3 * statistics.median(np.diff(ends))
    return _status_mb("VmHWM") - probe.begin, update_ms


class Model(NamedTuple):
    """A network whose memory is mostly activations.

    Attributes:
        batch_size: Examples per update.
        make_features: Function of a random generator and a number of examples.
        make_logits: Function of the features; returns logits [B, classes].
    """

    batch_size: int
    make_features: Callable
    make_logits: Callable


def _conv_logits(features):
    import tensorflow as tf

    hidden = features
    for _ in range(8):
        hidden = tf.compat.v1.layers.conv2d(
            hidden, 32, 3, padding="same", activation=tf.nn.relu
        )
    return tf.compat.v1.layers.dense(tf.reduce_mean(hidden, [1, 2]), 10)


def _mlp_logits(features):
    import tensorflow as tf

    hidden = features
    for _ in range(24):
        hidden = tf.compat.v1.layers.dense(hidden, 256, activation=tf.nn.relu)
    return tf.compat.v1.layers.dense(hidden, 10)


def _bert_logits(features):
    import tensorflow as tf

    from bert_finetune import modeling

    config = modeling.BertConfig(  # BERT-Small
        vocab_size=30522,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=2048,
    )
    ones, zeros = tf.ones_like(features), tf.zeros_like(features)
    output = modeling.encode(config, features, ones, zeros, is_training=True)
    return modeling.classifier_logits(output.pooled, 2, is_training=True)


def _normal(*shape):
    return lambda random, n: random.normal(size=[n, *shape]).astype("float32")


def _ids(random, examples):
    return random.integers(0, 30522, [examples, 64]).astype("int32")


MODELS = {
    "conv": Model(1024, _normal(28, 28, 1), _conv_logits),
    "mlp": Model(8192, _normal(256), _mlp_logits),
    "bert": Model(64, _ids, _bert_logits),
}


def draw(rows: list[tuple]) -> Figure:
    """Draws memory on the left, time ratios on the right, one line per model."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    memory, ratio = figure.subplots(1, 2)
    for number, name in enumerate(dict.fromkeys(row[0] for row in rows)):
        own = [row for row in rows if row[0] == name]
        counts = [row[2] for row in own if row[2]]
        label = f"{name}, batches of {own[0][1]}"
        style = {"color": f"C{number}", "label": label}
        memory.plot(counts, [row[3] for row in own if row[2]], marker="o", **style)
        plain = own[0][3]
        memory.plot(counts[0], plain, marker="x", markersize=10, color=f"C{number}")
        ratio.plot(counts, [row[5] for row in own if row[2]], marker="o", **style)
    memory.set_yscale("log")
    memory.set_ylabel("peak memory over the session's begin [MB]")
    memory.set_title("memory (x: the plain Estimator)")
    ratio.set_ylabel("time of an update / plain Estimator's")
    ratio.set_title("time")
    ratio.axhline(1, color="0.6", linewidth=0.8)
    ratio.set_ylim(bottom=0)
    for axes in (memory, ratio):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
        axes.set_xlabel("micro-batches of a batch")
        axes.grid(True, color="0.9")
        axes.legend(frameon=False)
    return figure


def _status_mb(name: str) -> float:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(name)) / 1e3


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"must be an integer >= 1. Received: {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
