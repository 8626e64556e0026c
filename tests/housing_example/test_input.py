"""CSV files as input."""

import re

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from estimator_accum.programs.batches import Batches
from housing_example import demo_data, input_pipeline
from housing_example.features import feature_columns, measure
from housing_example.table import COLUMNS, TARGET, checksum, read_table, split

_ROW = "0.00632,18,2.31,0,0.538,6.575,65.2,4.09,1,296,15.3,396.9,4.98,24"
_NAMES = ",".join(COLUMNS)


def _read(tmp_path, text: str) -> pd.DataFrame:
    path = tmp_path / "houses.csv"
    path.write_text(text)
    return read_table(str(path))


def _with(cell: str, column: str) -> str:
    cells = _ROW.split(",")
    cells[COLUMNS.index(column)] = cell
    return ",".join(cells)


def test_columns_without_names_are_those_of_the_boston_file(tmp_path):
    table = _read(tmp_path, f"{_ROW}\n{_with('1', 'CHAS')}\n")
    assert tuple(table.columns) == COLUMNS
    assert table["CRIM"].tolist() == [0.00632, 0.00632]
    assert table["CHAS"].tolist() == [0, 1] and table["CHAS"].dtype == np.int64
    assert table["MEDV"].tolist() == [24, 24]


@pytest.mark.parametrize(
    "change",
    [
        str.lower,
        lambda text: text.replace(",", " , "),
        lambda text: "\ufeff" + text.replace("\n", "\r\n"),
        lambda text: "\n \n" + text.replace("\n", "\n\n"),
        lambda text: re.sub(r"([A-Z]+)", r'"\1"', text),
        lambda text: text.replace("MEDV", "MEDV,town").replace("24", "24,Nahant"),
    ],
    ids=["lower case", "spaces", "Windows", "blank lines", "quotes", "one more"],
)
def test_columns_with_names_are_read_in_any_case_and_order(tmp_path, change):
    names, cells = _NAMES.split(","), _ROW.split(",")
    turned = f"{','.join(names[::-1])}\n{','.join(cells[::-1])}\n"
    expected = _read(tmp_path, f"{_ROW}\n")
    pd.testing.assert_frame_equal(_read(tmp_path, turned), expected)
    text = change(f"{_NAMES}\n{_ROW}\n")
    pd.testing.assert_frame_equal(_read(tmp_path, text), expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", r"houses\.csv must hold at least one example. Received: an empty file"),
        (" \n\n", "must hold at least one example. Received: an empty file"),
        (f"{_NAMES}\n", "at least one example. Received: only the columns' names"),
        (f"{_NAMES[:-5]}\n{_ROW[:-3]}\n", r"columns CRIM,ZN.* line without MEDV\. Add"),
        (f"a,b\n{_ROW}\n", "cells on every line.*Expected 2 fields in line 2, saw 14"),
        ("a,b\n1,2\n", "a first line without CRIM, ZN, INDUS, .*, MEDV. Add"),
        ("1,2\n", r"must have the 14 columns CRIM,.* 2 columns without names\. Name"),
        (_ROW.replace(",", " "), "without CRIM"),
        (f"{_NAMES},crim\n{_ROW},1\n", "name each column once. Received: CRIM 2 times"),
        (f"{_ROW}\n{_with('many', 'RM')}", "line 2 must have a number for RM.*'many'"),
        (f"{_NAMES}\n\n{_with('6,5', 'RM')}\n", "Expected 14 fields in line 3, saw 15"),
        (f"{_NAMES}\n\n{_ROW}\n{_with('', 'B')}\n", "line 4 must .* for B. .*: ''"),
        (f"{_ROW}\n1,2,3\n", "line 2 must have a number for CHAS. Received: ''"),
        (_with("NaN", "LSTAT"), "line 1 must have a number for LSTAT. .*'NaN'. Corr"),
        (_with("NA", "CRIM"), "line 1 must have a number for CRIM. Received: 'NA'"),
        (_with("inf", "TAX"), "less than 1e[+]12 in size for TAX. Received: 'inf'"),
        (_with("-1e12", "TAX"), "less than 1e[+]12 in size for TAX. Received: '-1e1"),
        (_with("True", "AGE"), "must have a number for AGE. Received: 'True'"),
        (_with("2", "CHAS"), "line 1 must have 0 or 1 for CHAS. Received: '2'"),
        (_with("0.5", "CHAS"), "line 1 must have 0 or 1 for CHAS. Received: '0.5'"),
        (_with("-0.1", "CRIM"), "line 1 must have a number >= 0 for CRIM. .*'-0.1'"),
        (_with("0", "MEDV"), "line 1 must have a price > 0 for MEDV. Received: '0'"),
        (_with("dear", "MEDV"), "must have a number for MEDV. Received: 'dear'"),
        (f'{_ROW}\n"{_ROW}\n', "as many cells on every line.*EOF inside string"),
    ],
)
def test_unfit_file_is_refused_with_file_and_line(tmp_path, text, expected):
    with pytest.raises(ValueError, match=expected) as refused:
        _read(tmp_path, text)
    assert str(tmp_path / "houses.csv") in str(refused.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("image.csv", "a CSV file in UTF-8. Received: a file that"),
        ("missing.csv", "that can be read. Received: {path} [(]"),
        (".", "that can be read. Received: {path} [(]"),
    ],
)
def test_file_that_cannot_be_read_is_refused(tmp_path, name, sentence):
    (tmp_path / "image.csv").write_bytes(b"\x89PNG\xff")
    path = str(tmp_path / name)
    with pytest.raises(ValueError, match=sentence.format(path=path)):
        read_table(path)


def test_split_is_the_same_each_time_and_loses_no_row():
    table = demo_data.generate()
    train, test = split(table, "the data")
    assert (len(train), len(test)) == (354, 152)  # an epoch is two updates of 177
    again = split(demo_data.generate(), "the data")
    pd.testing.assert_frame_equal(again[1], test)
    pd.testing.assert_frame_equal(pd.concat([train, test]).sort_index(), table)


def test_one_row_cannot_be_split():
    with pytest.raises(ValueError, match="a.csv must hold at least 2 .* Received: 1."):
        split(demo_data.generate(1), "a.csv")


def test_checksum_tells_examples_and_their_order_apart():
    table = demo_data.generate(9)
    changed = table.assign(MEDV=table["MEDV"].where(table.index != 4, 10.0))
    tables = [(table, table), (table, changed), (table[::-1], table), (table,)]
    assert len({checksum(*table) for table in tables}) == 4
    again = demo_data.generate(9)
    assert checksum(table) == checksum(again)


def _batches(input_fn, count: int) -> list[tuple[dict, np.ndarray]]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.set_random_seed(0)
        dataset = input_fn()
        following = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
        return [session.run(following) for _ in range(count)]


def _prices(csv, count: int, size: int, steps: int = 1, **options) -> np.ndarray:
    options = {"shuffle_buffer": 20, "seed": 0} | options
    batches = Batches(size * steps, steps, 1)
    input_fn = input_pipeline.train_input_fn(csv, batches, **options)
    return np.concatenate([labels[:, 0] for _, labels in _batches(input_fn, count)])


def test_cells_reach_the_network_as_pandas_read_them(csv):
    table = read_table(str(csv))
    ((features, labels),) = _batches(input_pipeline.eval_input_fn(csv, 50), 1)
    assert set(features) == set(COLUMNS) - {TARGET}
    for name, values in features.items():
        expected = table[name].to_numpy().astype(values.dtype)
        np.testing.assert_array_equal(values, expected, err_msg=name)
    expected = table[[TARGET]].to_numpy(np.float32)
    np.testing.assert_array_equal(labels, expected)


def test_order_of_the_examples_does_not_depend_on_the_micro_batch(csv):
    small = _prices(csv, 30, 3, steps=3)
    np.testing.assert_array_equal(small, _prices(csv, 10, 9))
    np.testing.assert_array_equal(small, _prices(csv, 30, 3))
    table = read_table(str(csv))
    for epoch in range(4):  # each has every example once
        seen = np.sort(small[20 * epoch : 20 * (epoch + 1)])
        np.testing.assert_allclose(seen, np.sort(table[TARGET]), rtol=1e-6)
    assert np.any(small[:20] != small[20:40])
    assert np.any(small != _prices(csv, 30, 3, seed=1))


def test_order_without_shuffling_is_that_of_the_file(csv):
    prices = _prices(csv, 10, 4, shuffle_buffer=0)
    table = read_table(str(csv))
    np.testing.assert_allclose(prices, np.tile(table[TARGET], 2), rtol=1e-6)


def test_training_goes_on_at_the_right_example(csv):
    rest = _prices(csv, 10, 3, steps=5, first_update=3)
    np.testing.assert_array_equal(rest, _prices(csv, 25, 3)[45:])


def test_workers_that_take_turns_read_every_second_update(csv):
    whole = _prices(csv, 20, 3).reshape([4, 15])
    for first in range(2):
        share = _prices(csv, 10, 3, steps=5, first_update=first, stride=2)
        np.testing.assert_array_equal(share, whole[first::2].ravel())


def test_replicas_share_each_update_and_leave_nothing_out(csv):
    whole = _prices(csv, 4, 11)
    batches = Batches(11, 2, 2)  # 2, 3, 3, 3

    def read(replicas, count):
        options = {"shuffle_buffer": 20, "seed": 0, "replicas": replicas}
        return _batches(input_pipeline.train_input_fn(csv, batches, **options), count)

    ours = [read([0], 8), read([1], 8)]
    shares = [ours[r][step][1][:, 0] for step in range(8) for r in range(2)]
    assert [len(share) for share in shares] == [2, 3, 3, 3] * 4
    np.testing.assert_array_equal(np.concatenate(shares), whole)
    # One process with both replicas reads their shares in turns.
    for share, (_, labels) in zip(shares, read(range(2), 16), strict=True):
        np.testing.assert_array_equal(labels[:, 0], share)


def test_input_layer_gets_log_of_crim_clipped_b_and_chas_as_a_category(csv):
    table = read_table(str(csv))
    assert table["CHAS"].nunique() == 2 and table["B"].min() < 300
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        features, _ = tf.compat.v1.data.make_one_shot_iterator(
            input_pipeline.eval_input_fn(csv, 50)()
        ).get_next()
        columns = feature_columns(measure(table))
        inputs = tf.compat.v1.feature_column.input_layer(features, columns)
        session.run(tf.compat.v1.tables_initializer())
        inputs = session.run(inputs)
    expected = table.drop(columns=[TARGET])  # input_layer sorts columns by name
    expected["CRIM"] = np.log(expected["CRIM"] + 0.01)
    expected["B"] = expected["B"].clip(300, 400)
    numbers = expected.drop(columns=["CHAS"])
    numbers = (numbers - numbers.mean()) / numbers.std(ddof=0)
    names = sorted(expected.columns)
    at = names.index("CHAS")
    chas = np.eye(2)[table["CHAS"]]
    left, right = numbers[names[:at]], numbers[names[at + 1 :]]
    np.testing.assert_allclose(inputs, np.hstack([left, chas, right]), atol=2e-5)


def test_constant_column_is_left_at_zero():
    table = demo_data.generate(7).assign(NOX=0.1)
    assert table["NOX"].to_numpy().std() > 0  # from rounding: all values are equal
    assert measure(table)["NOX"].deviation == 1.0
