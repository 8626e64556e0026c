"""Predicts house prices: accumulation of 59 x 3 examples against batches of 177.

    python -m housing_example.main

trains on generated data. Any CSV file with the columns CRIM, ZN, INDUS, CHAS, NOX, RM,
AGE, DIS, RAD, TAX, PTRATIO, B, LSTAT and MEDV works as well; without a test file, 30%
of the examples are kept for testing:

    python -m housing_example.main --train_csv=train.csv --test_csv=test.csv

Without sizes, an update is 3 micro-batches of 59 examples. Under a --strategy, the run
without accumulation, for the comparison, trains on one device. A stopped run resumes
from its last checkpoints when it is started again with the same flags.
"""

import pathlib
import sys

if __name__ == "__main__":  # also runs from a clone that is not installed
    sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from estimator_accum.programs.program import Program
from housing_example.settings import Settings

PROGRAM = Program(
    name="python -m housing_example.main",
    description=__doc__,
    settings=Settings,
    advice="Use a lower --learning_rate, or a --clip_norm, and another --output_dir.",
)
main = PROGRAM.run

if __name__ == "__main__":
    main(sys.argv)
