"""Measures how far accumulated weights are from the big batch's, for every optimizer.

Trains one small regression for 30 updates with each optimizer of `tf.compat.v1.train`,
once on whole batches without accumulation, and once accumulating over K micro-batches
of the same examples: K in {1, 2, 3, 4, 7}, with and without clipping, at a constant and
at a decaying learning rate, in float32 and float64. The model has a dense variable and
an embedding, whose gradient both optimizers get as `IndexedSlices`. Prints a Markdown
table with a row for each optimizer; each cell is the maximum over all runs of

    max |accumulated - whole| / max |whole|

within one variable. Exit code 1 if a cell is above the bound of its dtype.
SyncReplicasOptimizer is not in the table: it accumulates by itself, and is refused.

    python scripts/experiments/optimizer_table.py --output=optimizers.csv
"""

import csv
import itertools
import pathlib
import sys
from typing import NamedTuple

import numpy as np

from estimator_accum.runs.command_line import OneSentenceParser
from estimator_accum.runs.program import quiet_import

with quiet_import(sys.argv[1:]):
    import tensorflow as tf

    from estimator_accum import get_or_create_update_step, make_accumulating_train_op

v1 = tf.compat.v1

# name -> optimizer(learning_rate, update_step)
_OPTIMIZERS = {
    "Adadelta": lambda rate, _: v1.train.AdadeltaOptimizer(100 * rate, epsilon=1e-3),
    "Adagrad": lambda rate, _: v1.train.AdagradOptimizer(rate),
    "AdagradDA": lambda rate, step: v1.train.AdagradDAOptimizer(
        rate, step, l2_regularization_strength=0.01
    ),
    "Adam": lambda rate, _: v1.train.AdamOptimizer(rate),
    "Ftrl": lambda rate, _: v1.train.FtrlOptimizer(
        rate, l1_regularization_strength=0.01
    ),
    "GradientDescent": lambda rate, _: v1.train.GradientDescentOptimizer(rate),
    "Momentum": lambda rate, _: v1.train.MomentumOptimizer(rate, 0.9),
    "Momentum (Nesterov)": lambda rate, _: v1.train.MomentumOptimizer(
        rate, 0.9, use_nesterov=True
    ),
    # Regularization strengths must be tensors of the variables' dtype.
    "ProximalAdagrad": lambda rate, _: v1.train.ProximalAdagradOptimizer(
        rate, 0.1, tf.constant(0.001, rate.dtype), tf.constant(0.01, rate.dtype)
    ),
    "ProximalGradientDescent": lambda rate, _: (
        v1.train.ProximalGradientDescentOptimizer(
            rate, tf.constant(0.001, rate.dtype), tf.constant(0.01, rate.dtype)
        )
    ),
    "RMSProp": lambda rate, _: v1.train.RMSPropOptimizer(rate, momentum=0.5),
    "RMSProp (centered)": lambda rate, _: v1.train.RMSPropOptimizer(
        rate, centered=True
    ),
}
_STEPS = (1, 2, 3, 4, 7)
_CLIP_NORMS = (None, 3.0)  # 3 is between the norms of the gradients here
_DECAYS = {"constant": 0.0, "decaying": 0.1}
_DTYPES = (tf.float32, tf.float64)
_VARIABLES = ("dense", "sparse")
_BATCH_SIZE = 84  # each of _STEPS divides it
_INPUTS, _ROWS, _WIDTH = 5, 40, 3


class _Batch(NamedTuple):
    """inputs [B, _INPUTS], ids [B, 2] of rows of the embedding, targets [B]."""

    inputs: np.ndarray
    ids: np.ndarray
    targets: np.ndarray


class _Run(NamedTuple):
    """A training graph; each run of `train_op` needs values for `feeds`."""

    feeds: _Batch
    decay: tf.Tensor
    train_op: tf.Operation
    weights: list[tf.Variable]


class _Row(NamedTuple):
    optimizer: str
    dtype: str
    gradient_accumulation_steps: int
    clip_norm: float | None
    learning_rate: str
    variable: str
    relative_difference: float


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="FILE.csv",
        help="where the difference of every run goes",
    )
    parser.add_argument(
        "--optimizers",
        type=lambda text: text.split(","),
        default=list(_OPTIMIZERS),
        metavar="NAME,NAME",
        help="some of the table's rows (default: all)",
    )
    parser.add_argument("--updates", type=int, default=30, help="default: 30")
    parser.add_argument(
        "--float32_bound", type=float, default=2e-5, help="default: 2e-5"
    )
    parser.add_argument(
        "--float64_bound", type=float, default=1e-12, help="default: 1e-12"
    )
    flags = parser.parse_args(arguments)
    unknown = [name for name in flags.optimizers if name not in _OPTIMIZERS]
    if unknown:
        parser.error(
            f"--optimizers must be of {', '.join(_OPTIMIZERS)}. "
            f"Received: {', '.join(unknown)}. Leave them out"
        )
    if flags.updates < 1:
        parser.error(
            f"--updates must be >= 1. Received: {flags.updates}. Leave it out for 30"
        )
    rows = _measure_all(flags.optimizers, flags.updates)
    _print_table(flags.optimizers, rows)
    if flags.output is not None:
        flags.output.parent.mkdir(parents=True, exist_ok=True)
        with flags.output.open("w", newline="") as file:
            csv.writer(file).writerows([_Row._fields, *rows])
    bounds = {"float32": flags.float32_bound, "float64": flags.float64_bound}
    is_within = all(_worst(rows, dtype=d) <= bound for d, bound in bounds.items())
    return 0 if is_within else 1


def _measure_all(names: list[str], updates: int) -> list[_Row]:
    batches = _make_batches(updates)
    rows = []
    for name in names:
        rows += _measure(name, batches)
        print(f"{name}: {_worst(rows, optimizer=name):.1e}", file=sys.stderr)
    return rows


def _make_batches(count: int) -> list[_Batch]:
    """Returns batches that each look up some rows, repeatedly, but never row 0."""
    random = np.random.default_rng(0)
    batches = []
    for _ in range(count):
        touched = random.choice(np.arange(1, _ROWS), 12, replace=False)
        batches.append(
            _Batch(
                random.normal(size=[_BATCH_SIZE, _INPUTS]),
                random.choice(touched, [_BATCH_SIZE, 2]),
                random.normal(size=_BATCH_SIZE),
            )
        )
    return batches


def _measure(name: str, batches: list[_Batch]) -> list[_Row]:
    """Compares one optimizer's runs with those of the plain optimizer."""
    rows = []
    for dtype, clip_norm in itertools.product(_DTYPES, _CLIP_NORMS):
        whole = _train(_make_plain, 1, batches, name, dtype, clip_norm)
        for steps in _STEPS:
            ours = _train(
                _make_accumulating, steps, batches, name, dtype, clip_norm, steps
            )
            for rate, variable in itertools.product(_DECAYS, _VARIABLES):
                difference = _relative_difference(
                    ours[rate][variable], whole[rate][variable]
                )
                rows.append(
                    _Row(name, dtype.name, steps, clip_norm, rate, variable, difference)
                )
    return rows


def _relative_difference(ours: np.ndarray, whole: np.ndarray) -> float:
    """Returns NaN if a run diverged; NaN fails every bound."""
    return float(np.max(np.abs(ours - whole)) / np.max(np.abs(whole)))


def _train(make_run, parts: int, batches: list[_Batch], *arguments) -> dict:
    """Trains at both learning rates; returns their final weights by name."""
    weights = {}
    with tf.Graph().as_default(), v1.Session() as session:
        run = make_run(*arguments)
        start = v1.global_variables_initializer()
        for rate, decay in _DECAYS.items():
            session.run(start)
            for batch in batches:
                cut = [np.split(field, parts) for field in batch]
                for fields in zip(*cut, strict=True):
                    feed = dict(zip(run.feeds, fields, strict=True))
                    session.run(run.train_op, {**feed, run.decay: decay})
            values = session.run(run.weights)
            weights[rate] = dict(zip(_VARIABLES, values, strict=True))
    return weights


def _make_accumulating(name: str, dtype, clip_norm, steps: int) -> _Run:
    feeds, loss, weights = _make_model(dtype)
    update_step = get_or_create_update_step()
    decay, rate = _learning_rate(update_step, dtype)
    optimizer = _OPTIMIZERS[name](rate, update_step)
    train_op = make_accumulating_train_op(loss, optimizer, steps, clip_norm)
    return _Run(feeds, decay, train_op, weights)


def _make_plain(name: str, dtype, clip_norm) -> _Run:
    """Builds the run without this library."""
    feeds, loss, weights = _make_model(dtype)
    global_step = v1.train.get_or_create_global_step()
    decay, rate = _learning_rate(global_step, dtype)
    optimizer = _OPTIMIZERS[name](rate, global_step)
    pairs = optimizer.compute_gradients(loss, weights)
    if clip_norm is not None:
        gradients = [gradient for gradient, _ in pairs]
        # A row that is looked up twice has one gradient, the sum.
        norm = tf.linalg.global_norm([tf.convert_to_tensor(g) for g in gradients])
        gradients, _ = tf.clip_by_global_norm(gradients, clip_norm, use_norm=norm)
        pairs = list(zip(gradients, weights, strict=True))
    return _Run(feeds, decay, optimizer.apply_gradients(pairs, global_step), weights)


def _learning_rate(step: tf.Variable, dtype) -> tuple[tf.Tensor, tf.Tensor]:
    decay = v1.placeholder(dtype, [])
    return decay, 0.05 / (1.0 + decay * tf.cast(step, dtype))


def _make_model(dtype) -> tuple[_Batch, tf.Tensor, list[tf.Variable]]:
    """Builds a linear regression on inputs and the sum of two embedding rows."""
    feeds = _Batch(
        v1.placeholder(dtype, [None, _INPUTS]),
        v1.placeholder(tf.int64, [None, 2]),
        v1.placeholder(dtype, [None]),
    )
    random = np.random.default_rng(1)
    dense, sparse = (
        v1.get_variable(name, initializer=tf.constant(random.normal(size=shape), dtype))
        for name, shape in zip(_VARIABLES, ([_INPUTS], [_ROWS, _WIDTH]), strict=True)
    )
    predicted = tf.linalg.matvec(feeds.inputs, dense)
    predicted += tf.reduce_sum(tf.gather(sparse, feeds.ids), [1, 2])
    loss = tf.reduce_mean(tf.square(predicted - feeds.targets))
    return feeds, loss, [dense, sparse]


def _worst(rows: list[_Row], **fields) -> float:
    chosen = [
        row.relative_difference
        for row in rows
        if all(getattr(row, field) == value for field, value in fields.items())
    ]
    return float(np.max(chosen))  # NaN if any is


def _print_table(names: list[str], rows: list[_Row]) -> None:
    columns = list(itertools.product([dtype.name for dtype in _DTYPES], _VARIABLES))
    lines = [["", *(f"{dtype}, {variable}" for dtype, variable in columns)]]
    lines.append(["---"] * (1 + len(columns)))
    for name in names:
        cells = [
            f"{_worst(rows, optimizer=name, dtype=dtype, variable=variable):.1e}"
            for dtype, variable in columns
        ]
        lines.append([name, *cells])
    for line in lines:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    sys.exit(main())
