"""The program of one contender: updates of `bert_finetune`'s encoder by its optimizer.

    python -m scripts.benchmarks.sentences '{"size": [6, 384, 12], "lengths": [6, 9],
        "updates": 16, "micro_steps": 1, "shares": 2, "taken": [0], "threads": [1, 1],
        "has_update": true}'

An update trains on one sentence of each length, in that many micro-steps and shares of a
micro-step. The program takes some of the shares, those of one micro-step side by side,
with that many threads of an operation and of a session. It serves seconds per update, or,
without the update, seconds of the forward and backward passes of an update.
"""

import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import

import numpy as np
import tensorflow as tf

from bert_finetune.optimization import AdamWeightDecayOptimizer
from bert_finetune.windows import make_windows
from estimator_accum import make_accumulating_train_op
from estimator_accum.programs.batches import Batches
from scripts.benchmarks.base import serve
from scripts.benchmarks.models import Size, classification_loss
from scripts.benchmarks.ways import forward_and_backward, trained

v1 = tf.compat.v1

_DROPOUT = 0.1


def main() -> None:
    """Reads the contender from the command line, and serves."""
    spec = json.loads(sys.argv[1])
    v1.disable_eager_execution()
    v1.train.get_or_create_global_step()
    size, losses, inputs = Size(*spec["size"]), [], []
    with v1.variable_scope("", reuse=v1.AUTO_REUSE):
        for _ in spec["taken"]:
            inputs += [v1.placeholder(tf.int32, [None, None]) for _ in range(2)]
            losses.append(classification_loss(size, *inputs[-2:], _DROPOUT))
    loss = tf.add_n(losses) / len(losses)
    run_op = forward_and_backward(loss, None)
    if spec["has_update"]:
        adam = AdamWeightDecayOptimizer(1e-5)
        run_op = make_accumulating_train_op(
            loss, adam, spec["micro_steps"], clip_norm=1.0
        )
    operation, session = spec["threads"]
    config = v1.ConfigProto(
        intra_op_parallelism_threads=operation, inter_op_parallelism_threads=session
    )
    session = v1.Session(config=config)
    session.run(v1.global_variables_initializer())
    run = session.make_callable(run_op, inputs)
    feeds = _feeds(size, spec)

    def secs():
        start = time.perf_counter()
        for values in feeds:
            run(*values)
        return (time.perf_counter() - start) / spec["updates"]

    secs()  # compiles and allocates for each shape
    dense = [v for g, v in trained(loss) if not isinstance(g, tf.IndexedSlices)]
    serve({"dense_bytes": 4 * sum(v.shape.num_elements() for v in dense)}, secs=secs)


def _feeds(size: Size, spec: dict) -> list[list[np.ndarray]]:
    """Returns the ids and masks [B, T] of each micro-step."""
    random, feeds = np.random.default_rng(0), []
    lengths = np.tile(spec["lengths"], spec["updates"])
    batches = Batches(len(spec["lengths"]), spec["micro_steps"], spec["shares"])
    windows = make_windows(len(lengths), 1, batches, 0, lengths)
    for update in range(windows.num_updates):
        for shares in windows.shares(update):
            feeds.append([])
            for number in spec["taken"]:
                tokens = lengths[shares[number]][:, np.newaxis]
                mask = np.arange(tokens.max()) < tokens
                ids = random.integers(0, size.vocabulary, mask.shape, np.int32)
                feeds[-1] += [ids, mask.astype(np.int32)]
    return feeds


if __name__ == "__main__":
    main()
