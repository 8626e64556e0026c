"""Measures the cost of a micro-step's options, on BERT.

Runs train ops that differ in one option in turns, in one process, on a BERT with random
weights and random tokens, and prints the median ratio of their times:

    on_nonfinite="raise"   1.019 of a micro-step without it
    noise_scale=True       0.992 of a micro-step without it

The time is that of forward pass, backward pass and accumulation together, off the
boundary. Exit code 1 if a ratio is above --largest_ratio.

    python scripts/benchmarks/micro_step_cost.py --hidden_size=512 --num_layers=4
"""

import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import
if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import numpy as np
import tensorflow as tf

from bert_finetune import modeling
from bert_finetune.optimization import AdamWeightDecayOptimizer
from estimator_accum import make_accumulating_train_op
from estimator_accum.runs.command_line import OneSentenceParser

# So many micro-steps that no boundary is reached: every run does the same work.
_MANY = 10**6


def main() -> None:
    parser = OneSentenceParser(__doc__)
    parser.add_argument("--hidden_size", type=int, default=512)
    parser.add_argument("--num_layers", type=int, default=4)
    parser.add_argument("--vocab_size", type=int, default=30522)
    parser.add_argument("--micro_batch_size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of one example")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--largest_ratio", type=float, default=1.03)
    arguments = parser.parse_args()
    for name, value in vars(arguments).items():
        if name != "largest_ratio" and value < 1:
            parser.error(f"--{name} must be an integer >= 1. Received: {value}.")
    if arguments.hidden_size % 64:
        parser.error(
            "--hidden_size must be a multiple of 64, the size of a head. "
            f"Received: {arguments.hidden_size}."
        )
    is_cheap = True
    for label, (base, option) in {
        'on_nonfinite="raise"': ({"on_nonfinite": "skip_window"}, {}),
        "noise_scale=True": ({}, {"noise_scale": True}),
    }.items():
        ratio = _ratio(arguments, base, option)
        print(f"{label:22} {ratio:.3f} of a micro-step without it", flush=True)
        is_cheap &= ratio <= arguments.largest_ratio
    sys.exit(int(not is_cheap))


def _ratio(arguments, base: dict, option: dict) -> float:
    """Returns the median over rounds of (time with `option`) / (time with `base`)."""
    run_base, run_option = _micro_step(arguments, base), _micro_step(arguments, option)
    ratios = []
    for number in range(arguments.rounds + 3):
        # The second run finds other caches, so the order alternates.
        order = [run_base, run_option][:: 1 if number % 2 else -1]
        secs = {run: _timed(run) for run in order}
        if number >= 3:  # the first runs compile and allocate
            ratios.append(secs[run_option] / secs[run_base])
    return statistics.median(ratios)


def _timed(run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _micro_step(arguments, options: dict):
    """Builds a model; returns a function that runs one micro-step of it."""
    config = modeling.BertConfig(
        vocab_size=arguments.vocab_size,
        hidden_size=arguments.hidden_size,
        num_hidden_layers=arguments.num_layers,
        num_attention_heads=arguments.hidden_size // 64,
        intermediate_size=4 * arguments.hidden_size,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    random = np.random.default_rng(0)
    shape = [arguments.micro_batch_size, arguments.tokens]
    with tf.Graph().as_default():
        ids = tf.constant(random.integers(0, config.vocab_size, shape), tf.int32)
        mask, segments = tf.ones_like(ids), tf.zeros_like(ids)
        output = modeling.encode(config, ids, mask, segments, is_training=True)
        logits = modeling.classifier_logits(
            output.pooled, 2, is_training=True, dropout_prob=0.0
        )
        labels = tf.zeros([arguments.micro_batch_size], tf.int32)
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        )
        optimizer = AdamWeightDecayOptimizer(tf.constant(1e-5))
        train_op = make_accumulating_train_op(loss, optimizer, _MANY, **options)
        session = tf.compat.v1.Session()
        session.run(tf.compat.v1.global_variables_initializer())
    return session.make_callable(train_op)


if __name__ == "__main__":
    main()
