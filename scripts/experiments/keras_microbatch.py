"""Compares Keras's batches at once with `estimator_accum.keras.microbatch`.

    python scripts/experiments/keras_microbatch.py --keras=tf_keras --repeats=3

Trains 30 updates in float64 for each loss, kind of model and number of micro-batches,
and prints the largest difference of weights, slots, losses, metrics and predictions.
Fails if one is above 1e-11.
"""

import importlib
import itertools
import pathlib
import sys

if __name__ == "__main__":  # a clone runs without installation
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from estimator_accum.programs.command_line import OneSentenceParser
from tests.helpers.models.keras_cut import LOSSES, MODELS, difference, train

_LIMIT = 1e-11
_EPOCHS = 10  # of three updates each


def main(arguments: list[str] | None = None) -> int:
    """Compares all cases; returns 1 if one differs."""
    parser = OneSentenceParser(__doc__)
    parser.add_argument("--keras", default="keras", help="module: keras or tf_keras")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--cuts", nargs="+", type=int, default=[1, 3, 4, 10])
    parser.add_argument("--repeats", type=int, default=1, help="runs of each case")
    flags = parser.parse_args(arguments)
    keras = importlib.import_module(flags.keras)
    differing = 0
    for model, loss in itertools.product(flags.models, flags.losses):
        whole = train(keras, model, loss, 1, _EPOCHS)
        for cut in flags.cuts * flags.repeats:
            value = difference(train(keras, model, loss, cut, _EPOCHS), whole)
            differing += value > _LIMIT
            print(f"{model:12} {loss:14} {cut:3} {value:.1e}", flush=True)
    print(f"{differing} above {_LIMIT}")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
