"""The program of one contender: builds one way to accumulate, then runs it on demand.

    python -m scripts.benchmarks.micro_steps '{"way": "this project",
        "size": [4, 512, 8], "steps": 4, "micro_batch_size": 8, "tokens": 16,
        "micro_steps": 8}'

It serves seconds per micro-step, over whole windows, and its peak resident memory
[bytes].
"""

import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow's import

import tensorflow as tf

from scripts.benchmarks.base import peak_bytes, serve
from scripts.benchmarks.models import Size, classification_loss, token_ids
from scripts.benchmarks.ways import GRAPH_WAYS, trained


def main() -> None:
    """Reads the contender from the command line, and serves."""
    spec = json.loads(sys.argv[1])
    steps = spec["steps"]
    run, facts = _micro_step(spec)
    count = steps * max(1, spec["micro_steps"] // steps)  # whole windows
    for _ in range(2 * steps):  # the first ones compile and allocate
        run()

    def secs_per_micro_step():
        start = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - start) / count

    serve(facts, secs=secs_per_micro_step, peak_bytes=peak_bytes)


def _micro_step(spec: dict):
    """Returns (a function that runs one micro-step, the byte counts of the bound)."""
    tf.compat.v1.disable_eager_execution()
    size = Size(*spec["size"])
    ids = token_ids(size, spec["micro_batch_size"], spec["tokens"])
    loss = classification_loss(size, ids.read_value())
    variables = tf.compat.v1.trainable_variables()
    train_op = GRAPH_WAYS[spec["way"]](loss, spec["steps"])
    session = tf.compat.v1.Session()
    session.run(tf.compat.v1.global_variables_initializer())
    is_sparse = [isinstance(g, tf.IndexedSlices) for g, _ in trained(loss)]
    sizes = [_bytes(variable) for _, variable in trained(loss)]
    rows = spec["micro_batch_size"] * spec["tokens"]
    return session.make_callable(train_op), {
        "parameter_bytes": sum(map(_bytes, variables)),
        "dense_bytes": sum(s for s, sparse in zip(sizes, is_sparse) if not sparse),
        "sparse_bytes": sum(
            rows * 4 * v.shape[-1]
            for (_, v), sparse in zip(trained(loss), is_sparse)
            if sparse
        ),
    }


def _bytes(variable) -> int:
    return variable.shape.num_elements() * variable.dtype.size


if __name__ == "__main__":
    main()
