"""Measures how far accumulated weights are from the big batch's, for Keras optimizers.

Trains one small regression, dense or with an embedding, for some updates: the plain
optimizer on whole batches, and on K = 4 micro-batches of the same examples by
`estimator_accum.keras.accumulate`, by Keras 3's `gradient_accumulation_steps` and by
GradientAccumulateOptimizer of the package gradient-accumulator, each if it is
available. Prints a Markdown table for each way, with a row for each optimizer and a
column for each feature. A cell is

    max |accumulated - whole| / max |whole|

over one variable, in float32 and in float64. The whole batch's slices of one row are
summed before Keras 3 gets them: Keras 2 does so itself, but Keras 3 does not, so its
own update depends on how a batch lists its rows. Exit code 1 if a cell of `accumulate`
is above the bound of its dtype.

    python scripts/experiments/keras_table.py
    python scripts/experiments/keras_table.py --keras=tf_keras --optimizers=SGD,Adam
"""

import argparse
import importlib
import importlib.util
import pathlib
import sys

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import numpy as np

from estimator_accum.runs.command_line import (
    OneSentenceParser,
    check_counts,
    exit_code_of,
)
from estimator_accum.runs.program import quiet_import

with quiet_import(sys.argv[1:]):
    import tensorflow as tf

    from estimator_accum.keras import accumulate

_BOUNDS = {"float32": 1e-6, "float64": 1e-12}
_K = 4
_MICRO_BATCH = 8
_OPTIMIZERS = {
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
_MISSING = "-"


class Regression:
    """Two variables and their gradients, on examples that never change.

    Args:
        keras: The Keras module.
        dtype: Dtype of variables and examples.
        is_sparse: Whether the first variable is looked up by rows.
        updates: Number of whole batches of examples.
    """

    def __init__(self, keras, dtype: str, is_sparse: bool, updates: int):
        rng = np.random.default_rng(0)
        examples = updates * _K * _MICRO_BATCH
        self._is_sparse = is_sparse
        self._rows = tf.constant(rng.integers(0, 30, [examples, 3]))
        self._x = tf.constant(rng.normal(size=[examples, 12]), dtype)
        self._y = tf.constant(rng.normal(size=[examples, 2]), dtype)
        shape = [30, 4] if is_sparse else [12, 4]
        start = [rng.normal(size=shape), rng.normal(size=[12 if is_sparse else 4, 2])]
        variable = getattr(keras, "Variable", tf.Variable)  # Keras 3 has its own
        self.variables = [
            variable(value.astype(dtype), dtype=dtype, name=name)
            for value, name in zip(start, ("first", "second"), strict=True)
        ]

    def pairs(self, start: tf.Tensor, size: int) -> list[tuple]:
        """Returns (gradient, variable) of the mean loss over some examples."""
        variables = [getattr(v, "_value", v) for v in self.variables]
        first, second = variables
        rows, x, y = (t[start : start + size] for t in (self._rows, self._x, self._y))
        with tf.GradientTape() as tape:
            if self._is_sparse:
                hidden = tf.reshape(tf.gather(first, rows), [size, 12])
            else:
                hidden = tf.tanh(tf.matmul(x, first))
            loss = tf.reduce_mean(tf.square(tf.matmul(hidden, second) - y))
        gradients = tape.gradient(loss, variables)
        return list(zip(map(_sum_of_rows, gradients), self.variables, strict=True))


def _sum_of_rows(gradient):
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def train(keras, make_optimizer, dtype, feature, updates, micro_batches) -> list:
    """Returns the variables' values after some updates.

    Args:
        keras: The Keras module.
        make_optimizer: Callable of keyword arguments that returns an optimizer.
        dtype: "float32" or "float64".
        feature: A column of the table.
        updates: Number of updates.
        micro_batches: Number of micro-batches per batch.
    """
    keras.backend.set_floatx(dtype)
    try:
        regression = Regression(keras, dtype, feature == "sparse", updates)
        rate = 0.05
        if feature == "schedule":
            rate = keras.optimizers.schedules.ExponentialDecay(rate, 3, 0.5)
        optimizer = make_optimizer(learning_rate=rate, **_FEATURES[feature])
        size = _K * _MICRO_BATCH // micro_batches

        @tf.function
        def step(start):
            optimizer.apply_gradients(regression.pairs(start, size))

        for start in range(0, updates * _K * _MICRO_BATCH, size):
            step(tf.constant(start))
        if feature == "EMA":
            optimizer.finalize_variable_values(regression.variables)
        return [variable.numpy() for variable in regression.variables]
    finally:
        keras.backend.set_floatx("float32")


def difference(values, expected) -> float:
    """Returns the largest difference of a variable, relative to its largest value."""
    pairs = zip(values, expected, strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def makers_of(keras, name: str) -> dict:
    """Returns the ways to accumulate with one optimizer, by their titles."""
    options = _OPTIMIZERS[name]

    def plain(**kwargs):
        return getattr(keras.optimizers, name)(**{**options, **kwargs})

    makers = {
        "plain": plain,
        "accumulate": lambda **kwargs: accumulate(plain(**kwargs), _K),
    }
    if hasattr(keras, "ops"):
        makers["gradient_accumulation_steps of Keras 3"] = lambda **kwargs: plain(
            gradient_accumulation_steps=_K, **kwargs
        )
    elif _has_andreped() and keras.__name__ == "keras":
        package = importlib.import_module("gradient_accumulator")
        makers["GradientAccumulateOptimizer"] = lambda **kwargs: (
            package.GradientAccumulateOptimizer(
                getattr(keras.optimizers.legacy, name)(**{**options, **kwargs}), _K
            )
        )
    return makers


def _has_andreped() -> bool:
    return importlib.util.find_spec("gradient_accumulator") is not None


def measure(keras, name: str, updates: int) -> dict[str, dict[str, tuple]]:
    """Returns the differences {way: {feature: (float32, float64)}} of an optimizer.

    A difference is None if that way refuses the feature.
    """
    makers = makers_of(keras, name)
    plain = makers.pop("plain")
    found = {title: {} for title in makers}
    for feature in _FEATURES:
        expected = {
            dtype: train(keras, plain, dtype, feature, updates, 1) for dtype in _BOUNDS
        }
        for title, maker in makers.items():
            found[title][feature] = tuple(
                _difference_or_none(
                    keras, maker, dtype, feature, updates, expected[dtype], title
                )
                for dtype in _BOUNDS
            )
    return found


def _difference_or_none(keras, maker, dtype, feature, updates, expected, title):
    try:
        values = train(keras, maker, dtype, feature, updates, _K)
    except Exception:
        if title == "accumulate":
            raise
        return None  # another project's way, without this feature
    return difference(values, expected)


def main(arguments: list[str] | None = None) -> int:
    """Reads the command line; returns the exit code."""
    parser = OneSentenceParser(__doc__)
    parser.add_argument(
        "--keras", default="keras", choices=["keras", "tf_keras"], help="the module"
    )
    parser.add_argument(
        "--optimizers", default=",".join(_OPTIMIZERS), help="names, by commas"
    )
    parser.add_numbers(("updates", 12, "of each run"))
    flags = parser.parse_args(arguments)
    return exit_code_of(lambda: compare(flags))


def compare(flags: argparse.Namespace) -> int:
    """Prints the tables; returns 1 if a bound is broken."""
    check_counts(flags)
    names = flags.optimizers.split(",")
    unknown = [name for name in names if name not in _OPTIMIZERS]
    if unknown:
        raise ValueError(
            f"`--optimizers` must be among {', '.join(_OPTIMIZERS)}. "
            f"Received: {', '.join(unknown)}. Leave it out for all of them."
        )
    if importlib.util.find_spec(flags.keras) is None:
        raise ValueError(
            "`--keras` must be installed. "
            f"Received: {flags.keras}, which is not. Leave it out."
        )
    keras = importlib.import_module(flags.keras)
    tables = {}
    for name in names:
        print(f"==> {name}", file=sys.stderr, flush=True)
        for title, row in measure(keras, name, flags.updates).items():
            tables.setdefault(title, {})[name] = row
    for title, rows in tables.items():
        print(f"{title}, {flags.keras} {keras.__version__}: float32, float64\n")
        print("\n".join(_markdown(rows)), end="\n\n")
    if not _has_andreped():
        print("The package gradient-accumulator is not installed: no table of it.")
    is_good = all(
        cell[i] <= bound
        for row in tables["accumulate"].values()
        for cell in row.values()
        for i, bound in enumerate(_BOUNDS.values())
    )
    return 0 if is_good else 1


def _markdown(rows: dict[str, dict[str, tuple]]) -> list[str]:
    lines = [f"| optimizer | {' | '.join(_FEATURES)} |", "|---" * 8 + "|"]
    for name, row in rows.items():
        cells = (", ".join(map(_text, row[feature])) for feature in _FEATURES)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _text(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.0e}"


if __name__ == "__main__":
    sys.exit(main())
