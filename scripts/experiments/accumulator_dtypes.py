"""Measures the error of accumulators in fewer bits, by the number of micro-steps.

    python scripts/experiments/accumulator_dtypes.py

Trains a perceptron of float32 variables with `accumulator_dtype` float32, bfloat16 and
float16, over windows of K micro-batches of the same examples, and prints for each K

    gradient   ||mean - mean in float32|| / ||mean in float32||    of the first update
    weights    max |w - w in float32| / max |w in float32|         after 20 updates

By Adam, which divides by a gradient's size, so that small errors count as much as large
ones. Exit codes: 0; 1 if an error of bfloat16's gradient is above sqrt(K) / 256, which
K roundings to 8 bits explain; 2 for invalid flags.
"""

import sys

import numpy as np

from estimator_accum.runs.command_line import OneSentenceParser, exit_code_of
from estimator_accum.runs.program import quiet_import

with quiet_import(sys.argv[1:]):
    import tensorflow as tf

    from estimator_accum import make_accumulating_train_op

v1 = tf.compat.v1

_WIDTH, _EXAMPLES = 64, 256
_DTYPES = (tf.float32, tf.bfloat16, tf.float16)


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_argument(
        "--micro_steps",
        nargs="+",
        type=int,
        default=[4, 16, 64, 256],
        choices=[4, 16, 64, 256],
        help="K, default: %(default)s",
    )
    parser.add_numbers(("updates", 20, "updates"))
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: _table(flags))


def _table(flags) -> int:
    is_explained = True
    for steps in flags.micro_steps:
        (mean, weights), *others = (
            _train(dtype, steps, flags.updates) for dtype in _DTYPES
        )
        for dtype, (other_mean, other_weights) in zip(_DTYPES[1:], others, strict=True):
            norm = np.linalg.norm
            gradient = norm(other_mean - mean) / norm(mean)
            difference = np.max(np.abs(other_weights - weights))
            print(
                f"K={steps:<4} {dtype.name:<9} gradient {gradient:.1e}  "
                f"weights {difference / np.max(np.abs(weights)):.1e}"
            )
            if dtype == tf.bfloat16:
                is_explained &= bool(gradient <= steps**0.5 / 256)
    return int(not is_explained)


def _train(dtype: tf.DType, steps: int, updates: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean gradient of the first update, and the weights after the last."""
    random = np.random.default_rng(0)
    x = random.normal(size=[updates, _EXAMPLES, _WIDTH]).astype(np.float32)
    y = np.sin(x.sum(2, keepdims=True)).astype(np.float32)
    means = []

    class Adam(v1.train.AdamOptimizer):
        def apply_gradients(self, grads_and_vars, global_step=None, name=None):
            means.append(tf.concat([tf.reshape(g, [-1]) for g, _ in grads_and_vars], 0))
            with tf.control_dependencies([kept.assign(means[0])]):
                return super().apply_gradients(grads_and_vars, global_step, name)

    with tf.Graph().as_default(), v1.Session() as session:
        features = v1.placeholder(tf.float32, [None, _WIDTH])
        labels = v1.placeholder(tf.float32, [None, 1])
        v1.set_random_seed(1)
        size = _WIDTH * _WIDTH + _WIDTH
        kept = v1.get_variable("kept", [size], trainable=False)
        hidden = tf.tanh(features @ v1.get_variable("hidden", [_WIDTH, _WIDTH]))
        loss = tf.reduce_mean(
            (hidden @ v1.get_variable("output", [_WIDTH, 1]) - labels) ** 2
        )
        v1.train.get_or_create_global_step()
        train_op = make_accumulating_train_op(
            loss, Adam(0.01), steps, accumulator_dtype=dtype
        )
        session.run(v1.global_variables_initializer())
        mean = None
        for update in range(updates):
            for part in np.split(np.arange(_EXAMPLES), steps):
                batch = {features: x[update, part], labels: y[update, part]}
                session.run(train_op, batch)
            mean = session.run(kept) if mean is None else mean
        weights = session.run(v1.trainable_variables())
    return mean, np.concatenate([value.ravel() for value in weights])


if __name__ == "__main__":
    sys.exit(main())
