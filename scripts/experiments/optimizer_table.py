"""Measures how far accumulated weights are from the big batch's, for every optimizer.

    python scripts/experiments/optimizer_table.py
    python scripts/experiments/optimizer_table.py --interface=keras
    python scripts/experiments/optimizer_table.py --interface=tf_keras --optimizers=Adam

Trains one small regression with each optimizer: once on whole batches without
accumulation, and once accumulating over micro-batches of the same examples. Prints a
Markdown table with a row for each optimizer; each cell is the maximum over all runs of

    max |accumulated - whole| / max |whole|

within one variable. Exit code 1 if a cell of this project is above the bound of its dtype.

* `--interface=v1`, the default: the optimizers of `tf.compat.v1.train`, for 30 updates
  with K in {1, 2, 3, 4, 7}, with and without clipping, at a constant and at a decaying
  learning rate. A dense variable and an embedding, whose gradient both optimizers get as
  `IndexedSlices`. SyncReplicasOptimizer accumulates by itself, and is refused.
* `--interface=keras` or `tf_keras`: `estimator_accum.keras.accumulate` with K = 4, for 12
  updates, and a column for each feature of an optimizer; then the same table of Keras 3's
  `gradient_accumulation_steps` and of the package gradient-accumulator, each if it is
  available. The whole batch's slices of one row are summed before Keras 3 gets them:
  Keras 2 does so itself, but Keras 3 does not, so its own update depends on how a batch
  lists its rows.
"""

import argparse
import collections
import importlib
import importlib.util
import itertools
import pathlib
import sys

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import numpy as np

from estimator_accum.programs.command_line import OneSentenceParser, exit_code_of
from estimator_accum.programs.program import quiet_import

with quiet_import(sys.argv[1:]):
    import tensorflow as tf

    from estimator_accum import get_or_create_update_step, make_accumulating_train_op
    from estimator_accum.keras import accumulate

v1 = tf.compat.v1

# name -> optimizer(learning_rate, update_step)
V1_OPTIMIZERS = {
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
_V1_BOUNDS = {"float32": 2e-5, "float64": 1e-12}
_V1_UPDATES = 30
_STEPS = (1, 2, 3, 4, 7)
_CLIP_NORMS = (None, 3.0)  # 3 is between the norms of the gradients here
_DECAYS = (0.0, 0.1)
_BATCH_SIZE = 84  # each of _STEPS divides it
_INPUTS, _ROWS, _WIDTH = 5, 40, 3

_KERAS_OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.5},
    "Adam": {},
    "AdamW": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "Nadam": {},
    # At its default of 0.1 Ftrl loses digits of small gradients in the difference of
    # two square roots: float32 is then 1e-5 from float64, on whole batches too.
    "Ftrl": {"initial_accumulator_value": 0.0, "beta": 1.0},
    "Adafactor": {},
    "Lion": {},
}
_FEATURES = {
    "plain": {},
    "weight decay": {"weight_decay": 0.05},
    "EMA": {"use_ema": True, "ema_momentum": 0.9},
    "schedule": {},
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "sparse": {},
}
_KERAS_BOUNDS = {"float32": 1e-6, "float64": 1e-12}
_KERAS_UPDATES, _K, _MICRO_BATCH = 12, 4, 8
_OURS = "accumulate"


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    interfaces = ("v1", "keras", "tf_keras")
    parser.add_argument("--interface", default="v1", choices=interfaces)
    parser.add_argument(
        "--optimizers", help="names of rows, separated by commas (default: all)"
    )
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: _compare(flags))


def _compare(flags: argparse.Namespace) -> int:
    """Prints the tables; returns 1 if a bound is broken."""
    is_v1 = flags.interface == "v1"
    makers = V1_OPTIMIZERS if is_v1 else _KERAS_OPTIMIZERS
    names = flags.optimizers.split(",") if flags.optimizers else list(makers)
    if unknown := [name for name in names if name not in makers]:
        raise ValueError(
            f"`--optimizers` must be among {', '.join(makers)}. "
            f"Received: {', '.join(unknown)}. Leave it out for all of them."
        )
    if not is_v1 and importlib.util.find_spec(flags.interface) is None:
        raise ValueError(
            "`--interface` must be installed. "
            f"Received: {flags.interface}, which is not. Leave it out."
        )
    tables, bounds = {}, _V1_BOUNDS if is_v1 else _KERAS_BOUNDS
    for name in names:
        print(f"==> {name}", file=sys.stderr, flush=True)
        if is_v1:
            measured = {f"TensorFlow {tf.__version__}": measure_v1(name)}
        else:
            measured = measure_keras(importlib.import_module(flags.interface), name)
        for title, row in measured.items():
            tables.setdefault(title, {})[name] = row
    for title, rows in tables.items():
        print(f"\n{title}\n\n{_markdown(rows)}")
    ours = next(iter(tables.values()))
    return int(
        not all(
            difference <= bounds[dtype]
            for row in ours.values()
            for (dtype, _), difference in row.items()
        )
    )


def _markdown(rows: dict[str, dict[tuple[str, str], float | None]]) -> str:
    columns = list(next(iter(rows.values())))
    lines = [["", *map(", ".join, columns)], ["---"] * (1 + len(columns))]
    for name, row in rows.items():
        cells = ("-" if row[c] is None else f"{row[c]:.1e}" for c in columns)
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _relative_difference(ours: np.ndarray, whole: np.ndarray) -> float:
    """Returns NaN if a run diverged; NaN fails every bound."""
    return float(np.max(np.abs(ours - whole)) / np.max(np.abs(whole)))


# The optimizers of tf.compat.v1.train


def measure_v1(name: str) -> dict[tuple[str, str], float]:
    """Returns the largest differences of one optimizer by (dtype, variable)."""
    largest = collections.defaultdict(float)
    for dtype, clip_norm in itertools.product((tf.float32, tf.float64), _CLIP_NORMS):
        whole = _train_v1(name, dtype, clip_norm, None)
        for steps in _STEPS:
            ours = _train_v1(name, dtype, clip_norm, steps)
            for (variable, decay), value in ours.items():
                difference = _relative_difference(value, whole[variable, decay])
                column = dtype.name, variable
                value = np.maximum(largest[column], difference)  # or NaN
                largest[column] = float(value)
    return dict(largest)


def _train_v1(name: str, dtype, clip_norm: float | None, steps: int | None) -> dict:
    """Trains at both rates; returns the weights by (variable, decay of the rate).

    With `steps` None it trains without this library.
    """
    weights = {}
    with tf.Graph().as_default(), v1.Session() as session:
        feeds, loss, variables = _make_model(dtype)
        if steps is None:
            step = v1.train.get_or_create_global_step()
        else:
            step = get_or_create_update_step()
        decay_fed = v1.placeholder(dtype, [])
        rate = 0.05 / (1.0 + decay_fed * tf.cast(step, dtype))
        optimizer = V1_OPTIMIZERS[name](rate, step)
        if steps is None:
            train_op = _plain_train_op(loss, optimizer, variables, clip_norm, step)
        else:
            train_op = make_accumulating_train_op(loss, optimizer, steps, clip_norm)
        start = v1.global_variables_initializer()
        for decay in _DECAYS:
            session.run(start)
            for batch in _batches():
                cut = [np.split(field, steps or 1) for field in batch]
                for fields in zip(*cut, strict=True):
                    fed = dict(zip(feeds, fields, strict=True))
                    session.run(train_op, {**fed, decay_fed: decay})
            for variable, value in zip(variables, session.run(variables), strict=True):
                weights[variable.op.name, decay] = value
    return weights


def _plain_train_op(loss, optimizer, variables, clip_norm, step) -> tf.Operation:
    pairs = optimizer.compute_gradients(loss, variables)
    if clip_norm is not None:
        gradients = [gradient for gradient, _ in pairs]
        # A row that is looked up twice has one gradient, the sum.
        norm = tf.linalg.global_norm([tf.convert_to_tensor(g) for g in gradients])
        gradients, _ = tf.clip_by_global_norm(gradients, clip_norm, use_norm=norm)
        pairs = list(zip(gradients, variables, strict=True))
    return optimizer.apply_gradients(pairs, step)


def _make_model(dtype) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Variable]]:
    """Builds a linear regression on inputs and the sum of two embedding rows."""
    inputs = v1.placeholder(dtype, [None, _INPUTS])
    ids = v1.placeholder(tf.int64, [None, 2])
    targets = v1.placeholder(dtype, [None])
    random = np.random.default_rng(1)
    dense, sparse = (
        v1.get_variable(name, initializer=tf.constant(random.normal(size=shape), dtype))
        for name, shape in (("dense", [_INPUTS]), ("sparse", [_ROWS, _WIDTH]))
    )
    predicted = tf.linalg.matvec(inputs, dense)
    predicted += tf.reduce_sum(tf.gather(sparse, ids), [1, 2])
    loss = tf.reduce_mean(tf.square(predicted - targets))
    return [inputs, ids, targets], loss, [dense, sparse]


def _batches() -> list[list[np.ndarray]]:
    """Returns batches that each look up some rows, repeatedly, but never row 0."""
    random = np.random.default_rng(0)
    batches = []
    for _ in range(_V1_UPDATES):
        touched = random.choice(np.arange(1, _ROWS), 12, replace=False)
        inputs = random.normal(size=[_BATCH_SIZE, _INPUTS])
        ids = random.choice(touched, [_BATCH_SIZE, 2])
        batches.append([inputs, ids, random.normal(size=_BATCH_SIZE)])
    return batches


# The optimizers of Keras


def measure_keras(keras, name: str) -> dict[str, dict[tuple[str, str], float | None]]:
    """Returns {way to accumulate: {(dtype, feature): difference}} of one optimizer.

    A difference is None if another project's way refuses the feature.
    """
    makers = _makers_of(keras, name)
    plain = makers.pop("plain")
    tables = {f"{way}, {keras.__name__} {keras.__version__}": {} for way in makers}
    for dtype, feature in itertools.product(_KERAS_BOUNDS, _FEATURES):
        whole = _train_keras(keras, plain, dtype, feature, 1)
        for title, (way, maker) in zip(tables, makers.items(), strict=True):
            try:
                ours = _train_keras(keras, maker, dtype, feature, _K)
            except Exception:
                if way == _OURS:
                    raise
                tables[title][dtype, feature] = None
                continue
            tables[title][dtype, feature] = max(map(_relative_difference, ours, whole))
    return tables


def _makers_of(keras, name: str) -> dict:
    """Returns the ways to accumulate with one optimizer: title -> maker."""

    def make(home=keras.optimizers, **options):
        return getattr(home, name)(**{**_KERAS_OPTIMIZERS[name], **options})

    makers = {"plain": make, _OURS: lambda **options: accumulate(make(**options), _K)}
    if hasattr(keras, "ops"):
        makers["gradient_accumulation_steps of Keras 3"] = lambda **options: make(
            gradient_accumulation_steps=_K, **options
        )
    elif keras.__name__ == "keras" and importlib.util.find_spec("gradient_accumulator"):
        package = importlib.import_module("gradient_accumulator")
        makers["GradientAccumulateOptimizer"] = lambda **options: (
            package.GradientAccumulateOptimizer(
                make(keras.optimizers.legacy, **options), _K
            )
        )
    return makers


def _train_keras(keras, maker, dtype: str, feature: str, parts: int) -> list:
    """Returns the variables' values after training with batches split in `parts`."""
    keras.backend.set_floatx(dtype)
    try:
        variables, gradients_of = _regression(keras, dtype, feature == "sparse")
        rate = 0.05
        if feature == "schedule":
            rate = keras.optimizers.schedules.ExponentialDecay(rate, 3, 0.5)
        optimizer = maker(learning_rate=rate, **_FEATURES[feature])
        size = _K * _MICRO_BATCH // parts

        @tf.function
        def step(start):
            gradients = gradients_of(start, size)
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

        for start in range(0, _KERAS_UPDATES * _K * _MICRO_BATCH, size):
            step(tf.constant(start))
        if feature == "EMA":
            optimizer.finalize_variable_values(variables)
        return [variable.numpy() for variable in variables]
    finally:
        keras.backend.set_floatx("float32")


def _regression(keras, dtype: str, is_sparse: bool):
    """Returns two variables, and their gradients' function of (first example, number).

    With `is_sparse` the first variable is looked up by rows.
    """
    random = np.random.default_rng(0)
    examples = _KERAS_UPDATES * _K * _MICRO_BATCH
    data = [
        tf.constant(random.integers(0, 30, [examples, 3])),
        tf.constant(random.normal(size=[examples, 12]), dtype),
        tf.constant(random.normal(size=[examples, 2]), dtype),
    ]
    shapes = ([30, 4], [12, 2]) if is_sparse else ([12, 4], [4, 2])
    make_variable = getattr(keras, "Variable", tf.Variable)  # Keras 3 has its own
    variables = [
        make_variable(random.normal(size=shape).astype(dtype), dtype=dtype, name=name)
        for name, shape in zip(("first", "second"), shapes, strict=True)
    ]

    def gradients_of(start: tf.Tensor, size: int) -> list:
        first, second = (
            getattr(variable, "_value", variable) for variable in variables
        )
        rows, x, y = (column[start : start + size] for column in data)
        with tf.GradientTape() as tape:
            if is_sparse:
                hidden = tf.reshape(tf.gather(first, rows), [size, 12])
            else:
                hidden = tf.tanh(tf.matmul(x, first))
            loss = tf.reduce_mean(tf.square(tf.matmul(hidden, second) - y))
        return [
            sum_of_rows(gradient) for gradient in tape.gradient(loss, [first, second])
        ]

    return variables, gradients_of


def sum_of_rows(gradient):
    """Returns the gradient with the slices of each row summed."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


if __name__ == "__main__":
    sys.exit(main())
