"""Trains on growing sequences under a memory limit: "auto" against a fixed count.

    python scripts/benchmarks/growing_sequences.py --output_dir=growing

A small BERT trains on batches of 64 examples, first short ones, then longer ones, while
TensorFlow's best-fit allocator holds no more than `--limit_mb`: once with micro-batches
"auto", and once with a fixed number that fits the longest examples, found by doubling
from the number that "auto" ended with. Prints the examples per second of both, writes
`growing.csv` with a row for each update, and `growing.png`. TensorFlow's allocator
waits ten seconds before it reports that memory ran out: figures are given with these
waits, which are paid once, and without. Exit codes: 0; 1 if the losses differ by more
than 1e-3; 2 for invalid flags.
"""

import argparse
import csv
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from matplotlib.figure import Figure

from estimator_accum.runs.command_line import OneSentenceParser, exit_code_of

_BATCH_SIZE = 64
_MOST_MICRO_BATCHES = _BATCH_SIZE
_WAIT_SECS = 10  # of the allocator, before it reports that memory ran out
_LARGEST_DIFFERENCE = 1e-3
_COLUMNS = ("run", "update_step", "tokens", "micro_batches", "secs", "loss")


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_folder("output_dir", "of table and plot")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=_length,
        default=[(16, 2000), (32, 600), (64, 200), (128, 50), (256, 10)],
        metavar="TOKENS:UPDATES",
        help="in turn (default: 16:2000 32:600 64:200 128:50 256:10)",
    )
    parser.add_numbers(("limit_mb", 40, "what tensors may take [MB]"))
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the run of one process
    flags = parser.parse_args(arguments)
    if flags.child:
        print(json.dumps(train(flags.child, flags.lengths)))
        return 0
    if flags.output_dir is None:
        parser.error("--output_dir must name a folder")
    try:
        return exit_code_of(lambda: compare(flags))
    except subprocess.CalledProcessError as error:  # the process has printed the reason
        return error.returncode


def compare(flags: argparse.Namespace) -> int:
    """Trains both ways, prints, writes table and plot; returns the exit code."""
    auto = _train_in_process("auto", flags)
    if auto is None:
        raise ValueError(
            "--limit_mb must allow one example and the update. "
            f"Received: {flags.limit_mb}. Use more."
        )
    count, fixed = auto[-1]["micro_batches"], None
    while fixed is None and count <= _MOST_MICRO_BATCHES:
        fixed = _train_in_process(str(count), flags)
        count *= 2
    if fixed is None:
        raise ValueError(
            "--limit_mb must allow a fixed number of micro-batches. "
            f"Received: {flags.limit_mb}. Use more."
        )
    runs = {"auto": auto, f"fixed {fixed[0]['micro_batches']}": fixed}
    flags.output_dir.mkdir(parents=True, exist_ok=True)
    with open(flags.output_dir / "growing.csv", "w", newline="") as file:
        table = csv.DictWriter(file, _COLUMNS)
        table.writeheader()
        for name, rows in runs.items():
            table.writerows({"run": name, **row} for row in rows)
    for name, rows in runs.items():
        print(f"{name:<10} {_speed(rows):8.1f} examples/s, waits included", end="")
        print(f"; {_speed(rows, _waits(rows)):8.1f} without")
    ratio = _speed(auto, _waits(auto)) / _speed(fixed)
    print(f"auto/fixed {_speed(auto) / _speed(fixed):.2f}, without waits {ratio:.2f}")
    difference = max(
        abs(a["loss"] - f["loss"]) for a, f in zip(auto, fixed, strict=True)
    )
    print(f"largest difference of an update's loss {difference:.1e}")
    draw(runs).savefig(flags.output_dir / "growing.png", dpi=150)
    print(flags.output_dir / "growing.png")
    return int(difference > _LARGEST_DIFFERENCE)


def _speed(rows: list[dict], waits_secs: float = 0.0) -> float:
    """Returns examples per second, without the first update (start-up costs)."""
    secs = sum(row["secs"] for row in rows[1:]) - waits_secs
    return _BATCH_SIZE * (len(rows) - 1) / secs


def _waits(rows: list[dict]) -> float:
    """Returns the allocator's waits before errors, after the first update [seconds]."""
    first, last = rows[0]["micro_batches"], rows[-1]["micro_batches"]
    return _WAIT_SECS * ((last // first).bit_length() - 1)


def _train_in_process(micro_batches: str, flags) -> list[dict] | None:
    """Trains in a new process; returns a row per update, None if memory ran out."""
    environment = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_ENABLE_ONEDNN_OPTS": "0",  # its kernels crash when memory runs out
        "TF_CPU_ALLOCATOR_USE_BFC": "true",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(flags.limit_mb),
    }
    print(f"==> {micro_batches} micro-batches", file=sys.stderr, flush=True)
    command = [sys.executable, str(pathlib.Path(__file__).resolve())]
    lengths = [f"{tokens}:{updates}" for tokens, updates in flags.lengths]
    done = subprocess.run(
        [*command, "--child", micro_batches, "--lengths", *lengths],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def train(micro_batches: str, lengths: list[tuple[int, int]]) -> list[dict] | None:
    """Trains in this process; returns a row per update, None if memory ran out.

    Args:
        micro_batches: A number, or "auto".
        lengths: (tokens per example, number of updates) of each phase, in order.
    """
    import tensorflow as tf

    from estimator_accum import microbatch_model_fn
    from estimator_accum.compat import enable_estimator

    enable_estimator()
    tf.compat.v1.disable_eager_execution()
    tf.compat.v1.logging.set_verbosity("ERROR")
    is_auto = micro_batches == "auto"
    rows = []

    class Rows(tf.compat.v1.train.SessionRunHook):
        def after_create_session(self, session, coord):
            self.before = time.perf_counter()

        def before_run(self, run_context):
            loss = tf.compat.v1.get_collection("batch_loss")
            return tf.compat.v1.train.SessionRunArgs(loss)

        def after_run(self, run_context, run_values):
            now = time.perf_counter()
            tokens = _tokens_of(lengths, len(rows))
            row = {"update_step": len(rows) + 1, "tokens": tokens}
            count = _read_count(folder) if is_auto else int(micro_batches)
            row |= {"micro_batches": count, "secs": now - self.before}
            rows.append(row | {"loss": float(run_values.results[0])})
            self.before = now

    with tempfile.TemporaryDirectory() as folder:
        config = tf.estimator.RunConfig(
            folder,
            tf_random_seed=1,
            save_summary_steps=None,
            save_checkpoints_steps=10**6,
            log_step_count_steps=None,
        )
        count = "auto" if is_auto else int(micro_batches)
        estimator = tf.estimator.Estimator(
            microbatch_model_fn(_model_fn, count), config=config
        )
        try:
            estimator.train(lambda: _dataset(lengths), hooks=[Rows()])
        except (tf.errors.ResourceExhaustedError, ValueError) as error:
            print(error, file=sys.stderr)
            return None
    return rows


def _model_fn(features, labels, mode):
    import tensorflow as tf

    from bert_finetune import modeling
    from bert_finetune.optimization import AdamWeightDecayOptimizer
    from estimator_accum import batch_mean, make_accumulating_train_op

    config = modeling.BertConfig(
        vocab_size=1000,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ones, zeros = tf.ones_like(features), tf.zeros_like(features)
    output = modeling.encode(config, features, ones, zeros, is_training=True)
    logits = modeling.classifier_logits(
        output.pooled, 2, is_training=True, dropout_prob=0.0
    )
    loss = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )
    train_op = make_accumulating_train_op(loss, AdamWeightDecayOptimizer(3e-4), 1)
    tf.compat.v1.add_to_collection("batch_loss", batch_mean(loss))
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def _dataset(lengths):
    """Random tokens; the label says if the first is in the vocabulary's upper half."""
    import numpy as np
    import tensorflow as tf

    def batches():
        random = np.random.default_rng(0)
        for tokens, updates in lengths:
            for _ in range(updates):
                ids = random.integers(0, 1000, [_BATCH_SIZE, tokens]).astype(np.int32)
                yield ids, (ids[:, 0] >= 500).astype(np.int32)

    ids, labels = (tf.TensorSpec([None] * rank, tf.int32) for rank in (2, 1))
    return tf.data.Dataset.from_generator(batches, output_signature=(ids, labels))


def _tokens_of(lengths, update: int) -> int:
    per_update = [tokens for tokens, updates in lengths for _ in range(updates)]
    return per_update[update]


def _read_count(folder: str) -> int:
    path = pathlib.Path(folder) / "micro_batches.json"
    return json.loads(path.read_text())["micro_batches"] if path.exists() else 1


def draw(runs: dict[str, list[dict]]) -> Figure:
    """Draws loss, examples per second and micro-batches against updates."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    loss, speed, count = figure.subplots(3, 1, sharex=True)
    for number, (name, rows) in enumerate(runs.items()):
        style = {
            "label": name,
            "color": f"C{number}",
            "linestyle": "-" if number == 0 else "--",
        }
        updates = [row["update_step"] for row in rows]
        loss.plot(updates, [row["loss"] for row in rows], **style)
        speed.plot(updates, [_BATCH_SIZE / row["secs"] for row in rows], **style)
        count.step(updates, [row["micro_batches"] for row in rows], **style)
    loss.set_ylabel("training loss [nats]")
    speed.set_ylabel("examples per second")
    speed.set_yscale("log")
    count.set_ylabel("micro-batches")
    count.set_yscale("log", base=2)
    count.set_xlabel("optimizer updates")
    rows = next(iter(runs.values()))
    for before, row in itertools.pairwise(rows):
        if row["tokens"] != before["tokens"]:
            for axes in (loss, speed, count):
                axes.axvline(row["update_step"], color="0.7", linewidth=0.8)
    for axes in (loss, speed, count):
        axes.legend(frameon=False)
        axes.grid(True, color="0.9")
    figure.suptitle("Sequences that grow (at the grey lines), under a limit of memory")
    return figure


def _length(text: str) -> tuple[int, int]:
    sizes = text.split(":")
    if len(sizes) != 2 or not all(size.isdigit() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(
            f"must be tokens:updates, such as 16:100. Received: {text!r}"
        )
    return int(sizes[0]), int(sizes[1])


if __name__ == "__main__":
    sys.exit(main())
