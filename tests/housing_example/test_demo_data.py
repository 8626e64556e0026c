"""The generated dataset."""

import numpy as np
import pandas as pd
import pytest

from housing_example import demo_data
from housing_example.table import COLUMNS, TARGET, csv_text, read_table

pytestmark = pytest.mark.once


def test_data_is_the_same_each_time_and_other_with_another_seed():
    table = demo_data.generate()
    pd.testing.assert_frame_equal(table, demo_data.generate())
    assert not table.equals(demo_data.generate(seed=1))
    # The same numbers on every NumPy.
    assert table.iloc[0].tolist()[:4] == [0.27264, 0.0, 14.44, 0]


def test_data_passes_the_checks_of_a_csv_file(tmp_path):
    table = demo_data.generate()
    path = tmp_path / "houses.csv"
    path.write_text(csv_text(table))
    read = read_table(str(path))
    assert tuple(read.columns) == COLUMNS and len(read) == 506
    pd.testing.assert_frame_equal(read, table, check_dtype=False)


def test_ranges_are_those_of_the_boston_housing_data():
    table = demo_data.generate()
    lows = [0.006, 0, 0.4, 0, 0.38, 3.5, 2.9, 1.1, 1, 187, 12.6, 0.3, 1.7, 5]
    highs = [89, 100, 28, 1, 0.88, 8.8, 100, 12.2, 24, 711, 22, 396.9, 38, 50]
    for name, low, high in zip(COLUMNS, lows, highs, strict=True):
        values = table[name]
        assert low <= values.min() < values.max() <= high, name
        assert values.nunique() > 1, name


def test_price_follows_from_the_other_columns_but_for_the_noise():
    table = demo_data.generate()
    numbers = {name: table[name].to_numpy() for name in COLUMNS}
    noise = table[TARGET] - np.clip(demo_data._price(numbers), 5, 50)
    assert 1.8 < noise.std() < 2.2
    assert table[TARGET].std() > 7
