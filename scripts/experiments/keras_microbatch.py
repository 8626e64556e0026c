"""Compares Keras's unsplit batches with `estimator_accum.keras.microbatch`.

    python scripts/experiments/keras_microbatch.py --keras=tf_keras

Trains 30 updates in float64 for each loss and kind of model, on batches of 10, 8, 6 and 1
examples, in 3 and in 4 micro-batches: some sizes are unequal, and some batches have fewer
micro-batches. Prints the largest difference of weights, slots, losses and metrics as a
Markdown table. Fails if a difference is above 1e-11.
"""

import importlib
import pathlib
import sys

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import numpy as np

from estimator_accum.programs.command_line import OneSentenceParser
from tests.helpers.models.keras_cut import LOSSES, MODELS, difference, train_on

_LIMIT = 1e-11
_SIZES, _EPOCHS = (10, 8, 6, 1, 1), 6  # 30 updates
_CUTS = (3, 4)


def main(arguments: list[str] | None = None) -> int:
    """Compares all cases; returns 1 if one differs."""
    parser = OneSentenceParser(__doc__)
    parser.add_argument("--keras", default="keras", help="module: keras or tf_keras")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--cuts", nargs="+", type=int, default=_CUTS)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each case")
    flags = parser.parse_args(arguments)
    keras = importlib.import_module(flags.keras)
    print(f"| {keras.__version__} | {' | '.join(flags.models)} |")
    print(f"|{'---|' * (1 + len(flags.models))}")
    largest, cuts = 0.0, [*flags.cuts] * flags.repeats
    for loss in flags.losses:
        cells = []
        for model in flags.models:
            value = _difference(keras, model, loss, cuts)
            largest = np.maximum(largest, value or 0.0)  # NaN stays
            cells.append("" if value is None else f"{value:.1e}")
        print(f"| {loss} | {' | '.join(cells)} |", flush=True)
    print(f"largest difference: {largest:.1e}, at most {_LIMIT} allowed")
    return int(not largest <= _LIMIT)


def _difference(keras, model: str, loss: str, cuts: list[int]) -> float | None:
    if (model, loss) == ("outputs", "class_weight"):
        return None  # Keras refuses them together
    whole = train_on(keras, model, loss, 1, _EPOCHS, _SIZES)
    return np.max(
        [
            difference(train_on(keras, model, loss, cut, _EPOCHS, _SIZES), whole)
            for cut in cuts
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
