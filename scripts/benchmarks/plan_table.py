"""Compares the planner's bytes with the measured peak of BERT encoders in training.

    python scripts/benchmarks/plan_table.py --csv=plan.csv

Each encoder trains in a process of its own, with accumulation over two micro-steps and
the optimizer of BERT, without padding. The measured peak is the largest total size of
live tensors during a micro-step. TensorFlow's own CPU allocator returns blocks of more
than 64 KB to the system at once (MALLOC_MMAP_THRESHOLD_, without oneDNN's allocator),
so this is the peak resident size during the micro-step, minus the resident size when it
starts, plus the bytes that malloc holds for the session then. Exit codes: 0; 1 if a
peak is off by more than 15%; 2 for invalid flags. Needs Linux.
"""

import argparse
import csv
import ctypes
import itertools
import json
import os
import pathlib
import subprocess
import sys

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from bert_finetune.bert_config import BertConfig
from bert_finetune.plan_memory import memory_of
from estimator_accum.runs.command_line import OneSentenceParser

_ACCUMULATION_STEPS = 2
_LARGEST_ERROR = 0.15
_COLUMNS = ("encoder", "examples", "tokens", "dropout", "recompute")
_COLUMNS += ("planned_mb", "measured_mb", "planned_over_measured")
# Layers, hidden, heads; the first three are BERT's published ones.
ENCODERS = {
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "six-layer": (6, 384, 12),
    "base": (12, 768, 12),
}
# Encoders that the table compares; the others are for recompute_table.py.
_COMPARED = ("tiny", "mini", "small", "six-layer")
# Environment in which the peak resident size is that of live tensors.
EXACT_BYTES = {"MALLOC_MMAP_THRESHOLD_": "65536", "TF_ENABLE_ONEDNN_OPTS": "0"}
_SHAPES = ("8x64", "16x128", "32x128", "8x256", "64x128")


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_argument(
        "--encoders",
        nargs="+",
        choices=ENCODERS,
        default=list(_COMPARED),
        help="default: %(default)s",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=shape_of,
        default=[shape_of(text) for text in _SHAPES],
        metavar="BxT",
        help=f"examples x tokens of micro-batches (default: {' '.join(_SHAPES)})",
    )
    parser.add_argument("--csv", type=pathlib.Path, metavar="FILE", help="the table")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the job of one process
    flags = parser.parse_args(arguments)
    if flags.child:
        _measure(*json.loads(flags.child))
        return 0
    rows = []
    try:
        for encoder in flags.encoders:
            for dropout, recompute in itertools.product((False, True), repeat=2):
                rows += _compare(encoder, dropout, recompute, flags.shapes)
    except subprocess.CalledProcessError as error:  # the process has printed the reason
        return error.returncode
    if flags.csv:
        with open(flags.csv, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([_COLUMNS, *rows])
    return int(any(abs(row[-1] - 1) > _LARGEST_ERROR for row in rows))


def _compare(
    encoder: str, dropout: bool, recompute: bool, shapes: list[tuple[int, int]]
) -> list[tuple]:
    """Trains one encoder at each shape, prints a line and returns a row for each."""
    config, rows = make_config(encoder, dropout), []
    for (examples, tokens), measured in zip(
        shapes, _measure_in_process(encoder, dropout, recompute, shapes), strict=True
    ):
        planned = memory_of(
            config, examples, tokens, is_accumulating=True, is_recomputed=recompute
        ).peak
        ratio = round(planned / measured, 3)
        rows.append(
            (encoder, examples, tokens, dropout, recompute)
            + (round(planned / 1e6, 1), round(measured / 1e6, 1), ratio)
        )
        print(
            f"{encoder:<10}{examples:>4} x {tokens:<4} dropout {dropout!s:<6}recompute {recompute!s:<6}"
            f"planned {planned / 1e6:8.1f} MB  measured {measured / 1e6:8.1f} MB  "
            f"ratio {ratio:.2f}",
            flush=True,
        )
    return rows


def _measure_in_process(encoder, dropout, recompute, shapes) -> list[int]:
    environment = os.environ | EXACT_BYTES | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    child = json.dumps([encoder, dropout, recompute, shapes])
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--child", child]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def _measure(
    encoder: str, dropout: bool, recompute: bool, shapes: list[tuple[int, int]]
) -> None:
    """Prints the peak of each shape [bytes], as JSON."""
    import numpy as np

    session, train_op, inputs, begin = start(make_config(encoder, dropout), recompute)
    random = np.random.default_rng(0)
    peaks = []
    for examples, tokens in shapes:
        ids = random.integers(0, 1000, [examples, tokens])
        feed = {inputs: ids}
        for step in range(3 * _ACCUMULATION_STEPS):
            if step == _ACCUMULATION_STEPS:  # one update has created every variable
                peak = 0
            pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            held, resident = held_bytes() - begin, status_bytes("VmRSS")
            session.run(train_op, feed)
            if step >= _ACCUMULATION_STEPS:
                peak = max(peak, held + status_bytes("VmHWM") - resident)
        peaks.append(peak)
    print(json.dumps(peaks))


def start(
    config: BertConfig, is_recomputed: bool = False, steps: int = _ACCUMULATION_STEPS
):
    """Returns a session, the train op, its input, and malloc's bytes at the start."""
    import tensorflow as tf

    from bert_finetune import modeling
    from bert_finetune.optimization import AdamWeightDecayOptimizer
    from estimator_accum import make_accumulating_train_op, recompute

    tf.compat.v1.disable_eager_execution()
    ids = tf.compat.v1.placeholder(tf.int32, [None, None])
    labels = tf.zeros_like(ids[:, 0])
    tf.compat.v1.train.get_or_create_global_step()
    ones, zeros = tf.ones_like(ids), tf.zeros_like(ids)
    output = modeling.encode(
        config,
        ids,
        ones,
        zeros,
        is_training=True,
        recomputed=recompute if is_recomputed else None,
    )
    logits = modeling.classifier_logits(
        output.pooled, 2, is_training=True, dropout_prob=config.hidden_dropout_prob
    )
    loss = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )
    optimizer = AdamWeightDecayOptimizer(1e-5)
    train_op = make_accumulating_train_op(loss, optimizer, steps, clip_norm=1.0)
    initialize = tf.compat.v1.global_variables_initializer()
    session = tf.compat.v1.Session()
    session.run(tf.constant(0))
    begin = held_bytes()
    session.run(initialize)
    return session, train_op, ids, begin


def make_config(encoder: str, dropout: bool) -> BertConfig:
    """Returns the configuration of one of `ENCODERS`."""
    layers, hidden, heads = ENCODERS[encoder]
    rate = 0.1 if dropout else 0.0
    return BertConfig(
        vocab_size=30522,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        hidden_dropout_prob=rate,
        attention_probs_dropout_prob=rate,
    )


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = (
        *((f"unused_{i}", ctypes.c_size_t) for i in range(4)),
        ("hblkhd", ctypes.c_size_t),  # in blocks mapped one by one
        *((f"unused_{i}", ctypes.c_size_t) for i in range(4, 6)),
        ("uordblks", ctypes.c_size_t),  # in all others
        *((f"unused_{i}", ctypes.c_size_t) for i in range(6, 8)),
    )


def held_bytes() -> int:
    """Returns the bytes that malloc has handed out."""
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = _MallocInfo
    info = mallinfo2()
    return info.hblkhd + info.uordblks


def status_bytes(name: str) -> int:
    """Returns a size of this process from the kernel, such as VmRSS [bytes]."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(name))


def shape_of(text: str) -> tuple[int, int]:
    """Returns (examples, tokens) for a text such as 8x128."""
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdigit() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(
            f"must be examples x tokens, such as 8x128. Received: {text!r}"
        )
    return int(sizes[0]), int(sizes[1])


if __name__ == "__main__":
    sys.exit(main())
