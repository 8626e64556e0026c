"""The memory-bandwidth bound of a micro-step.

The program adds one array to another, both larger than any cache, with a thread per
core, and prints seconds per byte of traffic: two reads and a write per byte of an
array.

The bound of a micro-step is that pace times the least traffic of any accumulation by
gradient descent with clipping, for D bytes of dense gradients and S bytes of sparse
gradients' slices per micro-batch:

    first micro-step      nothing of D: the gradient's buffer may become the sum
    K - 1 micro-steps     3 D   read the gradient, read the sum, write the sum
    boundary              1 D   read the sum, for its norm
                          3 D   read the sum, read the variable, write the variable
    slices                7 S   the same for the rows that a micro-batch touches

in all (3 (K - 1) + 4) D / K + 7 S per micro-step. Data that stays in a cache costs
less, so a way may be below the bound.
"""

import concurrent.futures
import json
import os
import sys
import time

import numpy as np

from scripts.benchmarks.base import serve


def bound_secs(
    secs_per_byte: float, steps: int, dense_bytes: int, sparse_bytes: int
) -> float:
    """Returns the bound of one micro-step in a window of `steps` [s]."""
    traffic = (3 * (steps - 1) + 4) * dense_bytes / steps + 7 * sparse_bytes
    return secs_per_byte * traffic


def main() -> None:
    """Reads the bytes of an array from the command line, and serves."""
    threads = len(os.sched_getaffinity(0))
    floats = json.loads(sys.argv[1])["array_bytes"] // 4 // threads
    pairs = [
        (np.zeros(floats, np.float32), np.ones(floats, np.float32))
        for _ in range(threads)
    ]

    def add(pair):
        total, part = pair
        np.add(total, part, out=total)

    def secs_per_byte():
        start = time.perf_counter()
        list(pool.map(add, pairs))
        return (time.perf_counter() - start) / (3 * 4 * floats * threads)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(add, pairs))
        serve({}, secs=secs_per_byte)


if __name__ == "__main__":
    main()
