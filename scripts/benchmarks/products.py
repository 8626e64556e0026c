"""The program that measures the matrix products of BERT's dense layers.

    python -m scripts.benchmarks.products '{"hidden": 384,
        "tokens": {"8 x 4": 90}, "precisions": ["float32", "bfloat16"]}'

It serves, for each number of tokens by its name and for each precision, seconds per FLOP
of all products of a layer's six kernels, forward and backward, by TensorFlow's `matmul`,
each in the fastest of its four layouts.
"""

import collections
import functools
import itertools
import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import

import tensorflow as tf

from scripts.benchmarks.base import serve

v1 = tf.compat.v1

_PRODUCTS, _CALLS = 10, 5  # products of a call, so many that its start is small


def main() -> None:
    """Reads sizes and precisions from the command line, and serves."""
    spec = json.loads(sys.argv[1])
    v1.disable_eager_execution()
    config = v1.ConfigProto()  # graph optimizers would compute equal products once
    config.graph_options.optimizer_options.opt_level = -1
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    session = v1.Session(config=config)
    answers = {}
    for name, tokens in spec["tokens"].items():
        for precision in spec["precisions"]:
            products = list(_products(session, spec["hidden"], tokens, precision))
            secs_per_flop = functools.partial(_secs_per_flop, products)
            answers[f"bound, {name}, {precision}"] = secs_per_flop
    serve({}, **answers)


def _products(session, hidden: int, tokens: int, precision: str):
    """Yields (FLOPs of a layer, of a call, a call for each layout) of each product."""
    counts = collections.Counter()  # of kernels that have a product [m, k] @ [k, n]
    wide = 4 * hidden
    for i, o, kernels in (hidden, hidden, 4), (hidden, wide, 1), (wide, hidden, 1):
        # output, gradient of the input, gradient of the kernel
        for shape in (tokens, i, o), (tokens, o, i), (i, tokens, o):
            counts[shape] += kernels
    for (m, k, n), count in counts.items():
        calls = []
        for is_first, is_second in itertools.product((False, True), repeat=2):
            first = v1.Variable(tf.ones([k, m] if is_first else [m, k], precision))
            second = v1.Variable(tf.ones([n, k] if is_second else [k, n], precision))
            session.run([first.initializer, second.initializer])
            first, second, done = tf.identity(first), tf.identity(second), tf.no_op()
            for _ in range(_PRODUCTS):
                with tf.control_dependencies([done]):
                    done = tf.matmul(first, second, is_first, is_second).op
            calls.append(session.make_callable(done))
        yield count * 2 * m * k * n, _PRODUCTS * 2 * m * k * n, calls


def _secs_per_flop(products: list[tuple]) -> float:
    secs = flops = 0
    for of_layer, of_call, calls in products:
        secs += of_layer / of_call * min(map(_secs, _CALLS * calls))
        flops += of_layer
    return secs / flops


def _secs(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
