"""A generated dataset with the columns of the Boston housing data.

No row is real: each is drawn from a tract's distance to a fictitious centre, with
ranges and rounding like those of Harrison and Rubinfeld (1978). The price is a
nonlinear function of the other columns, plus noise.
"""

import numpy as np
import pandas as pd

from housing_example.table import COLUMNS

NUM_ROWS = 506
_NOISE = 2.0  # standard deviation of a price's noise [1,000 dollars]


def generate(num_rows: int = NUM_ROWS, seed: int = 0) -> pd.DataFrame:
    """Returns a table with the columns `COLUMNS`, the same for the same seed.

    Args:
        num_rows: Number of rows, >= 1.
        seed: Random seed, 0 <= seed < 2**32.
    """
    # RandomState, not default_rng: NumPy guarantees that its numbers never change.
    random = np.random.RandomState(seed)

    def normal(mean, deviation, low, high):
        return np.clip(random.normal(mean, deviation, num_rows), low, high)

    centre = random.uniform(size=num_rows)  # 0: countryside, 1: the middle of the town
    table = {
        "CRIM": np.exp(normal(5.5 * centre - 4.0, 0.9, -5.1, 4.4)).round(5),
        "ZN": np.where(centre < 0.3, 12.5 + 5 * random.randint(0, 16, num_rows), 0.0),
        "INDUS": normal(18 * centre + 2, 3.0, 0.5, 27.7).round(2),
        "CHAS": (random.uniform(size=num_rows) < 0.07).astype(int),
        "NOX": normal(0.32 * centre + 0.4, 0.04, 0.385, 0.871).round(3),
        "RM": normal(6.5 - 0.5 * centre, 0.65, 3.6, 8.8).round(3),
        "AGE": normal(75 * centre + 30, 15.0, 2.9, 100.0).round(1),
        "DIS": np.exp(normal(2.0 - 1.6 * centre, 0.25, 0.12, 2.5)).round(4),
        "RAD": np.where(centre > 0.75, 24, random.randint(1, 9, num_rows)),
    }
    is_town = table["RAD"] == 24
    table["TAX"] = np.where(is_town, 666.0, normal(310, 60, 187, 470).round())
    table["PTRATIO"] = np.where(is_town, 20.2, normal(17.8, 2, 12.6, 22).round(1))
    is_low = random.uniform(size=num_rows) < 0.1
    table["B"] = np.where(
        is_low, random.uniform(0.3, 350, num_rows), normal(393, 4, 350, 396.9)
    ).round(2)
    rooms = table["RM"] - 6.3
    table["LSTAT"] = np.exp(
        normal(2.0 + 0.9 * centre - 0.35 * rooms, 0.35, 0.55, 3.63)
    ).round(2)
    price = _price(table) + random.normal(0, _NOISE, num_rows)
    table["MEDV"] = np.clip(price, 5.0, 50.0).round(1)
    return pd.DataFrame(table)[list(COLUMNS)]


def _price(table: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the price of each tract's houses without noise [1,000 dollars]."""
    rooms = table["RM"] - 6.3
    return (
        (23.0 + 4.0 * rooms + 2.5 * np.maximum(rooms, 0.0) ** 2)
        - 7.0 * np.log(table["LSTAT"] / 11.0)
        - 0.5 * np.log(table["CRIM"])
        - 2.5 * np.log(table["DIS"] / 3.5)
        - 14.0 * (table["NOX"] - 0.55)
        - 0.7 * (table["PTRATIO"] - 18.5)
        - 0.006 * (396.9 - np.maximum(table["B"], 300.0))
        + 2.5 * table["CHAS"]
    )
